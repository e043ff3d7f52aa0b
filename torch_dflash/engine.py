"""The host loop: requests wait, take a row, are prefilled chunk by chunk, and decode in dispatches until they stop."""

import os
import time
from collections import deque
from collections.abc import Iterator

import jax
import numpy as np

from bridge.pages import GroupedPages, OutOfPagesError, PageAllocator
from bridge.positions import chunks, power_of_two
from torch_dflash.device import Device
from torch_dflash.errors import InputError
from torch_dflash.invariants import check_invariants
from torch_dflash.metrics import TraceEntry
from torch_dflash.options import NOTHING, Choice
from torch_dflash.pace import Measured, Pace
from torch_dflash.requests import Request, Run, positions_needed
from torch_dflash.sampling import choose_greedily
from torch_dflash.state import Capacity, Chunk, Round, Until
from torch_dflash.tokenizer import TextPieces

PAGE_SIZE = 64  # the smallest page of the TPU kernel
PREFILL_CHUNK = 256
SMALLEST_CHUNK = 16
WIDTHS = [SMALLEST_CHUNK << n for n in range((PREFILL_CHUNK // SMALLEST_CHUNK).bit_length())]


class Engine:
    """Runs requests on R device rows.

    Rows differ in length, accept count and finish time; a free row takes the next request, first come, first served.
    A request gets its row when all pages that it may need are free, so one that runs is never short of pages, and one
    that waits will run. A dispatch has the active rows only, padded to a bucket.
    """

    def __init__(self, device: Device, pace: Pace) -> None:
        """The device must have been made for the pace's proposers."""
        self.device = device
        self.pace = pace
        self.pair = device.pair
        self.capacity = capacity = device.capacity
        self.pages = make_pages(capacity, pace.proposers[0].lookahead)
        self.rows: list[Run | None] = [None] * capacity.rows
        self.waiting: deque[Run] = deque()
        self.prefilled_last = False
        self.dispatch_seconds = 0.0

    def submit(self, request: Request) -> Run:
        """Queue a request. The run tells, after every step, what has become of it; one for no tokens is finished at
        once. Raises InputError for a request that can never fit."""
        self._check_fits(request)
        self.device.num_stop_ids = max(self.device.num_stop_ids, power_of_two(len(request.stop_ids)))
        self.device.num_biased = max(self.device.num_biased, power_of_two(len(request.sampling.logit_bias)))
        assert self.device.choose is not choose_greedily or request.sampling.is_greedy, (
            "the engine was made for greedy requests"
        )
        pieces = TextPieces(self.pair.tokenizer, request.stop_strings) if request.stop_strings else None
        choice = Choice(request.sampling.seeded(), request.stop_ids, len(request.prompt_ids))
        run = Run(request, choice, pieces)
        if request.max_new_tokens == 0:
            run.finish_reason = "length"
        else:
            self.waiting.append(run)
        return run

    def cancel(self, run: Run) -> None:
        """End a run that waits or decodes; it keeps what it has. One that is finished stays as it is."""
        if run.finish_reason is None:
            run.finish_reason = "cancelled"
            self.waiting = deque(other for other in self.waiting if other is not run)
            self._retire()

    @property
    def idle(self) -> bool:
        return not self.waiting and not any(self.rows)

    def step(self) -> list[Run]:
        """Admit requests, then prefill a chunk or decode a dispatch, in turns where both are wanted. Returns the runs
        that have new tokens; finished ones for the last time."""
        self._admit()
        prefilling, decoding = self._held(decoding=False), self._held(decoding=True)
        self.prefilled_last = bool(prefilling) and not (decoding and self.prefilled_last)
        moved = self._prefill() if self.prefilled_last else self._decode()
        self._retire()
        if os.environ.get("TORCH_DFLASH_DEBUG") == "1":
            check_invariants(self)
        return moved

    def stream(self, request: Request) -> Iterator[str]:
        """Submit a request and yield its text, piece by piece; all other requests go on too. Leaving the iterator
        early cancels the request. Raises InputError as `submit` does, and for a target without a tokenizer."""
        if self.pair.tokenizer is None:
            raise InputError("stream needs a tokenizer, and the target has none: use submit and step for token ids")
        run, seen, pieces = self.submit(request), 0, TextPieces(self.pair.tokenizer, request.stop_strings)
        try:
            while run.finish_reason is None or seen < len(run.token_ids):
                if seen == len(run.token_ids):
                    self.step()
                new = run.token_ids[seen:]  # while the caller has a piece, other streams take steps
                seen += len(new)
                if piece := pieces.feed(new):
                    yield piece
            if piece := pieces.finish():
                yield piece
        finally:
            self.cancel(run)

    def _check_fits(self, request: Request) -> None:
        """Raises InputError for a request that would wait or run for ever."""
        length, limit = len(request.prompt_ids) + request.max_new_tokens, self.pair.target.config.context_limit
        if not request.prompt_ids or length > limit:
            raise InputError(
                f"request {request.index} has {len(request.prompt_ids)} prompt and up to {request.max_new_tokens} new "
                f"tokens: give at least one prompt token, and at most {limit} in all, the target's context"
            )
        needed = self._positions(request)
        room = min(self.capacity.pages_per_row, self.capacity.num_pages - 1) * self.capacity.page_size
        if needed > room:
            raise InputError(
                f"request {request.index} may need {needed} positions, and a row has {room}: "
                "shorten the prompt, lower max_new_tokens, or give the engine more pages"
            )

    def _positions(self, request: Request) -> int:
        return positions_needed(request, self.pace.proposers[0].num_drafts, self.pair.target.config.context_limit)

    def _held(self, decoding: bool) -> dict[int, Run]:
        """The runs that have a row, by row: those that decode, or those whose prompt is being processed."""
        return {row: run for row, run in enumerate(self.rows) if run is not None and run.decoding == decoding}

    def _admit(self) -> None:
        """Waiting requests take free rows, in their order, as long as there are pages."""
        for row, held in enumerate(self.rows):
            if held is None and self.waiting:
                run = self.waiting[0]
                try:
                    run.prefilled = self.pages.reserve(row, self._positions(run.request), run.request.prompt_ids)
                except OutOfPagesError:
                    continue  # a row of another group may do; those behind it wait too, or it might wait for ever
                run.begin = time.perf_counter()
                self.rows[row] = self.waiting.popleft()

    def _prefill(self) -> list[Run]:
        """Prompt chunks, about PREFILL_CHUNK tokens in all, so that decoding rows do not wait long, of the requests
        that came first. Returns the runs that got their first token."""
        left, started = PREFILL_CHUNK, []
        for row, run in sorted(self._held(decoding=False).items(), key=lambda item: item[1].begin):
            while left > 0 and not run.token_ids:
                left -= self._prefill_chunk(row, run)
                if run.token_ids:
                    started.append(run)
        return started

    def _prefill_chunk(self, row: int, run: Run) -> int:
        """Process the next chunk of a prompt. Returns its width."""
        prompt, start = run.request.prompt_ids, run.prefilled
        _, length, width = chunks(len(prompt) - start, PREFILL_CHUNK, SMALLEST_CHUNK)[0]
        last = start + length == len(prompt)
        ids = np.zeros((1, width), np.int32)
        ids[0, :length] = prompt[start : start + length]
        budget = run.request.max_new_tokens - 1 if last else 0
        chunk = Chunk(ids, np.array([length], np.int32), np.array([budget], np.int32))
        first = self.device.prefill(row, self.pages.table([row]), run.choice, prompt, start, chunk)
        run.prefilled += length
        self.pages.remember(row, prompt[: run.prefilled])
        if last:
            token, logprob = (value[self.capacity.group_of(row)] for value in jax.device_get(first))
            run.take([int(token)], [float(logprob)])
        return width

    def _decode(self) -> list[Run]:
        """One dispatch of the decoding rows. Returns their runs."""
        active = self._held(decoding=True)
        if active:
            columns = self.capacity.columns([*active])
            rounds, count = self._dispatch(
                columns, [active[row].choice if row in active else NOTHING for row in columns]
            )
            for row, run in active.items():
                column = columns.index(row)
                for i in np.flatnonzero(rounds.active[:count, column]):
                    _take(run, rounds, int(i), column)
        return list(active.values())

    def _dispatch(self, rows: list[int], choices: list[Choice]) -> tuple[Round, int]:
        """Some rounds of the rows, with as many drafts as pay. Where a request waits for a row, until one is free."""
        proposer, num_steps = self.pace.choose(len(rows), self._most_steps())
        until = Until(num_steps, sum(row < self.capacity.rows for row in rows) if self.waiting else 1)
        self.device.wait()  # a chunk that is still under way would count as this dispatch's time
        begin = time.perf_counter()
        rounds, count = self.device.decode(rows, self.pages.table(rows), choices, proposer, until)
        seconds = time.perf_counter() - begin
        accepted = rounds.num_accepted[:count][rounds.active[:count]].tolist()
        self.pace.observe(Measured(len(rows), proposer, count, seconds, accepted))
        self.dispatch_seconds += seconds
        return rounds, count

    def _most_steps(self) -> int:
        """Rows that are still being prefilled wait for the dispatch's end: it is shorter then."""
        return max(1, self.device.max_steps // 2) if self._held(decoding=False) else self.device.max_steps

    def _retire(self) -> None:
        """Free the rows whose requests have finished. The device need not know: a dispatch names its rows."""
        for row, run in enumerate(self.rows):
            if run is not None and run.finish_reason is not None:
                self.pages.release(row)
                self.rows[row] = None

    def warm_up(self) -> None:
        """Compile what the queued requests need and the pair has not compiled yet. No row is written."""
        prompts = [run.request.prompt_ids for run in self.waiting]
        cut = [chunks(len(prompt), PREFILL_CHUNK, SMALLEST_CHUNK) for prompt in prompts]
        widths = {width for pieces in cut for _, _, width in pieces}
        beginnings = [prompt[: self.capacity.page_size] for prompt in prompts if len(prompt) > self.capacity.page_size]
        if len(set(beginnings)) < len(beginnings):
            # Of a prompt whose beginning is in the pages already, the rest may have any smaller width.
            widths = {width for width in WIDTHS if width <= max(widths)}
        self._warm_up(widths, min(len(prompts), self.capacity.rows))

    def warm_up_all(self) -> None:
        """Compile what any request may need."""
        longest = power_of_two(self.capacity.slots_per_row, SMALLEST_CHUNK)
        self._warm_up({width for width in WIDTHS if width <= longest}, self.capacity.rows)

    def _warm_up(self, widths: set[int], most_rows: int) -> None:
        for width in sorted(widths):
            self.device.warm_up_prefill(width)
        for rows in sorted({len(self.capacity.columns(range(active))) for active in range(1, most_rows + 1)}):
            self.device.warm_up_decode(rows)


def make_pages(capacity: Capacity, lookahead: int) -> PageAllocator | GroupedPages:
    """The host's side of the K/V memory."""
    shape = (capacity.num_pages, capacity.page_size, capacity.rows, capacity.pages_per_row, lookahead)
    return PageAllocator(*shape) if capacity.groups == 1 else GroupedPages(*shape, capacity.groups)


def _take(run: Run, rounds: Round, i: int, column: int) -> None:
    """Round i of a row becomes a trace entry and new tokens."""
    if run.finish_reason is None:  # a stop string ends a run behind the device's back
        accepted = int(rounds.num_accepted[i, column])
        ids, logprobs = rounds.target_ids[i, column], rounds.logprobs[i, column]
        kept = run.take(ids[: accepted + 1].tolist(), logprobs[: accepted + 1].tolist())
        proposed = rounds.draft_ids[i, column].tolist()
        run.trace.append(TraceEntry(int(rounds.start[i, column]), proposed, accepted, kept))
