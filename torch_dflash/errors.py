"""The one error that is the user's to fix, and the check that most fields need."""

from numbers import Integral
from typing import Any


class InputError(ValueError):
    """Bad input from outside: one line that names the field, its value and the remedy. The command exits with 2."""


def checked_integer(value: Any, name: str, lowest: int, highest: int | None = None, why: str = "") -> int:
    """`value` as an int, if it is an integer in lowest..highest. `why` says where the bounds come from."""
    bounds = f">= {lowest}" if highest is None else f"in {lowest}..{highest}"
    integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not integer or value < lowest or (highest is not None and value > highest):
        raise InputError(f"{name} is {value!r}: use an integer {bounds}{why and f' ({why})'}")
    return int(value)
