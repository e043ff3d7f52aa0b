"""A JSON object whose fields are read by type and refused by name."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch_dflash.errors import InputError

MOST_LAYERS = 1024
LARGEST_SIZE = 2**24  # of a hidden size or a vocabulary: a product of three still fits in 64 bits
LARGEST_HEAD = 2**16
LARGEST_JSON = 1 << 27  # bytes; a tokenizer is the largest JSON file of a model
MOST_LEVELS = 50
_REQUIRED = None  # a default of None means that the field must be there
_SHOWN = 200  # characters of a value that an error shows


@dataclass(frozen=True)
class Fields:
    """One JSON object and where it stands: refusals name file, field and value. null counts as absent."""

    values: dict[str, Any]
    origin: str

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def refuse(self, name: str, remedy: str) -> NoReturn:
        state = f"is {_shown(self.values[name])}" if name in self.values else "is missing"
        raise InputError(f"{self.origin}: {name} {state}; {remedy}")

    def integer(self, name: str, low: int = 1, default: int | None = _REQUIRED, high: int = 2**31 - 1) -> int:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or not low <= value <= high:
            self.refuse(name, f"it must be an integer in {low}..{high}")
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
    """The object in a JSON file. Raises InputError."""
    values = read_json(path)
    if type(values) is not dict:
        raise InputError(f"{path}: must hold a JSON object; download it again")
    return Fields(values, str(path))


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises InputError for anything that is not one, or says a name twice."""
    try:
        if not path.is_file():  # a pipe would never end
            raise InputError(f"{path}: not found; give the folder of a model, with its {path.name}")
        if path.stat().st_size > LARGEST_JSON:
            raise InputError(f"{path}: is larger than {LARGEST_JSON} bytes; download it again")
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=once)
    except InputError:
        raise
    except (OSError, ValueError, RecursionError) as error:  # ValueError covers bad JSON and bad UTF-8
        raise InputError(f"{path}: cannot be read as JSON ({error}); download it again") from None
    if _deeper(content, MOST_LEVELS):  # comparing or printing it could run out of stack
        raise InputError(f"{path}: is nested more than {MOST_LEVELS} levels deep; download it again")
    return content


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Of a name that stands twice nobody can say which value was meant: ValueError."""
    content = dict(pairs)
    if len(content) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{name} stands there twice")
    return content


def string_list(fields: Fields, name: str) -> list[str]:
    value = [] if fields.get(name) is None else fields.get(name)
    if type(value) is not list or any(type(item) is not str for item in value):
        fields.refuse(name, "it must be a list of strings")
    return value


def _deeper(value: Any, levels: int) -> bool:
    level = [value]
    for _ in range(levels):
        level = [inner for outer in level for inner in _inside(outer)]
    return bool(level)


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if type(value) is dict else value if type(value) is list else ()


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
