"""The target's side of a step: one causal pass over tokens at known positions, K/V into pages.

Letters: R rows, T tokens, K number of drafts, M pages per row, F tapped layers, D target hidden size, V vocabulary, N
positions of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bridge.attention import paged_attention
from bridge.platform import Platform
from bridge.positions import block_positions
from bridge.views import Params, lower
from torch_dflash.config import TargetConfig
from torch_dflash.models.target import Target
from torch_dflash.sampling import Choose, RowOptions
from torch_dflash.stacked import lower_stacked
from torch_dflash.state import DecodeState


@dataclass(frozen=True)
class TargetFunctions:
    """The target's methods as pure JAX functions f(params, ...)."""

    config: TargetConfig
    platform: Platform
    forward: Callable[..., Any]
    embed: Callable[..., Array]
    logits: Callable[..., Array]


@dataclass(frozen=True)
class Verified:
    """What the target says about a block: its own token behind each of the K + 1, that token's log-probability (see
    `choose`), and the features."""

    target_ids: Array  # int32[R,K+1]
    logprobs: Array  # f32[R,K+1]
    features: Array  # [R,K+1,F*D]


def lower_target(module: Target, config: TargetConfig, platform: Platform) -> TargetFunctions:
    """Lower a target module; its parameters (stacked, if the platform wants them so) are arguments of the results."""
    if platform.stacked:
        return TargetFunctions(config, platform, *lower_stacked(module, platform))
    return TargetFunctions(config, platform, lower(module), lower(module, "embed"), lower(module, "logits"))


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
    platform, (rows, width) = target.platform, ids.shape
    pages_per_layer = pool.shape[0] // (platform.data * target.config.num_layers)

    def attend(layer: Any, q: Array, k: Array, v: Array, pool: Array) -> tuple[Array, Array]:
        return paged_attention(q, k, v, pool, layer * pages_per_layer, tables, start, num_new, platform)

    fast = max(width, -(-platform.fast_tokens * platform.data // rows))
    ids = jnp.pad(ids, ((0, 0), (0, fast - width)))
    hidden, features, pool = target.forward(params, ids, block_positions(start, fast), taps, attend, pool)
    return hidden[:, :width], platform.by_rows(features[:, :width]), pool


@jax.named_scope("verify")
def verify(
    target: TargetFunctions,
    params: Params,
    taps: tuple[int, ...],
    state: DecodeState,
    tables: Array,
    draft_ids: Array,
    num_new: Array,
    choose: Choose,
    options: RowOptions,
) -> tuple[DecodeState, Verified]:
    """One pass over [anchor, drafts] at positions committed_len.., of which the first num_new[r] are processed.

    draft_ids int32[R,K]. Returns the state with the block's K/V in the pages, and what the target says.
    """
    block_ids = jnp.concatenate([state.anchor[:, None], draft_ids], axis=1)
    start = state.committed_len
    hidden, features, pool = run_target(target, params, block_ids, taps, state.pool, tables, start, num_new)
    ids = write_ids(state.history, block_ids, start, num_new)
    target_ids, logprobs = choose(target.logits(params, hidden), ids, start, options)
    return replace(state, pool=pool), Verified(target_ids, logprobs, features)


def write_ids(history: Array, ids: Array, start: Array, num_new: Array) -> Array:
    """history int32[R,N] with the first num_new[r] of ids int32[R,T] at positions start.. [R]."""
    rows, width = ids.shape
    at = jnp.where(jnp.arange(width) < num_new[:, None], block_positions(start, width), history.shape[1])
    return history.at[jnp.arange(rows)[:, None], at].set(ids, mode="drop")
