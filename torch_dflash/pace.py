"""How many drafts are worth their cost: decided before every dispatch, from what the dispatches before it measured.

Verifying a block costs little while the device has room to spare, and the drafts are right often enough or not. Both
depend on the number of active rows, the texts and the machine, so nothing is assumed: each proposer's seconds per step
are measured at each number of rows, and the accept counts of full drafting say what fewer drafts would have kept.

A machine is slow at times, and then for every proposer. So two proposers are compared by dispatches that follow each
other; one that is slower than the same proposer's before it slows all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch_dflash.propose import Proposer

PROBE_EVERY = 128  # steps between two looks at a proposer that is nearly the best; fewer while little is known
FIRST_PROBE = 16  # steps from the first look to the second; then twice as many, and so on
LONGER = 4  # times as many for one that is much slower
PROBE_STEPS = 2
CONFIRM_AFTER = 16  # steps between a change of the best and another look at the one before it
NEWEST = 0.2  # weight of the newest dispatch in a mean, at least
NEWEST_PROBE = 0.5  # probes are few
SETTLED = 32  # accept counts, of one row in one step, that weigh as much as all before them: texts change quickly


@dataclass
class Mean:
    """Of all that was seen, while that is little; then the newest weighs more."""

    value: float
    count: int = 1

    def add(self, new: float, weight: float) -> None:
        self.count += 1
        weight = max(weight, 1 / self.count)
        self.value += weight * (new - self.value)


@dataclass(frozen=True)
class Measured:
    """One dispatch: `rows` in the batch (padding included), steps, seconds, and the accept count of each active row in
    each step."""

    rows: int
    proposer: Proposer
    steps: int
    seconds: float
    accepted: Sequence[int]


class Pace(Protocol):
    """Chooses the proposer of a dispatch. All of its proposers share one draft state."""

    @property
    def proposers(self) -> tuple[Proposer, ...]:
        """The first uses the most drafts."""

    def choose(self, rows: int, max_steps: int) -> tuple[Proposer, int]:
        """Proposer and number of steps of the next dispatch of `rows` rows."""

    def observe(self, measured: Measured) -> None:
        """What that dispatch came to."""


@dataclass(frozen=True)
class Steady:
    """Always the same proposer."""

    proposer: Proposer

    @property
    def proposers(self) -> tuple[Proposer, ...]:
        return (self.proposer,)

    def choose(self, rows: int, max_steps: int) -> tuple[Proposer, int]:
        return self.proposer, max_steps

    def observe(self, measured: Measured) -> None:
        pass


@dataclass
class Adaptive:
    """The proposer that gives most tokens per second. The others get a short dispatch now and then, since texts
    change."""

    proposers: tuple[Proposer, ...]
    seconds: dict[tuple[int, Proposer], Mean] = field(default_factory=dict)  # (rows, proposer) -> of one step
    kept: dict[Proposer, Mean] = field(default_factory=dict)  # tokens that a row keeps of one step
    begun: set[tuple[int, Proposer]] = field(default_factory=set)  # the first dispatch of a program may make kernels
    waited: dict[tuple[int, Proposer], int] = field(default_factory=dict)  # steps since its last one
    best: dict[int, Proposer] = field(default_factory=dict)  # rows -> the last choice that was no probe
    last: tuple[int, Proposer, float] | None = None  # rows, proposer and seconds of a step of the last dispatch

    def choose(self, rows: int, max_steps: int) -> tuple[Proposer, int]:
        unknown = [p for p in self.proposers if (rows, p) not in self.seconds]
        if unknown:
            return unknown[0], min(PROBE_STEPS, max_steps)
        speed = {p: self.kept[p].value / self.seconds[rows, p].value for p in self.proposers}
        best = max(self.proposers, key=lambda p: speed[p])
        patience = {p: self._patience(rows, p, speed[best] / speed[p]) for p in self.proposers}
        if (before := self.best.get(rows, best)) != best:
            self.waited[rows, before] = patience[before] - CONFIRM_AFTER
        self.best[rows] = best
        stale = [p for p in self.proposers if p != best and self.waited[rows, p] >= patience[p]]
        return (stale[0], min(PROBE_STEPS, max_steps)) if stale else (best, max_steps)

    def _patience(self, rows: int, proposer: Proposer, times_slower: float) -> int:
        """Steps from one look at it to the next. A look at a slow one costs more, so it has to wait longer."""
        doublings = min(self.seconds[rows, proposer].count - 1, PROBE_EVERY.bit_length())  # or the number would grow
        often = min(FIRST_PROBE << doublings, PROBE_EVERY)
        return round(often * min(times_slower, LONGER))

    def observe(self, measured: Measured) -> None:
        rows, used = measured.rows, measured.proposer
        for proposer in self.proposers:
            self.waited[rows, proposer] = self.waited.get((rows, proposer), 0) + measured.steps
            if measured.accepted and proposer.num_drafts <= used.num_drafts:
                kept = [min(a, proposer.num_drafts) + 1 for a in measured.accepted]
                _add(self.kept, proposer, sum(kept) / len(kept), max(NEWEST, len(kept) / (len(kept) + SETTLED)))
        self.waited[rows, used] = 0
        if measured.steps and (rows, used) in self.begun:
            self._note_seconds(rows, used, measured.seconds / measured.steps)
        self.begun.add((rows, used))

    def _note_seconds(self, rows: int, used: Proposer, new: float) -> None:
        before, key = self.last, (rows, used)
        self.last = (rows, used, new)
        if key not in self.seconds or before is None or before[0] != rows:
            _add(self.seconds, key, new, NEWEST)
        elif before[1] != used:
            relative = new / before[2] * self.seconds[rows, before[1]].value
            _add(self.seconds, key, relative, NEWEST_PROBE)
        else:
            slower = 1 + NEWEST * (new / self.seconds[key].value - 1)
            for proposer in self.proposers:
                if (rows, proposer) in self.seconds:
                    self.seconds[rows, proposer].value *= slower


def _add(means: dict[Any, Mean], key: Any, new: float, weight: float) -> None:
    if key in means:
        means[key].add(new, weight)
    else:
        means[key] = Mean(new)
