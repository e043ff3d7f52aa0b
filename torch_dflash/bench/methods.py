"""What can be measured: a method is a name and what makes its `Pace`. Another one is another entry."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_dflash.errors import InputError

if TYPE_CHECKING:
    from torch_dflash.pace import Pace
    from torch_dflash.pair import Pair

PLAIN = "plain"  # what the others are compared with


@dataclass(frozen=True)
class Method:
    """`pace` gets the pair and --num-drafts. needs_drafter: of the pair that is loaded."""

    pace: Callable[["Pair", int | str | None], "Pace"]
    needs_drafter: bool


def _plain(pair: "Pair", num_drafts: int | str | None) -> "Pace":
    from torch_dflash.service import make_pace

    return make_pace(pair, "plain", None)


def _dflash(pair: "Pair", num_drafts: int | str | None) -> "Pace":
    from torch_dflash.service import make_pace

    return make_pace(pair, "dflash", num_drafts)


METHODS = {PLAIN: Method(_plain, False), "dflash": Method(_dflash, True)}


def check_methods(names: Sequence[str]) -> None:
    """Raises InputError for a name that is unknown or comes twice."""
    for name in names:
        if name not in METHODS:
            raise InputError(f"--method {name!r} is unknown: use {', '.join(METHODS)}, with commas between them")
        if names.count(name) > 1:
            raise InputError(f"--method has {name!r} twice: name each method once")
