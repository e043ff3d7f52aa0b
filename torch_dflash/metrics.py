"""What the figures mean, as code. Seconds are wall-clock seconds on the host."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any


class Record:
    """A frozen dataclass that also reads as a mapping: record["tau"], dict(record)."""

    def __getitem__(self, name: str) -> Any:
        if name not in set(self.keys()):
            raise KeyError(name)
        return getattr(self, name)

    def keys(self) -> Iterator[str]:
        return (field.name for field in fields(self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class TraceEntry(Record):
    """One round of one request."""

    start: int  # position of the anchor
    proposed: list[int]  # the drafts; proposed[j] guesses position start + j + 1
    accepted: int  # leading drafts that the target agreed with; never includes the bonus
    emitted: list[int]  # what reached the output: accepted drafts and bonus, less what stop or budget cut off


@dataclass(frozen=True)
class Stats(Record):
    """Figures of one request.

    prompt_tokens, new_tokens: counts; new_tokens includes the one that prefill gives.
    steps: verify steps.
    tau: tokens kept from verify steps per verify step = (new_tokens - 1) / steps. 0 without steps.
    accept_histogram: [a] = steps in which exactly a drafts were accepted (a = 0..num_drafts).
    ttft: start of the request (its row was free, its prompt not yet touched) to its first token on the host.
    tpot: (time of the last token - time of the first) / (new_tokens - 1). 0 for fewer than two tokens.
    tokens_per_second: new_tokens / (time from the start of the request to its last token).
    compile_time: compilation and warm-up of this call, not part of ttft or tpot.
    """

    prompt_tokens: int
    new_tokens: int
    steps: int
    tau: float
    accept_histogram: list[int]
    ttft: float
    tpot: float
    tokens_per_second: float
    compile_time: float


def tau(new_tokens: int, steps: int) -> float:
    """Tokens kept per verify step; prefill's token and truncated tokens are excluded."""
    return (new_tokens - 1) / steps if steps else 0.0


def tpot(first: float, last: float, new_tokens: int) -> float:
    """Seconds per output token behind the first."""
    return (last - first) / (new_tokens - 1) if new_tokens > 1 else 0.0


def accept_histogram(accepted: Sequence[int], num_drafts: int) -> list[int]:
    """How many steps accepted 0, 1, ... num_drafts drafts."""
    return [accepted.count(a) for a in range(num_drafts + 1)]
