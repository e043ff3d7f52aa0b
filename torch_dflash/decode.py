"""The step: absorb, draft, verify, accept, commit; prefill before it; N steps per dispatch on the device.

Letters: R rows, r rows of one prefill call, T tokens of a prompt chunk, M pages per row, N steps, K number of drafts.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array, lax

from bridge.attention import make_pool
from bridge.platform import compiler_options
from torch_dflash.accept import accept
from torch_dflash.propose import AllParams, Proposer
from torch_dflash.sampling import greedy
from torch_dflash.state import Capacity, DecodeState, Round
from torch_dflash.verify import TargetFunctions, run_target, verify


def make_state(target: TargetFunctions, proposer: Proposer, capacity: Capacity, dtype: jnp.dtype) -> DecodeState:
    """An empty state on the device. Placed there explicitly: an unplaced first state would compile every program
    twice."""
    block, rows = target.config.block, capacity.rows
    pool = make_pool(
        target.config.num_layers,
        capacity.num_pages,
        capacity.page_size,
        block.num_kv_heads,
        block.head_dim,
        dtype,
    )
    committed_len, anchor, budget = (jnp.zeros(rows, jnp.int32) for _ in range(3))  # three arrays: each is donated
    draft = proposer.make_state(rows, capacity.slots_per_row, dtype)
    state = DecodeState(pool, committed_len, anchor, budget, draft)
    return jax.device_put(state, jax.devices()[0])


@jax.named_scope("prefill")
def prefill(
    target: TargetFunctions,
    proposer: Proposer,
    params: AllParams,
    state: DecodeState,
    tables: Array,
    rows: Array,
    ids: Array,
    start: Array,
    num_new: Array,
    budget: Array,
    stop_ids: Array,
) -> tuple[DecodeState, Array]:
    """Process one prompt chunk, ids int32[r,T] at positions start.. [r], of the state rows `rows` int32[r].

    Returns the state and the greedy token int32[r] behind the chunk's last real token: after the last chunk it is
    the row's first emitted token and its anchor. `budget` int32[r] is what the row may emit behind that token (0
    before the last chunk); a token in stop_ids int32[r,n] makes it 0.
    """
    hidden, features, pool = run_target(
        target, params["target"], ids, proposer.taps, state.pool, tables[rows], start, num_new
    )
    last = jnp.take_along_axis(hidden, (num_new - 1)[:, None, None], axis=1)
    token = greedy(target.logits(params["target"], last))
    budget = jnp.where(is_stop(token, stop_ids)[:, 0], 0, budget)
    state = DecodeState(
        pool=pool,
        committed_len=state.committed_len.at[rows].set(start + num_new),
        anchor=state.anchor.at[rows].set(token[:, 0]),
        budget=state.budget.at[rows].set(budget),
        draft=proposer.prefill(params, state.draft, rows, features, start, num_new),
    )
    return state, token[:, 0]


def step(
    target: TargetFunctions,
    proposer: Proposer,
    params: AllParams,
    state: DecodeState,
    tables: Array,
    stop_ids: Array,
) -> tuple[DecodeState, Round]:
    """One round for every active row. tables int32[R,M]; stop_ids int32[R,n], filled up with -1."""
    state = replace(state, draft=proposer.absorb(params, state))
    draft_ids = proposer.draft(params, state)
    state, target_ids, features = verify(target, params["target"], proposer.taps, state, tables, draft_ids)
    num_accepted, bonus = accept(draft_ids, target_ids)
    done = Round(state.committed_len, state.budget > 0, draft_ids, target_ids, num_accepted)
    return commit(proposer, state, done, bonus, features, stop_ids), done


def is_stop(ids: Array, stop_ids: Array) -> Array:
    """ids int32[R,T], stop_ids int32[R,n] -> bool[R,T]: the id is among its own row's stop ids."""
    return (ids[:, :, None] == stop_ids[:, None, :]).any(axis=2)


@jax.named_scope("commit")
def commit(
    proposer: Proposer, state: DecodeState, done: Round, bonus: Array, features: Array, stop_ids: Array
) -> DecodeState:
    """Move active rows on by num_accepted + 1. Nothing is erased: the slots of rejected drafts lie inside the next
    block."""
    num_kept = jnp.where(done.active, done.num_accepted + 1, 0)
    emitted = jnp.arange(done.target_ids.shape[1]) < num_kept[:, None]
    stopped = (is_stop(done.target_ids, stop_ids) & emitted).any(axis=1)
    return replace(
        state,
        committed_len=state.committed_len + num_kept,
        anchor=jnp.where(done.active, bonus, state.anchor),
        budget=jnp.where(stopped, 0, jnp.maximum(state.budget - num_kept, 0)),
        draft=proposer.commit(state.draft, features, num_kept),
    )


def decode(
    target: TargetFunctions,
    proposer: Proposer,
    max_steps: int,
    params: AllParams,
    state: DecodeState,
    tables: Array,
    stop_ids: Array,
    num_steps: Array,
) -> tuple[DecodeState, Round, Array]:
    """Up to num_steps <= max_steps rounds on the device, fewer when every row is finished. No host sync inside.

    Returns the state, the rounds (leading axis max_steps; those from the count on are padding) and their count int32.
    """
    rows, width = state.anchor.shape[0], proposer.num_drafts + 1
    per_row = jnp.zeros((max_steps, rows), jnp.int32)
    empty = Round(
        start=per_row,
        active=per_row.astype(bool),
        draft_ids=jnp.zeros((max_steps, rows, width - 1), jnp.int32),
        target_ids=jnp.zeros((max_steps, rows, width), jnp.int32),
        num_accepted=per_row,
    )

    def unfinished(carry: tuple[DecodeState, Round, Array]) -> Array:
        return (carry[2] < num_steps) & (carry[0].budget > 0).any()

    def one(carry: tuple[DecodeState, Round, Array]) -> tuple[DecodeState, Round, Array]:
        state, rounds, count = carry
        state, done = step(target, proposer, params, state, tables, stop_ids)
        return state, jax.tree.map(lambda all_, new: all_.at[count].set(new), rounds, done), count + 1

    return lax.while_loop(unfinished, one, (state, empty, jnp.int32(0)))


@functools.cache
def prefill_program() -> Callable[..., tuple[DecodeState, Array]]:
    """`prefill` compiled: once for each target, proposer and set of shapes. The state is donated."""
    return jax.jit(prefill, static_argnames=("target", "proposer"), donate_argnames="state")


@functools.cache
def decode_program() -> Callable[..., tuple[DecodeState, Round, Array]]:
    """`decode` compiled: once for each target, proposer, max_steps and set of shapes. The state is donated."""
    return jax.jit(
        decode,
        static_argnames=("target", "proposer", "max_steps"),
        donate_argnames="state",
        compiler_options=compiler_options(),
    )
