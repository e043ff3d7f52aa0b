"""What can be measured."""

from collections.abc import Sequence

from torch_dflash.errors import InputError

PLAIN = "plain"  # what the others are compared with
METHODS = (PLAIN, "dflash", "eagle3")  # as `generate` knows them
DEFAULT = (PLAIN, "dflash")


def check_methods(names: Sequence[str]) -> None:
    """Raises InputError for a name that is unknown or comes twice."""
    for name in names:
        if name not in METHODS:
            raise InputError(f"--method {name!r} is unknown: use {', '.join(METHODS)}, with commas between them")
        if names.count(name) > 1:
            raise InputError(f"--method has {name!r} twice: name each method once")
