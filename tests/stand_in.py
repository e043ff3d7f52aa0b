"""A stand-in for the device, on the host: it plays known texts and wrong drafts at known positions.

It has the interface of torch_dflash.device.Device and does with its memory what the programs do, slot by slot: what a
row reads must hold exactly that row's tokens, what it writes must be its own. A slot holds a key that stands for all
tokens up to it, as K/V depends on all of them. Target K/V and draft context are two memories under the same tables.
"""

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from helpers import golden_pair
from schedules import check_dispatch

from bridge.context import ContextBuffer
from bridge.pages import NULL_PAGE, PageAllocator
from bridge.positions import power_of_two
from torch_dflash.engine import Engine
from torch_dflash.options import NOTHING, Choice
from torch_dflash.pace import Pace, Steady
from torch_dflash.pair import Pair
from torch_dflash.propose import Plain, Proposer
from torch_dflash.sampling import choose
from torch_dflash.state import Capacity, Chunk, DecodeState, DraftState, Round, Until

LETTERS = [letter.encode() for letter in ("a", "b", "c", "é", "你")]
LONGEST_ANSWER = 40
UNKNOWN = -1  # key of a rejected draft


def spell(source: random.Random, letters: int) -> tuple[int, ...]:
    """Ids of random letters, some of several bytes."""
    return tuple(b"".join(source.choice(LETTERS) for _ in range(letters)))


@dataclass(frozen=True)
class Told:
    """A prompt and its answer, the key of every position, and the positions for which the draft is wrong."""

    ids: tuple[int, ...]
    keys: np.ndarray  # int64, of all tokens up to a position
    wrong: frozenset[int]

    def drafts(self, anchor_at: int, count: int) -> list[int]:
        """What is proposed behind the anchor."""
        at = range(anchor_at + 1, anchor_at + 1 + count)
        return [self.ids[p] + 1 if p in self.wrong else self.ids[p] for p in at]

    def accepted(self, anchor_at: int, count: int) -> int:
        """How many of these drafts are right up to the first wrong one."""
        at = range(anchor_at + 1, anchor_at + 1 + count)
        return next((p - anchor_at - 1 for p in at if p in self.wrong), max(count, 0))


@functools.lru_cache(maxsize=8192)
def told(prompt: tuple[int, ...]) -> Told:
    """A text that begins with the prompt, another one for each prompt."""
    source = random.Random(hash(prompt))
    share = source.choice([0.0, 0.2, 0.5, 1.0])
    answer = spell(source, LONGEST_ANSWER + 10)
    return tell(prompt, answer, [p for p in range(len(answer)) if source.random() < share])


def tell(prompt: tuple[int, ...], answer: Sequence[int], wrong: Sequence[int] = ()) -> Told:
    """A prompt and its answer; `wrong` counts from the answer's beginning."""
    ids = (*prompt, *answer)
    keys = list(itertools.accumulate(ids, lambda key, token: abs(hash((key, token))) + 1, initial=0))[1:]
    return Told(ids, np.array(keys, np.int64), frozenset(len(prompt) + p for p in wrong))


class StandIn:
    """See above. `pages` is to be the engine's allocator, against which writes are checked."""

    pages: PageAllocator

    def __init__(
        self,
        pair: Pair,
        proposers: Sequence[Proposer],
        capacity: Capacity,
        max_steps: int,
        told: Callable[[tuple[int, ...]], Told] = told,
    ) -> None:
        self.pair, self.proposers, self.capacity, self.max_steps = pair, proposers, capacity, max_steps
        self.told = told
        self.choose = choose
        self.num_stop_ids = self.num_biased = 1
        self.target_memory, self.draft_memory = (
            np.zeros((capacity.num_pages, capacity.page_size), np.int64) for _ in range(2)
        )
        rows, width = capacity.rows, proposers[0].num_drafts + 1
        draft = DraftState(_no_pool(capacity), ContextBuffer(np.zeros((rows, width, 1))), _zeros(rows))
        history = np.zeros((rows, capacity.slots_per_row), np.int32)
        self.state = DecodeState(_no_pool(capacity), _zeros(rows), _zeros(rows), _zeros(rows), history, draft)
        self.prompts: list[tuple[int, ...]] = [()] * rows
        self.choices = [NOTHING] * rows
        self.under_way = False
        self.seen = Counter[str]()
        self.widths: list[int] = []  # rows of each dispatch

    def wait(self) -> None:
        self.under_way = False

    def prefill(
        self, row: int, table: np.ndarray, choice: Choice, prompt: tuple[int, ...], start: int, chunk: Chunk
    ) -> tuple[np.ndarray, np.ndarray]:
        text, length, state = self.told(prompt), int(chunk.num_new[0]), self.state
        end = start + length
        assert chunk.ids.shape == (1, power_of_two(length, 16)) and length <= 256
        assert chunk.ids[0, :length].tolist() == list(prompt[start:end])
        self.seen["hits"] += start > 0 and (self.prompts[row] != prompt or state.committed_len[row] != start)
        self.prompts[row], self.choices[row] = prompt, choice
        for memory in (self.target_memory, self.draft_memory):
            self._read(memory, table[0], text, start)
            self._write(memory, row, table[0], start, text.keys[start:end])
        token = text.ids[end] if end == len(prompt) else 0
        state.history[row] = 0
        state.history[row, : len(prompt)] = prompt
        state.history[row, end : end + 1] = token
        state.committed_len[row] = state.draft.draft_len[row] = end
        state.anchor[row] = token
        state.budget[row] = 0 if token in choice.stop_ids else chunk.budget[0]
        assert end == len(prompt) or chunk.budget[0] == 0
        self.under_way = True
        return np.array([token]), np.zeros(1)

    def decode(
        self, rows: Sequence[int], tables: np.ndarray, choices: Sequence[Choice], proposer: Proposer, until: Until
    ) -> tuple[Round, int]:
        assert not self.under_way, "a chunk's time would count as the dispatch's"
        self.widths.append(len(rows))
        check_dispatch(rows, tables, self.capacity)
        active = [row for row in rows if row < self.capacity.rows]
        assert (self.state.budget[active] > 0).all(), "a finished row takes part"
        assert all(self.choices[row] is choice for row, choice in zip(rows, choices, strict=False) if row in active)
        assert 0 < until.steps <= self.max_steps and proposer in self.proposers
        shape, width = (self.max_steps, len(rows)), proposer.num_drafts + 1
        junk = np.full((*shape, width), 77, np.int32)  # what the host must not look at
        rounds = Round(
            start=junk[:, :, 0].copy(),
            active=np.zeros(shape, bool),
            draft_ids=junk[:, :, 1:].copy(),
            target_ids=junk,
            logprobs=np.zeros(junk.shape, np.float32),
            num_accepted=junk[:, :, 0].copy(),
        )
        count = 0
        while count < until.steps and (self.state.budget[active] > 0).sum() >= until.active:
            for column, row in enumerate(active):
                if self.state.budget[row] > 0:
                    self._round(row, tables[column], proposer.num_drafts, rounds, (count, column))
            count += 1
        return rounds, count

    def _round(self, row: int, table: np.ndarray, num_drafts: int, rounds: Round, at: tuple[int, int]) -> None:
        state, text, start = self.state, self.told(self.prompts[row]), int(self.state.committed_len[row])
        pending = int(state.draft.draft_len[row])
        self._write(self.draft_memory, row, table, pending, text.keys[pending:start])
        state.draft.draft_len[row] = start
        for memory in (self.target_memory, self.draft_memory):
            self._read(memory, table, text, start)
        num_new = min(self.pair.target.config.context_limit - start, num_drafts + 1)
        assert num_new > 0, "a row at the context's end decodes"
        accepted = text.accepted(start, num_new - 1)
        keys = np.full(num_new, UNKNOWN, np.int64)
        keys[: accepted + 1] = text.keys[start : start + accepted + 1]
        self._write(self.target_memory, row, table, start, keys)
        emitted = text.ids[start + 1 : start + 2 + accepted]
        rounds.start[at], rounds.active[at], rounds.num_accepted[at] = start, True, accepted
        rounds.draft_ids[at] = text.drafts(start, num_drafts)
        rounds.target_ids[at][: accepted + 1] = emitted
        stopped = any(token in self.choices[row].stop_ids for token in emitted)
        state.budget[row] = 0 if stopped else max(state.budget[row] - len(emitted), 0)
        state.committed_len[row] = start + len(emitted)
        state.anchor[row] = emitted[-1]
        room = state.history[row, start + 1 : start + 1 + len(emitted)]
        room[:] = emitted[: len(room)]

    def _read(self, memory: np.ndarray, table: np.ndarray, text: Told, length: int) -> None:
        position = np.arange(length)
        held = memory[table[position // self.capacity.page_size], position % self.capacity.page_size]
        assert (held == text.keys[:length]).all(), "a page does not hold this row's tokens"

    def _write(self, memory: np.ndarray, row: int, table: np.ndarray, start: int, keys: np.ndarray) -> None:
        position = np.arange(start, start + len(keys))
        pages = table[position // self.capacity.page_size]
        for page in set(pages.tolist()):
            assert page != NULL_PAGE, "a position that was not reserved is written"
            assert page in self.pages._owned[row] and self.pages._users[page] == 1, "another row's page is written"
            assert page not in self.pages._key_of, "a page that others may look for is written"
        memory[pages, position % self.capacity.page_size] = keys


@functools.cache
def limited(context_limit: int) -> Pair:
    """A pair with a tokenizer of bytes and so much context."""
    pair = golden_pair("trained-bytes")
    return replace(pair, target=replace(pair.target, config=replace(pair.target.config, context_limit=context_limit)))


def stand_in_engine(
    capacity: Capacity,
    context_limit: int,
    max_steps: int = 2,
    pace: Pace = Steady(Plain(num_drafts=3)),  # noqa: B008  (a value)
    told: Callable[[tuple[int, ...]], Told] = told,
) -> Engine:
    """An engine on a stand-in."""
    device = StandIn(limited(context_limit), pace.proposers, capacity, max_steps, told)
    engine = Engine(device, pace)  # type: ignore[arg-type]
    device.pages = engine.pages
    return engine


def _zeros(rows: int) -> np.ndarray:
    return np.zeros(rows, np.int32)


def _no_pool(capacity: Capacity) -> np.ndarray:
    return np.zeros((capacity.num_pages, 1, 1, 1))
