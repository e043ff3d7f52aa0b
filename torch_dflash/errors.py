"""The one error that is the user's to fix, and the check that most fields need."""

from numbers import Integral
from typing import Any

_LONGEST = 2000


class InputError(ValueError):
    """Bad input from outside: one line that names the field, its value and the remedy. The command exits with 2.

    Names and values from a file may hold line breaks, terminal codes or halves of surrogate pairs: they are escaped.
    """

    def __init__(self, message: str) -> None:
        if len(message) > _LONGEST:
            message = f"{message[: _LONGEST // 2]} ... {message[-_LONGEST // 4 :]}"
        super().__init__("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message))


def checked_integer(value: Any, name: str, lowest: int, highest: int | None = None, why: str = "") -> int:
    """`value` as an int, if it is an integer in lowest..highest. `why` says where the bounds come from."""
    bounds = f">= {lowest}" if highest is None else f"in {lowest}..{highest}"
    integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not integer or value < lowest or (highest is not None and value > highest):
        raise InputError(f"{name} is {value!r}: use an integer {bounds}{why and f' ({why})'}")
    return int(value)
