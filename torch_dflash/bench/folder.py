"""The folder of a run: what was asked for, what has been measured so far."""

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_dflash.bench.records import Batch, append_batch, read_batches
from torch_dflash.errors import InputError
from torch_dflash.train.checkpoint import write_atomically
from torch_dflash.train.records import mend

SETTINGS, BATCHES = "settings.json", "batches.jsonl"


@dataclass(frozen=True)
class RunFolder:
    """A folder that holds one run. `about`: its settings, environment and when it began."""

    path: Path
    about: Mapping[str, Any]

    def batches(self) -> list[Batch]:
        """What has been measured, a line that a kill cut off left out."""
        return read_batches(self.path / BATCHES)

    def begin(self) -> None:
        """From here on the folder belongs to these settings. Called when nothing can be refused any more."""
        self.write(SETTINGS, json.dumps(self.about, indent=1).encode())
        with _writing(self.path):
            mend(self.path / BATCHES)

    def append(self, batch: Batch) -> None:
        """A line that could not be written whole (disk full) is dropped by the next run."""
        with _writing(self.path):
            append_batch(self.path / BATCHES, batch)

    def write(self, name: str, content: bytes) -> None:
        """A whole file, or none."""
        with _writing(self.path):
            write_atomically(self.path / name, content)


def open_folder(path: Path, settings: Mapping[str, Any], environment: Mapping[str, Any]) -> RunFolder:
    """A new folder, or one that the same command made. Raises InputError for one with results of other settings or of
    another environment, naming what differs."""
    began = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    asked = {"settings": dict(settings), "environment": dict(environment), "began": began}
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)
    if not read_batches(path / BATCHES):
        return RunFolder(path, asked)
    before = read_about(path / SETTINGS)
    _check_same(path, _flat(before), _flat(asked))
    return RunFolder(path, before)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = f"cannot be written ({error.strerror or error}); free some room there, or name another folder"
        raise InputError(f"--out {path}: {why}") from None


def read_about(path: Path) -> dict[str, Any]:
    """Settings, environment and beginning of a run, from its SETTINGS file. Raises InputError."""
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        return {name: about[name] for name in ("settings", "environment", "began")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: does not say what the results beside it are ({error!r}); use a new --out") from None


def _flat(about: Mapping[str, Any]) -> dict[str, str]:
    """Name -> value as JSON, of what must be the same."""
    both = {**about["settings"], **about["environment"]}
    return {name: json.dumps(value, sort_keys=True) for name, value in both.items()}


def _check_same(path: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if names:
        listed = "; ".join(f"{name} was {before.get(name)}, now {now.get(name)}" for name in names)
        raise InputError(f"--out {path}: has results of another command ({listed}): use a new folder")


def batches_of(batches: Sequence[Batch], dataset: str) -> list[Batch]:
    """Those of one set, in the order they were measured."""
    return [batch for batch in batches if batch.dataset == dataset]
