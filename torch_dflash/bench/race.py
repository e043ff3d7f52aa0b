"""A batch of prompts through several methods' engines, which take turns: the same texts at the same time.

A machine has slow spells, seconds long. So after every step of an engine (a prompt chunk, or one dispatch) the engine
that has written fewest tokens goes on: a spell meets every method at the same place of the text. Each engine has a
clock of its own, which runs during its own steps only.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch_dflash.bench.records import Outcome
from torch_dflash.engine import Engine
from torch_dflash.requests import Request, Run


@dataclass
class Lap:
    """One engine's part of a race. Seconds are of its own clock; first and last: when each run's first and newest token
    reached the host."""

    engine: Engine
    runs: list[Run]
    seconds: float = 0.0
    counts: list[int] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)

    @classmethod
    def start(cls, engine: Engine, requests: Sequence[Request]) -> "Lap":
        """All requests queued; the clock stands at 0."""
        zeros = [0.0] * len(requests)
        runs = [engine.submit(request) for request in requests]
        return cls(engine, runs, counts=[0] * len(requests), first=list(zeros), last=zeros)

    @property
    def place(self) -> tuple[int, float]:
        """Who is behind: tokens first; while prompts are read, seconds."""
        return sum(self.counts), self.seconds

    def step(self) -> None:
        """A step on the clock."""
        begin = time.perf_counter()
        self.engine.step()
        self.engine.device.wait()  # a prompt chunk that is still under way is this engine's
        self.seconds += time.perf_counter() - begin
        for i, run in enumerate(self.runs):
            if len(run.token_ids) > self.counts[i]:
                self.first[i] = self.first[i] or self.seconds
                self.counts[i], self.last[i] = len(run.token_ids), self.seconds

    def outcomes(self) -> list[Outcome]:
        """Of the finished runs, in the order of the requests."""
        return [
            Outcome(
                token_ids=run.token_ids,
                accepted=[entry.accepted for entry in run.trace],
                finish_reason=str(run.finish_reason),
                prompt_tokens=len(run.request.prompt_ids),
                ttft=first,
                decode_seconds=last - first,
            )
            for run, first, last in zip(self.runs, self.first, self.last, strict=True)
        ]


def race(engines: Mapping[str, Engine], requests: Sequence[Request]) -> dict[str, Lap]:
    """The requests through each of the engines, which are warm and idle. Returns what each came to."""
    laps = {name: Lap.start(engine, requests) for name, engine in engines.items()}
    while going := [lap for lap in laps.values() if not lap.engine.idle]:
        min(going, key=lambda lap: lap.place).step()
    return laps
