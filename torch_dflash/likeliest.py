"""The largest of many scores: one of each position, or several.

Letters: R rows, T tokens, V vocabulary, C candidates of a position.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

GROUP = 128  # of `best`: as wide as a vector register of a TPU


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Several:
    """The C tokens that are nearest to being chosen at each position, in no order."""

    ids: Array  # int32[R,T,C]
    scores: Array  # f32[R,T,C]  the largest is chosen
    scale: Array  # f32[R]  what a logit more adds to a score


def greedy(logits: Array) -> Array:
    """[..., V] -> int32[...]: the largest logit, the smallest id among equals. Drafter and target use this one
    function.

    Two plain reductions: XLA on CPU takes three times as long for argmax in bf16.
    """
    last = logits.shape[-1] - 1
    ids = jnp.where(logits == logits.max(axis=-1, keepdims=True), jnp.arange(last + 1, dtype=jnp.int32), last)
    return ids.min(axis=-1)


def best(scores: Array, count: int) -> tuple[Array, Array]:
    """The `count` largest of [..., V] as f32, and their ids int32[..., count], in no order.

    Group by group first: they lie in the `count` groups with the largest maxima. top_k of all V is slow everywhere.
    """
    groups = -(-scores.shape[-1] // GROUP)
    padding = [(0, 0)] * (scores.ndim - 1) + [(0, groups * GROUP - scores.shape[-1])]
    grouped = jnp.pad(scores, padding, constant_values=-jnp.inf).reshape(*scores.shape[:-1], groups, GROUP)
    _, chosen = lax.top_k(grouped.max(axis=-1), min(count, groups))
    kept = jnp.take_along_axis(grouped, chosen[..., None], axis=-2)
    values, places = lax.top_k(kept.reshape(*scores.shape[:-1], -1).astype(jnp.float32), count)
    ids = jnp.take_along_axis(chosen, places // GROUP, axis=-1) * GROUP + places % GROUP
    return values, jnp.minimum(ids, scores.shape[-1] - 1)  # where fewer are finite, the padding is among them


def greedy_several(logits: Array, count: int) -> Several:
    """The `count` likeliest tokens behind logits [R,T,V]."""
    values, ids = best(logits, count)
    return Several(ids, values, jnp.ones(logits.shape[0], jnp.float32))
