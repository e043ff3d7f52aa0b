"""Schedules of requests that come, wait, are cancelled and go, and what must hold while an engine works them off."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from helpers import BYTES_PAIR, Loaded, prompt_of

from bridge.positions import pages_for
from torch_dflash import reference
from torch_dflash.device import Device
from torch_dflash.engine import Engine
from torch_dflash.metrics import TraceEntry
from torch_dflash.options import GREEDY, Choice, Sampling
from torch_dflash.pace import Steady
from torch_dflash.pair import Pair
from torch_dflash.propose import Proposer
from torch_dflash.requests import Request, Run, positions_needed
from torch_dflash.state import Capacity, Chunk, Round, Until
from torch_dflash.tokenizer import load_tokenizer

Answer = tuple[list[int], list[TraceEntry], str | None]


@dataclass(frozen=True)
class Arrival:
    """A request, the step before which it is submitted, and the one before which it is cancelled."""

    at: int
    request: Request
    cancel_at: int | None = None


def times(source: random.Random) -> tuple[int, int | None]:
    """When a request comes and when it is cancelled, if it is."""
    at = source.choice([0, source.randint(0, 12)])
    return at, at + source.randint(0, 12) if source.random() < 0.2 else None


def play(engine: Engine, arrivals: Sequence[Arrival], seen: Counter[str]) -> list[Run]:
    """Work off a schedule; every property of a step is checked behind it. Counts what happens in `seen`. Returns the
    runs, in the arrivals' order."""
    todo, runs, step = sorted(range(len(arrivals)), key=lambda i: arrivals[i].at), dict[int, Run](), 0
    watch = Watch(engine, seen)
    while todo or not engine.idle:
        while todo and arrivals[todo[0]].at <= step:
            index = todo.pop(0)
            runs[index] = engine.submit(arrivals[index].request)
            watch.submitted.append(runs[index])
        for index, run in runs.items():
            if arrivals[index].cancel_at == step:
                engine.cancel(run)
        if not engine.idle:
            watch.step()
        step += 1
    assert engine.rows == [None] * engine.capacity.rows
    assert engine.pages.num_free == engine.capacity.num_pages - 1, "a page is held by nobody"
    seen["schedules"] += 1
    seen.update(run.finish_reason or "" for run in runs.values())
    return [runs[index] for index in range(len(arrivals))]


class Watch:
    """Looks on while an engine takes its steps."""

    def __init__(self, engine: Engine, seen: Counter[str]) -> None:
        self.engine = engine
        self.seen = seen
        self.submitted: list[Run] = []
        self.stalled: dict[int, int] = {}  # id of a decoding run -> steps since it moved

    def step(self) -> None:
        """One step, and what must hold behind it."""
        engine = self.engine
        before = {id(run): (len(run.token_ids), run.prefilled) for run in self.submitted}
        decoding = [run for run in engine.rows if run is not None and run.decoding]
        first = engine.waiting[0] if engine.waiting and None in engine.rows else None
        free_pages = engine.pages.num_free
        moved = engine.step()
        engine.pages.check_integrity()
        grown = {id(run) for run in self.submitted if len(run.token_ids) > before[id(run)][0]}
        assert {id(run) for run in moved} == grown and len(moved) == len(grown)
        prefilled = any(run.prefilled > before[id(run)][1] for run in self.submitted)
        assert grown or prefilled, "nothing moves"
        self._check_turns(decoding, grown)
        self._check_rows()
        if first is not None and pages_for(self._positions(first), engine.capacity.page_size) <= free_pages:
            assert first.begin > 0, "a request waits though there are a row and pages"
        self.seen["steps"] += 1
        self.seen["tokens"] += sum(len(run.token_ids) - before[id(run)][0] for run in self.submitted)
        self.seen["waits for pages"] += first is not None and first.begin == 0

    def _check_turns(self, decoding: list[Run], grown: set[int]) -> None:
        """Prompts never stop a decoding row for more than one step."""
        self.stalled = {id(run): 0 if id(run) in grown else self.stalled.get(id(run), 0) + 1 for run in decoding}
        assert max(self.stalled.values(), default=0) <= 1, "a row waits for prompts"

    def _check_rows(self) -> None:
        """First come, first served; whoever runs has one row, and nobody else has."""
        queued = [run for run in self.submitted if run.finish_reason != "cancelled" and run.request.max_new_tokens > 0]
        begun = [run.begin > 0 for run in queued]
        assert begun == sorted(begun, reverse=True), "a request overtakes another"
        held = sorted(id(run) for run in self.engine.rows if run is not None)
        assert held == sorted(id(run) for run in self.submitted if run.begin > 0 and run.finish_reason is None)

    def _positions(self, run: Run) -> int:
        limit = self.engine.pair.target.config.context_limit
        return positions_needed(run.request, self.engine.pace.proposers[0].num_drafts, limit)


def check_dispatch(rows: Sequence[int], tables: np.ndarray, capacity: Capacity) -> None:
    """The active rows, each once, then padding without pages, and as little of it as powers of two allow."""
    active = [row for row in rows if row < capacity.rows]
    assert active and len(set(active)) == len(active)
    assert list(rows) == active + [capacity.rows] * (len(rows) - len(active))
    smallest = next(n for n in (1, 2, 4, 8) if n >= min(len(active), capacity.rows))
    assert len(rows) == min(smallest, capacity.rows)
    assert not tables[len(active) :].any()


def end_of(request: Request, ids: Sequence[int]) -> tuple[int, str]:
    """How many of the ids a request gets, and why no more. Ids below 256 are bytes of text."""
    for n in range(1, request.max_new_tokens + 1):
        text = bytes(i for i in ids[:n] if i < 256).decode(errors="replace")
        if ids[n - 1] in request.stop_ids or any(stop in text for stop in request.stop_strings):
            return n, "stop"
    return request.max_new_tokens, "length"


def cut(request: Request, ids: Sequence[int], rounds: Sequence[TraceEntry]) -> Answer:
    """The answer to a request, from a run alone that went on as long as needed."""
    length, reason = end_of(request, ids)
    trace, have = list[TraceEntry](), 1
    for entry in rounds:
        if have >= length:
            break
        trace.append(replace(entry, emitted=entry.emitted[: length - have]))
        have += len(entry.emitted)
    return list(ids[:length]), trace, reason


def check_answer(run: Run, expected: Answer, may_be_cancelled: bool) -> None:
    """The run is the expected one, or, cancelled, the beginning of it."""
    ids, trace, reason = expected
    if run.finish_reason == "cancelled":
        assert may_be_cancelled
        assert (run.token_ids, run.trace) == (ids[: len(run.token_ids)], trace[: len(run.trace)])
        assert len(run.token_ids) == bool(run.token_ids) + sum(len(entry.emitted) for entry in run.trace)
    else:
        assert (run.token_ids, run.trace, run.finish_reason) == (ids, trace, reason)
    assert len(run.drafted) == len(run.logprobs) == len(run.token_ids)


class Observed(Device):
    """The device, with every dispatch checked and counted."""

    def __init__(self, pair: Pair, proposers: Sequence[Proposer], capacity: Capacity, max_steps: int) -> None:
        super().__init__(pair, proposers, capacity, max_steps)
        self.seen = Counter[str]()
        self.ends: dict[int, tuple[Sequence[int], int]] = {}  # row -> prompt and end of its newest chunk

    def prefill(
        self, row: int, table: np.ndarray, choice: Choice, prompt: Sequence[int], start: int, chunk: Chunk
    ) -> tuple[jax.Array, jax.Array]:
        self.seen["prefix hits"] += start > 0 and self.ends.get(row) != (prompt, start)
        self.ends[row] = prompt, start + int(chunk.num_new[0])
        return super().prefill(row, table, choice, prompt, start, chunk)

    def decode(
        self, rows: Sequence[int], tables: np.ndarray, choices: Sequence[Choice], proposer: Proposer, until: Until
    ) -> tuple[Round, int]:
        check_dispatch(rows, tables, self.capacity)
        self.seen.update(["dispatches", f"dispatches of {len(rows)}"])
        return super().decode(rows, tables, choices, proposer, until)


class Alone:
    """What a request gets when it is alone. A greedy one: by the reference. One that is drawn: by an idle engine."""

    longest_answer = 20

    def __init__(self, tiny: Loaded) -> None:
        self.tiny = tiny
        self.known: dict[tuple, tuple[list[int], list[TraceEntry]]] = {}

    def __call__(self, request: Request, engine: Engine) -> Answer:
        key = request.prompt_ids, request.sampling.seed
        if key not in self.known:
            self.known[key] = self._reference(request) if request.sampling == GREEDY else self._drawn(request, engine)
        return cut(request, *self.known[key])

    def _reference(self, request: Request) -> tuple[list[int], list[TraceEntry]]:
        tiny = self.tiny
        return reference.dflash(tiny.target, tiny.drafter, tiny.config, request.prompt_ids, self.longest_answer)

    def _drawn(self, request: Request, engine: Engine) -> tuple[list[int], list[TraceEntry]]:
        assert engine.idle
        run = engine.submit(Request(0, request.prompt_ids, self.longest_answer, (), request.sampling))
        while not engine.idle:
            engine.step()
        return run.token_ids, run.trace


def device_engine(tiny: Loaded, rows: int) -> Engine:
    """On the real device, with pages for less than half of the rows at their longest. Its tokenizer makes bytes of
    ids."""
    pair = replace(tiny.pair, tokenizer=load_tokenizer(BYTES_PAIR / "target"))
    proposer = pair.proposer("dflash", None)
    device = Observed(pair, [proposer], Capacity(rows, 10, 4, max(11, 4 + 4 * rows)), 3)
    device.num_stop_ids = 2
    return Engine(device, Steady(proposer))


def device_schedule(source: random.Random) -> list[Arrival]:
    """Requests to the tiny pair. Few different prompts, budgets up to 20, some drawn; one width of prompts."""
    arrivals = []
    for index in range(source.randint(1, 10)):
        length, tail = source.choice([3, 5, 8, 11, 15]), source.choice([(), (7,)])
        prompt = (*prompt_of(15, seed=source.randint(0, 1))[:length], *tail)
        stop_ids = tuple(source.sample(range(12), source.randint(1, 2))) if source.random() < 0.2 else ()
        stop_strings = ("".join(chr(source.randint(1, 11)) for _ in range(2)),) if source.random() < 0.3 else ()
        sampling = Sampling(temperature=0.8, seed=source.randint(0, 1)) if source.random() < 0.2 else GREEDY
        request = Request(index, prompt, source.randint(0, 20), stop_ids, sampling, stop_strings)
        at, cancel_at = times(source)
        arrivals.append(Arrival(at, request, cancel_at))
    return arrivals
