"""The target's side of a step: one causal pass over tokens at known positions, K/V into pages.

Letters: R rows, T tokens, M pages per row, F tapped layers, D target hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax import Array

from bridge.attention import paged_attention
from bridge.positions import block_positions
from bridge.views import Params, lower
from torch_dflash.config import TargetConfig
from torch_dflash.models.target import Target


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
