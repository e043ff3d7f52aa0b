"""The target's side of a step: one causal pass over tokens at known positions, K/V into pages.

Letters: R rows, T tokens, K number of drafts, M pages per row, F tapped layers, D target hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bridge.attention import paged_attention
from bridge.positions import block_positions
from bridge.views import Params, lower
from torch_dflash.config import TargetConfig
from torch_dflash.models.target import Target
from torch_dflash.sampling import greedy
from torch_dflash.state import DecodeState


@dataclass(frozen=True)
class TargetFunctions:
    """The target's methods as pure JAX functions f(params, ...)."""

    config: TargetConfig
    forward: Callable[..., Any]
    embed: Callable[..., Array]
    logits: Callable[..., Array]


def lower_target(module: Target, config: TargetConfig) -> TargetFunctions:
    """Lower a target module; its parameters are arguments of the results."""
    return TargetFunctions(config, lower(module), lower(module, "embed"), lower(module, "logits"))


def run_target(
    target: TargetFunctions,
    params: Params,
    ids: Array,
    taps: tuple[int, ...],
    pool: Array,
    tables: Array,
    start: Array,
    num_new: Array,
) -> tuple[Array, Array, Array]:
    """Process ids int32[R,T] at positions start.. [R], of which the first num_new[r] are real.

    Returns normed hidden states [R,T,D], features [R,T,F*D] and the pool with the new K/V written.
    """
    pages_per_layer = pool.shape[0] // target.config.num_layers

    def attend(layer: Any, q: Array, k: Array, v: Array, pool: Array) -> tuple[Array, Array]:
        return paged_attention(q, k, v, pool, tables + layer * pages_per_layer, start, num_new)

    return target.forward(params, ids, block_positions(start, ids.shape[1]), taps, attend, pool)


@jax.named_scope("verify")
def verify(
    target: TargetFunctions, params: Params, taps: tuple[int, ...], state: DecodeState, tables: Array, draft_ids: Array
) -> tuple[DecodeState, Array, Array]:
    """One pass over [anchor, drafts] at positions committed_len..; finished rows write nothing.

    draft_ids int32[R,K]. Returns the state with the block's K/V in the pages, target_ids int32[R,K+1] (the target's
    own token behind each of the block's) and features [R,K+1,F*D].
    """
    block_ids = jnp.concatenate([state.anchor[:, None], draft_ids], axis=1)
    num_new = jnp.where(state.budget > 0, block_ids.shape[1], 0)
    hidden, features, pool = run_target(
        target, params, block_ids, taps, state.pool, tables, state.committed_len, num_new
    )
    return replace(state, pool=pool), greedy(target.logits(params, hidden)), features
