"""What a run writes while it goes on: a JSON line for every batch of prompts, with what all methods made of it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch_dflash.bench.methods import PLAIN
from torch_dflash.errors import InputError


@dataclass(frozen=True)
class Divergence:
    """Where an answer leaves the plain one. position: index of the first other token among the new tokens. gap: logit
    of plain decoding's token there - logit of the other one, in the run's dtype."""

    position: int
    gap: float


@dataclass(frozen=True)
class Outcome:
    """One prompt by one method. accepted: drafts that each verify step accepted. Seconds are of the method's own clock,
    see race.py. ttft: to the first token. decode_seconds: from the first token to the last. divergence: None for
    plain decoding, where that was not run, and for equal answers."""

    token_ids: list[int]
    accepted: list[int]
    finish_reason: str
    prompt_tokens: int
    ttft: float
    decode_seconds: float
    divergence: Divergence | None = None


@dataclass(frozen=True)
class Batch:
    """Up to `rows` prompts of a set, from number `first` on; the mappings are by method.

    seconds: of the method's own clock for the whole batch. warm_up: seconds of compilation and first steps just before
    this batch, part of nothing else. num_drafts: in a step, at most.
    """

    dataset: str
    first: int
    num_drafts: dict[str, int]
    warm_up: dict[str, float]
    seconds: dict[str, float]
    outcomes: dict[str, list[Outcome]]

    @property
    def has_plain(self) -> bool:
        return PLAIN in self.outcomes


def append_batch(path: Path, batch: Batch) -> None:
    """Add a line and flush it."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(batch)) + "\n")


def read_batches(path: Path) -> list[Batch]:
    """All whole lines. Raises InputError naming a damaged one."""
    if not path.exists():
        return []
    whole = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [_batch(path, number, line) for number, line in enumerate(whole, 1)]


def _batch(path: Path, number: int, line: str) -> Batch:
    try:
        fields = json.loads(line)
        outcomes = {name: [_outcome(each) for each in some] for name, some in fields["outcomes"].items()}
        return Batch(**(fields | {"outcomes": outcomes}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}, line {number}: is not a result ({error!r}); use a new --out folder") from None


def _outcome(fields: dict[str, Any]) -> Outcome:
    divergence = fields["divergence"]
    return Outcome(**(fields | {"divergence": None if divergence is None else Divergence(**divergence)}))
