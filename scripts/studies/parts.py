"""The parts of a step, each alone and warm: plain step, verification, drafting, whole step.

All but drafting are the engine's own decode program, called as the engine calls it (Device.decode), with another
proposer. A dispatch of n steps takes (seconds around its steps) + n * (seconds of a step). Both come from two
dispatches of the same program, one of 1 step and one of 1 + MORE. Texts have no meaning here: every time depends on
shapes only.

Letters: R rows, M pages per row, K number of drafts, V vocabulary.
"""

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from torch_dflash.block import LIKELIEST, Guess
from torch_dflash.device import Device
from torch_dflash.options import NOTHING
from torch_dflash.pair import Pair
from torch_dflash.propose import AllParams, DFlash, Proposer
from torch_dflash.sampling import choose_greedily
from torch_dflash.state import Capacity, DecodeState, DraftState, Until

MORE = 3
ENDLESS = 2**20  # a budget that no dispatch here uses up
Part = Callable[[int, int], float]  # (context, steps) -> seconds of one dispatch


@dataclass(frozen=True)
class FreeDrafts(DFlash):
    """DFlash whose drafts cost nothing and are mostly wrong: of a step, verify, accept and commit are left. Here K may
    be 0, or more than the block has."""

    def resume(self, params: AllParams, state: DecodeState, tables: Array) -> DraftState:
        return self.absorb(params, state, tables)

    def absorb(self, params: AllParams, state: DecodeState, tables: Array) -> DraftState:
        assert state.draft is not None
        return replace(state.draft, draft_len=state.committed_len)

    def draft(self, params: AllParams, state: DecodeState, tables: Array, guess: Guess) -> tuple[Array, DraftState]:
        assert state.draft is not None
        after = state.anchor[:, None] + jnp.arange(1, self.num_drafts + 1, dtype=jnp.int32)
        return after % self.target.config.vocab_size, state.draft


def free_drafts(proposer: DFlash, num_drafts: int) -> FreeDrafts:
    """For the same models."""
    return FreeDrafts(proposer.drafter, proposer.target, num_drafts)


@dataclass(frozen=True)
class Cost:
    """Seconds: of a step; and of a dispatch besides its steps, the host's work included."""

    step: float
    around: float


def most_growth(num_drafts: int) -> int:
    """Positions that the longest dispatch here may add to the context, its last block included."""
    return (1 + MORE) * (num_drafts + 1)


def make_device(pair: Pair, proposers: Sequence[Proposer], capacity: Capacity, stop_ids: int = 1) -> Device:
    """A device for these parts, the proposer with most drafts first. stop_ids: of the engine that is measured."""
    device = Device(pair, proposers, capacity, 1 + MORE, choose_greedily)
    device.num_stop_ids = stop_ids
    return device


def whole_step(device: Device, proposer: Proposer) -> Part:
    """Dispatches of the engine's decode program, all rows active."""
    rows, tables = range(device.capacity.rows), own_pages(device.capacity)

    def dispatch(context: int, steps: int) -> float:
        device.state = at_context(device.state, context)
        device.wait()
        begin = time.perf_counter()
        _, count = device.decode(rows, tables, [NOTHING] * len(rows), proposer, Until(steps, 1))
        seconds = time.perf_counter() - begin
        assert count == steps, "a budget ended"
        return seconds

    return dispatch


def drafting(device: Device, proposer: DFlash) -> Part:
    """Dispatches of absorb and draft alone."""
    tables, program = own_pages(device.capacity), drafting_program(proposer)

    def dispatch(context: int, steps: int) -> float:
        device.state = at_context(device.state, context)
        device.wait()
        begin = time.perf_counter()
        device.state = program(device.pair.params, device.state, tables, np.int32(steps))
        device.wait()
        return time.perf_counter() - begin

    return dispatch


@functools.cache
def drafting_program(proposer: DFlash) -> Callable[..., DecodeState]:
    """A loop of absorb and draft on the device. Each round takes the anchor and the features from the one before it, so
    that the compiler can leave nothing out."""

    def one(params: AllParams, tables: Array, state: DecodeState) -> DecodeState:
        state = replace(state, draft=proposer.absorb(params, state, tables))
        ids, draft = proposer.draft(params, state, tables, LIKELIEST)
        new = jnp.ones_like(state.committed_len)
        features = jnp.roll(draft.context.features, 1, axis=1)[:, : proposer.num_drafts + 1]
        draft = proposer.commit(draft, features, new)
        return replace(state, draft=draft, anchor=ids.max(axis=1), committed_len=state.committed_len + new)

    def loop(params: AllParams, state: DecodeState, tables: Array, num_steps: Array) -> DecodeState:
        return lax.fori_loop(0, num_steps, lambda _, state: one(params, tables, state), state)

    options = dict(proposer.target.platform.compiler_options)
    return jax.jit(loop, donate_argnames="state", compiler_options=options)


def own_pages(capacity: Capacity) -> np.ndarray:
    """Block tables int32[R,M]: every row has its own pages; page 0 is NULL."""
    pages = np.arange(1, 1 + capacity.rows * capacity.pages_per_row, dtype=np.int32)
    return pages.reshape(capacity.rows, capacity.pages_per_row)


def at_context(state: DecodeState, context: int) -> DecodeState:
    """The state with `context` committed positions in every row, the last of which the drafter has yet to absorb."""

    def filled(like: Array, value: int) -> Array:
        return jax.device_put(np.full(like.shape, value, like.dtype), like.sharding)

    lengths = {"committed_len": filled(state.committed_len, context), "budget": filled(state.budget, ENDLESS)}
    if state.draft is None:
        return replace(state, **lengths)
    return replace(state, **lengths, draft=replace(state.draft, draft_len=filled(state.draft.draft_len, context - 1)))


def sample(part: Part, context: int) -> Cost:
    """One pair of dispatches."""
    one, many = part(context, 1), part(context, 1 + MORE)
    step = (many - one) / MORE
    return Cost(step, one - step)


def rounds(parts: Mapping[Any, tuple[Part, int]], repeats: int) -> Iterator[dict[Any, Cost]]:
    """Each (part, context) once a round, in turns, since a machine is fast and slow in spells. Warmed up before."""
    for part, context in parts.values():
        sample(part, context)
    for _ in range(repeats):
        yield {name: sample(part, context) for name, (part, context) in parts.items()}
