"""The host loop: requests wait, take a row, are prefilled, and decode in dispatches until they stop.

Letters: R rows, N steps per dispatch.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import jax
import numpy as np

from bridge.pages import PageAllocator
from bridge.positions import chunks, power_of_two
from torch_dflash.decode import decode_program, make_state, prefill_program
from torch_dflash.invariants import check_invariants
from torch_dflash.metrics import TraceEntry
from torch_dflash.pair import Pair, timed
from torch_dflash.propose import Proposer
from torch_dflash.state import Capacity, Round

PAGE_SIZE = 64  # the smallest page of the TPU kernel
PREFILL_CHUNK = 256
SMALLEST_CHUNK = 16
NO_STOP = -1


@dataclass(frozen=True)
class Request:
    """One prompt and where to stop. max_new_tokens >= 1; stop_ids end the text and belong to it."""

    index: int
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stop_ids: tuple[int, ...]


@dataclass
class Run:
    """What has become of a request so far. `finish_reason` is None while it runs; times are perf_counter seconds."""

    request: Request
    begin: float
    token_ids: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)  # of each token: it came from an accepted draft
    trace: list[TraceEntry] = field(default_factory=list)
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    finish_reason: str | None = None

    @property
    def committed_len(self) -> int:
        """Positions the target has processed, as the device counts them while the request runs: all but the anchor."""
        return len(self.request.prompt_ids) + len(self.token_ids) - 1

    def take(self, ids: list[int]) -> list[int]:
        """Append what a step emitted, accepted drafts and one token of the target's own, up to the first stop id or the
        budget. Returns what was kept."""
        kept: list[int] = []
        for token in ids[: self.request.max_new_tokens - len(self.token_ids)]:
            kept.append(token)
            if token in self.request.stop_ids:
                self.finish_reason = "stop"
                break
        self.token_ids += kept
        self.drafted += [i < len(ids) - 1 for i in range(len(kept))]
        self.last_token_at = time.perf_counter()
        self.first_token_at = self.first_token_at or self.last_token_at
        if self.finish_reason is None and len(self.token_ids) == self.request.max_new_tokens:
            self.finish_reason = "length"
        return kept


class Engine:
    """Runs requests on R device rows. Rows differ in length, accept count and finish time; a free row takes the next
    request."""

    def __init__(self, pair: Pair, proposer: Proposer, capacity: Capacity, max_steps: int) -> None:
        self.pair = pair
        self.proposer = proposer
        self.capacity = capacity
        self.max_steps = max_steps
        self.state = make_state(pair.target, proposer, capacity, pair.dtype)
        self.pages = PageAllocator(capacity.num_pages, capacity.page_size, capacity.rows, capacity.pages_per_row)
        self.rows: list[Run | None] = [None] * capacity.rows
        self.waiting: deque[Request] = deque()
        self.num_stop_ids = 1
        self.dispatch_seconds = 0.0

    def submit(self, request: Request) -> None:
        """Queue a request. It must fit: see `positions_needed`."""
        assert positions_needed(request, self.proposer) <= self.capacity.slots_per_row
        self.num_stop_ids = max(self.num_stop_ids, power_of_two(len(request.stop_ids)))
        self.waiting.append(request)

    @property
    def idle(self) -> bool:
        return not self.waiting and not any(self.rows)

    def step(self) -> Iterator[Run]:
        """Admit, reserve, dispatch, collect. Yields the runs that moved, finished ones for the last time."""
        yield from self.admit()
        if any(self.rows):
            self._reserve()
            yield from self._collect(*self._dispatch())
        if os.environ.get("TORCH_DFLASH_DEBUG") == "1":
            check_invariants(self)

    def warm_up(self) -> None:
        """Compile what the queued requests need and the pair has not compiled yet. No step is taken, no row written."""
        widths = {w for r in self.waiting for _, _, w in chunks(len(r.prompt_ids), PREFILL_CHUNK, SMALLEST_CHUNK)}
        for width in sorted(widths):
            self._compile("prefill", width, f"{width} tokens", partial(self._prefill_nothing, width))
        self._compile("decode", self.max_steps, f"{self.capacity.rows} row(s)", partial(self._dispatch, num_steps=0))

    def _compile(self, program: str, size: int, shown: str, run: Callable[[], object]) -> None:
        shapes = (program, size, self.proposer, self.capacity, self.num_stop_ids)
        if shapes not in self.pair.compiled:
            with timed(f"compile {program} of {shown}"):
                jax.block_until_ready(run())
            self.pair.compiled.add(shapes)

    def _prefill_nothing(self, width: int) -> jax.Array:
        nowhere = np.array([self.capacity.rows], np.int32)
        return self._prefill(nowhere, np.zeros((1, width), np.int32), 0, 0, 0)

    def admit(self) -> Iterator[Run]:
        """Waiting requests take free rows and are prefilled. Yields them with their first token."""
        for row, run in enumerate(self.rows):
            if run is None and self.waiting:
                run = Run(self.waiting.popleft(), time.perf_counter())
                self.pages.reserve(row, len(run.request.prompt_ids))
                self.rows[row] = run
                run.take([self._prefill_prompt(row, run.request)])
                self._retire(row)
                yield run

    def _prefill_prompt(self, row: int, request: Request) -> int:
        prompt = request.prompt_ids
        for at, length, width in chunks(len(prompt), PREFILL_CHUNK, SMALLEST_CHUNK):
            ids = np.zeros((1, width), np.int32)
            ids[0, :length] = prompt[at : at + length]
            last = at + length == len(prompt)
            budget = request.max_new_tokens - 1 if last else 0
            token = self._prefill(np.array([row], np.int32), ids, at, length, budget)
        return int(jax.device_get(token)[0])

    def _prefill(self, rows: np.ndarray, ids: np.ndarray, start: int, num_new: int, budget: int) -> jax.Array:
        scalars = [np.array([value], np.int32) for value in (start, num_new, budget)]
        stop_ids = self._stop_ids()[np.minimum(rows, self.capacity.rows - 1)]
        self.state, token = prefill_program()(
            self.pair.target,
            self.proposer,
            self.pair.params,
            self.state,
            self.pages.table(),
            rows,
            ids,
            *scalars,
            stop_ids,
        )
        return token

    def _reserve(self) -> None:
        """Pages for everything the next dispatch may write."""
        width = self.proposer.num_drafts + 1
        for row, run in enumerate(self.rows):
            if run is not None:
                ahead = run.committed_len + self.max_steps * width
                self.pages.reserve(row, min(ahead, positions_needed(run.request, self.proposer)))

    def _dispatch(self, num_steps: int | None = None) -> tuple[Round, int]:
        """Run up to num_steps rounds; the one place where the host waits for the device while decoding."""
        tables, stop_ids = self.pages.table(), self._stop_ids()
        begin = time.perf_counter()
        self.state, rounds, count = decode_program()(
            self.pair.target,
            self.proposer,
            self.max_steps,
            self.pair.params,
            self.state,
            tables,
            stop_ids,
            np.int32(self.max_steps if num_steps is None else num_steps),
        )
        rounds, count = jax.device_get((rounds, count))
        self.dispatch_seconds += time.perf_counter() - begin
        return rounds, int(count)

    def _collect(self, rounds: Round, count: int) -> Iterator[Run]:
        for row, run in enumerate(self.rows):
            if run is not None:
                for i in range(count):
                    if rounds.active[i, row]:
                        _take(run, rounds, i, row)
                self._retire(row)
                yield run

    def _retire(self, row: int) -> None:
        """Free a row whose request has finished."""
        run = self.rows[row]
        if run is not None and run.finish_reason is not None:
            self.pages.release(row)
            self.rows[row] = None

    def _stop_ids(self) -> np.ndarray:
        """int32[R,n] for the device, filled up with an id that no token has."""
        ids = np.full((self.capacity.rows, self.num_stop_ids), NO_STOP, np.int32)
        for row, run in enumerate(self.rows):
            if run is not None:
                ids[row, : len(run.request.stop_ids)] = run.request.stop_ids
        return ids


def _take(run: Run, rounds: Round, i: int, row: int) -> None:
    """Round i of a row becomes a trace entry and new tokens."""
    accepted = int(rounds.num_accepted[i, row])
    kept = run.take(rounds.target_ids[i, row, : accepted + 1].tolist())
    proposed = rounds.draft_ids[i, row].tolist()
    run.trace.append(TraceEntry(int(rounds.start[i, row]), proposed, accepted, kept))


def positions_needed(request: Request, proposer: Proposer) -> int:
    """Positions that a request may write: the last round's anchor is the last token but one, its drafts lie behind."""
    return len(request.prompt_ids) + request.max_new_tokens + proposer.num_drafts
