"""A JSON object whose fields are read by type and refused by name."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch_dflash.errors import InputError

_REQUIRED = None  # a default of None means that the field must be there


@dataclass(frozen=True)
class Fields:
    """One JSON object and where it stands: refusals name file, field and value. null counts as absent."""

    values: dict[str, Any]
    origin: str

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def refuse(self, name: str, remedy: str) -> NoReturn:
        state = f"is {json.dumps(self.values[name])}" if name in self.values else "is missing"
        raise InputError(f"{self.origin}: {name} {state}; {remedy}")

    def integer(self, name: str, low: int = 1, default: int | None = _REQUIRED) -> int:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or not low <= value < 2**31:
            self.refuse(name, f"it must be an integer >= {low} and below 2**31")
        return value

    def number(self, name: str, default: float | None = _REQUIRED, zero: bool = False) -> float:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not (0 < value < 1e30 or (zero and value == 0)):
            self.refuse(name, "it must be a finite number " + (">= 0" if zero else "> 0"))
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is not None and type(value) is not bool:
            self.refuse(name, "it must be true or false")
        return default if value is None else value

    def child(self, name: str) -> "Fields":
        value = {} if self.get(name) is None else self.get(name)
        if type(value) is not dict:
            self.refuse(name, "it must be an object or null")
        return Fields(value, f"{self.origin}: {name}")


def load_fields(path: Path) -> Fields:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: not found; give the folder of a model, with its config.json") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError covers bad JSON and bad UTF-8
        raise InputError(f"{path}: cannot be read as JSON ({error}); download it again") from None
    if type(values) is not dict:
        raise InputError(f"{path}: must hold a JSON object; download it again")
    return Fields(values, str(path))


def string_list(fields: Fields, name: str) -> list[str]:
    value = [] if fields.get(name) is None else fields.get(name)
    if type(value) is not list or any(type(item) is not str for item in value):
        fields.refuse(name, "it must be a list of strings")
    return value
