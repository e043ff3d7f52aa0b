"""Which prompts: sets that ship, sets by name in a folder, any file of JSON lines, or datasets of the hub."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_dflash.bench.hub_datasets import FORM, read_hub
from torch_dflash.errors import InputError
from torch_dflash.train.records import read_prompts

OWN = ("arithmetic", "code", "questions", "rewriting")  # written for this project
# Published sets -> names of their files. They are not ours to ship.
NAMED = {
    name: (f"{name}.jsonl",) for name in ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench", "aime24", "aime25")
} | {"alpaca": ("alpaca.jsonl", "alpaca80.jsonl"), "swe-bench": ("swe-bench.jsonl", "swe_samples.jsonl")}
_SHIPPED = Path(__file__).parent.parent / "data" / "prompts"


@dataclass(frozen=True)
class Dataset:
    """A set's name, where it was read from, and the first turns that are asked."""

    name: str
    origin: str
    prompts: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Changes when a prompt does."""
        return hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()[:16]


def read_datasets(names: Sequence[str], folder: Path | None, limit: int) -> tuple[Dataset, ...]:
    """The first `limit` prompts of each set. A name is one of OWN, one of NAMED (in `folder`), a file, or a dataset of
    the hub as hub_datasets.py reads it. Raises InputError."""
    sets = tuple(_read(name, folder, limit) for name in names)
    for name in {dataset.name for dataset in sets}:
        if sum(dataset.name == name for dataset in sets) > 1:
            raise InputError(f"--dataset has {name!r} twice: name each set once, and give files other names")
    return sets


def _read(name: str, folder: Path | None, limit: int) -> Dataset:
    if name.startswith("hub:"):
        called, origin, prompts = name.removeprefix("hub:").replace("/", "-"), name, read_hub(name, limit)
    else:
        path = _find(name, folder)
        called, origin = name if name in (*OWN, *NAMED) else path.stem, str(path)
        prompts = () if path.is_file() and not path.read_bytes().strip() else tuple(read_prompts(path))
    if not prompts:
        raise InputError(f"--dataset {name}: {origin} is empty, give at least one prompt")
    return Dataset(called, origin, prompts[:limit])


def _find(name: str, folder: Path | None) -> Path:
    """The file of a set."""
    if name in OWN:
        return _SHIPPED / f"{name}.jsonl"
    if name in NAMED:
        return _find_named(name, folder)
    if name and Path(name).is_file():
        return Path(name)
    known = ", ".join((*OWN, *NAMED))
    raise InputError(
        f"--dataset {name!r} is neither a file nor a known set: use a file of JSON lines, {FORM}, or one of {known}"
    )


def _find_named(name: str, folder: Path | None) -> Path:
    if folder is None:
        raise InputError(f"--dataset {name} does not ship: --data FOLDER says where {NAMED[name][0]} is")
    for path in (folder / file for file in NAMED[name]):
        if path.is_file():
            return path
    looked, known = " and ".join(NAMED[name]), ", ".join((*OWN, *NAMED))
    raise InputError(f"--dataset {name}: no {looked} in --data {folder}; put it there, or use a file or one of {known}")
