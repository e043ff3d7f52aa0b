"""A proposal as pure functions of what vLLM's runner hands over: flat tokens, row borders, lengths, pages.

Letters: R rows (max_num_seqs, padding rows behind), T flat tokens (padded), B block_size, K num_drafts, F tapped
layers, D target hidden size, E drafter hidden size, L drafter layers, M pages per row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as Spec

from bridge.platform import EVERYWHERE, HEADS, POOL, Platform
from bridge.views import Params
from bridge.vllm_pages import Pool, Span, block_attention, rows_of, write_tokens
from torch_dflash.block import DrafterFunctions, Ends, draft_block, likeliest

TOKEN_HEADS = Spec(None, None, "model")  # [L,T,K,d]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """One step of the runner's, before the drafter has seen it."""

    query_start: Array  # int32[R+1], where each row's tokens begin; behind the last row it repeats
    seq_lens: Array  # int32[R], positions of the row, rejected drafts included
    positions: Array  # int32[T]
    num_rejected: Array  # int32[R]
    num_rows: Array  # int32[1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """What the drafter's cache lacks, and where it goes. The first three are the tuple that upstream hands from
    prepare_inputs to propose."""

    hidden: Array  # [T,E], projected features
    query_start: Array  # int32[R+1]
    positions: Array  # int32[T]; -1: rejected or padding
    length: Array  # int32[R], context positions with these; 0 in padding rows


@dataclass(frozen=True)
class Served:
    """A drafter within vLLM: functions without state.

    order: of the F hidden states, which vLLM hands over by ascending layer, the one for each tap of the drafter.
    """

    drafter: DrafterFunctions
    target: Ends
    num_drafts: int
    platform: Platform

    @property
    def order(self) -> tuple[int, ...]:
        taps = self.drafter.config.target_layer_ids
        return tuple(sorted(taps).index(tap) for tap in taps)


def take_context(served: Served, params: Params, batch: Batch, taps: Sequence[Array]) -> Context:
    """The new context: of a step's tokens, those that are committed. taps: F arrays [T,D], by ascending layer."""
    num_tokens, rows = batch.positions.shape[0], batch.seq_lens.shape[0]
    length = jnp.where(jnp.arange(rows) < batch.num_rows, batch.seq_lens - batch.num_rejected, 0)
    row = rows_of(batch.query_start, num_tokens)
    scheduled = jnp.arange(num_tokens) < batch.query_start[batch.num_rows[0]]
    committed = scheduled & (batch.positions < length[row])
    features = jnp.concatenate([taps[i] for i in served.order], axis=-1)
    hidden = served.drafter.project(params, features[None])[0]
    return Context(hidden, batch.query_start, jnp.where(committed, batch.positions, -1), length)


def absorb(served: Served, params: Params, pools: Sequence[Pool], tables: Array, context: Context) -> list[Pool]:
    """The pools of the L layers with the context's K/V written; tables int32[R,M]."""
    at = jnp.maximum(context.positions, 0)[None]
    keys, values = served.drafter.context_key_value(params, context.hidden[None], at)
    begin = context.query_start[:-1]
    first = context.positions[jnp.minimum(begin, context.positions.shape[0] - 1)]
    span = Span(begin, first, jnp.where(first < 0, 0, jnp.maximum(context.length - first, 0)))
    where = (POOL, TOKEN_HEADS, TOKEN_HEADS, EVERYWHERE, EVERYWHERE)
    return served.platform.spread(write_tokens, where, POOL)(list(pools), keys[:, 0], values[:, 0], tables, span)


def propose(
    served: Served,
    params: Params,
    target_params: Any,
    pools: Sequence[Pool],
    tables: Array,
    context: Context,
    anchor: Array,
) -> tuple[list[Pool], Array]:
    """Absorb the context, then draft: the pools, and draft_ids int32[R,K] behind anchor int32[R]."""
    pools = absorb(served, params, pools, tables, context)
    attend = _attend(served, pools, tables, context.length)
    ids = draft_block(
        served.drafter,
        params,
        served.target,
        target_params,
        anchor,
        context.length,
        served.num_drafts,
        attend,
        likeliest(served.platform),
    )
    return pools, ids


def propose_program(served: Served) -> Any:
    """`propose`, compiled; the pools are donated."""
    options = dict(served.platform.compiler_options)
    return jax.jit(partial(propose, served), donate_argnames="pools", compiler_options=options)


def _attend(served: Served, pools: Sequence[Pool], tables: Array, length: Array) -> Callable[..., Any]:
    where = (HEADS, HEADS, HEADS, POOL, EVERYWHERE, EVERYWHERE)

    def attend(layer: int, q: Array, key: Array, value: Array, _: Any) -> tuple[Array, Any]:
        sees = served.drafter.config.layers[layer]

        def local(q: Array, key: Array, value: Array, pool: Pool, tables: Array, length: Array) -> Array:
            return block_attention(q, key, value, pool, tables, length, sees.causal, sees.window)

        return served.platform.spread(local, where, HEADS)(q, key, value, pools[layer], tables, length), None

    return attend
