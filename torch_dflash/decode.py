"""The step: absorb, draft, verify, accept, commit; prefill before it; N steps per dispatch on the device.

Letters: R rows, r rows of one call, T tokens of a prompt chunk, M pages per row, N positions of a row, K number of
drafts.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array, lax

from bridge.platform import Platform
from torch_dflash.accept import accept
from torch_dflash.block import Guess
from torch_dflash.likeliest import Several
from torch_dflash.propose import AllParams, Proposer
from torch_dflash.sampling import Choose, RowOptions
from torch_dflash.state import Capacity, Chunk, DecodeState, Round, Until, empty_pool, place, put_rows, take_rows
from torch_dflash.verify import TargetFunctions, run_target, verify, write_ids


def make_state(target: TargetFunctions, proposer: Proposer, capacity: Capacity, dtype: jnp.dtype) -> DecodeState:
    """An empty state on the device, or on those of the mesh. Placed there explicitly: an unplaced first state
    would compile every program twice."""
    empty = functools.partial(empty_state, target, proposer, capacity, dtype)
    if target.platform.mesh is None:
        return jax.device_put(empty(), jax.devices()[0])
    where = jax.tree.map(lambda part: part.sharding, state_shapes(target, proposer, capacity, dtype))
    return jax.jit(empty, out_shardings=where)()  # no device holds more than its part, not even at first


def empty_state(target: TargetFunctions, proposer: Proposer, capacity: Capacity, dtype: jnp.dtype) -> DecodeState:
    """Zeros, wherever JAX puts them."""
    block, rows = target.config.block, capacity.rows
    pool = empty_pool(block, target.config.num_layers, capacity, dtype, target.platform)
    committed_len, anchor, budget = (jnp.zeros(rows, jnp.int32) for _ in range(3))  # three arrays: each is donated
    history = jnp.zeros((rows, capacity.slots_per_row), jnp.int32)
    return DecodeState(pool, committed_len, anchor, budget, history, proposer.make_state(capacity, dtype))


def state_shapes(target: TargetFunctions, proposer: Proposer, capacity: Capacity, dtype: jnp.dtype) -> DecodeState:
    """Shapes, dtypes and shardings of a state; nothing is allocated."""
    shapes = jax.eval_shape(functools.partial(empty_state, target, proposer, capacity, dtype))
    return place(shapes, target.platform)


@jax.named_scope("prefill")
def prefill(
    target: TargetFunctions,
    proposer: Proposer,
    choose: Choose,
    params: AllParams,
    state: DecodeState,
    rows: Array,
    tables: Array,
    options: RowOptions,
    prompts: Array,
    start: Array,
    chunk: Chunk,
) -> tuple[DecodeState, Array, Array]:
    """Process one prompt chunk at positions start.. int32[r] of the state rows `rows` int32[r].

    tables int32[r,M]; prompts int32[r,N] are the whole prompts. What lies before `start` is in the pages already, from
    earlier chunks or from another request with the same beginning. Returns the state, and the token int32[r] behind
    the chunk with its log-probability: after the last chunk the row's first emitted token and its anchor.
    """
    whole, width = state, chunk.ids.shape[1]
    state = take_rows(state, rows)
    hidden, features, pool = run_target(
        target, params["target"], chunk.ids, proposer.taps, state.pool, tables, start, chunk.num_new
    )
    column = jnp.clip(chunk.num_new - 1, 0, width - 1)
    last = jnp.take_along_axis(hidden, column[:, None, None], axis=1)
    end = start + chunk.num_new
    token, logprob = choose(target.logits(params["target"], last), prompts, end - 1, options)
    budget = jnp.where(is_stop(token, options.stop_ids)[:, 0], 0, chunk.budget)
    known = jnp.take_along_axis(prompts, end[:, None], axis=1)  # in the next chunk
    behind = jnp.where(end[:, None] < options.prompt_len[:, None], known, token)
    next_ids = jnp.where(jnp.arange(width) == column[:, None], behind, jnp.roll(chunk.ids, -1, axis=1))
    state = DecodeState(
        pool=pool,
        committed_len=end,
        anchor=token[:, 0],
        budget=budget,
        history=write_ids(prompts, token, end, jnp.ones_like(end)),
        draft=proposer.prefill(params, state.draft, tables, features, next_ids, start, chunk.num_new),
    )
    return put_rows(whole, rows, state), token[:, 0], logprob[:, 0]


def step(
    target: TargetFunctions,
    proposer: Proposer,
    choose: Choose,
    params: AllParams,
    state: DecodeState,
    tables: Array,
    options: RowOptions,
) -> tuple[DecodeState, Round]:
    """One round for every active row. tables int32[R,M]."""
    num_new = block_length(state, proposer.num_drafts + 1, target.config.context_limit)
    state = replace(state, draft=proposer.absorb(params, state, tables))
    draft_ids, draft = proposer.draft(params, state, tables, as_target(target.platform, choose, state, options))
    state = replace(state, draft=draft)
    state, said = verify(target, params["target"], proposer.taps, state, tables, draft_ids, num_new, choose, options)
    num_accepted, bonus = accept(draft_ids, said.target_ids, num_new)
    done = Round(state.committed_len, num_new > 0, draft_ids, said.target_ids, said.logprobs, num_accepted)
    return commit(proposer, state, done, bonus, said.features, options.stop_ids), done


def as_target(platform: Platform, choose: Choose, state: DecodeState, options: RowOptions) -> Guess:
    """Drafts chosen as the target's tokens will be and with the same noise; of the tokens that penalties count, those
    up to the anchor are known."""
    unknown = jnp.arange(state.history.shape[1]) > state.committed_len[:, None]
    unasked = replace(options, logprobs=jnp.zeros_like(options.logprobs))

    def known(logits: Array) -> tuple[Array, Array, Array, RowOptions]:
        return logits, jnp.where(unknown, logits.shape[-1], state.history), state.committed_len, unasked

    def several(logits: Array, count: int) -> Several:
        return jax.tree.map(platform.by_rows, choose.several(*known(logits), count, platform.model))

    return Guess(lambda logits: choose(*known(logits))[0], several, lambda logits: choose.keep(logits, options))


def block_length(state: DecodeState, width: int, context_limit: int) -> Array:
    """int32[R]: positions that a row's block may fill: `width`, fewer just below the context limit, 0 when finished."""
    return jnp.where(state.budget > 0, jnp.clip(context_limit - state.committed_len, 0, width), 0)


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
        history=write_ids(state.history, done.target_ids, state.committed_len + 1, num_kept),
        draft=proposer.commit(state.draft, features, num_kept),
    )


def decode(
    target: TargetFunctions,
    proposer: Proposer,
    choose: Choose,
    max_steps: int,
    params: AllParams,
    state: DecodeState,
    rows: Array,
    tables: Array,
    options: RowOptions,
    until: Until,
) -> tuple[DecodeState, Round, Array]:
    """Rounds of the rows `rows` int32[r], at most max_steps; but one at least (a warm-up has nobody to decode for). No
    host sync inside.

    Row numbers >= R fill up a dispatch and do nothing; the rows not named stay as they are. Returns the state, the
    rounds (leading axis max_steps; those from the count on are padding) and their count int32.
    """
    whole, width, per_row = state, proposer.num_drafts + 1, jnp.zeros((max_steps, len(rows)), jnp.int32)
    empty = Round(
        start=per_row,
        active=per_row.astype(bool),
        draft_ids=jnp.zeros((*per_row.shape, width - 1), jnp.int32),
        target_ids=jnp.zeros((*per_row.shape, width), jnp.int32),
        logprobs=jnp.zeros((*per_row.shape, width), jnp.float32),
        num_accepted=per_row,
    )

    def unfinished(carry: tuple[DecodeState, Round, Array]) -> Array:
        active = (carry[0].budget > 0).sum()
        return (carry[2] < until.steps) & ((active >= until.active) | (carry[2] == 0))

    def one(carry: tuple[DecodeState, Round, Array]) -> tuple[DecodeState, Round, Array]:
        state, rounds, count = carry
        state, done = step(target, proposer, choose, params, state, tables, options)
        return state, jax.tree.map(lambda all_, new: all_.at[count].set(new), rounds, done), count + 1

    state = take_rows(state, rows)
    state = replace(state, draft=proposer.resume(params, state, tables))
    state, rounds, count = lax.while_loop(unfinished, one, (state, empty, jnp.int32(0)))
    return put_rows(whole, rows, state), rounds, count


@functools.cache
def prefill_program() -> Callable[..., tuple[DecodeState, Array, Array]]:
    """`prefill` compiled: once for each target, proposer, choice and set of shapes. The state is donated."""
    return jax.jit(prefill, static_argnames=("target", "proposer", "choose"), donate_argnames="state")


@functools.cache
def decode_program(platform: Platform) -> Callable[..., tuple[DecodeState, Round, Array]]:
    """`decode` compiled: once for each target, proposer, choice, max_steps and set of shapes. The state is donated."""
    return jax.jit(
        decode,
        static_argnames=("target", "proposer", "choose", "max_steps"),
        donate_argnames="state",
        compiler_options=dict(platform.compiler_options),
    )
