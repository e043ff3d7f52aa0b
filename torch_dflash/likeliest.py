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
    """The C tokens that are nearest to being chosen at each position, in no order. That with the largest sum of logit
    and noise is chosen, once what the request excludes is filtered out."""

    ids: Array  # int32[R,T,C]
    logits: Array  # f32[R,T,C]  divided by the row's temperature where it draws
    noise: Array  # f32[R,T,C]  0 where the row is greedy
    scale: Array  # f32[R]  by what `logits` were multiplied


def greedy(logits: Array) -> Array:
    """[..., V] -> int32[...]: the largest logit, the smallest id among equals. Drafter and target use this one
    function.

    Two plain reductions: XLA on CPU takes three times as long for argmax in bf16.
    """
    last = logits.shape[-1] - 1
    ids = jnp.where(logits == logits.max(axis=-1, keepdims=True), jnp.arange(last + 1, dtype=jnp.int32), last)
    return ids.min(axis=-1)


def best(scores: Array, count: int, chips: int = 1) -> tuple[Array, Array]:
    """The `count` largest of [..., V] as f32, and their ids int32[..., count], in no order. chips: that share V.

    Group by group first: they lie in the `count` groups with the largest maxima. top_k of all V is slow everywhere.
    """
    vocab_size = scores.shape[-1]
    size = group_size(vocab_size, chips)
    groups = -(-vocab_size // size)
    padding = [(0, 0)] * (scores.ndim - 1) + [(0, groups * size - vocab_size)]
    grouped = jnp.pad(scores, padding, constant_values=-jnp.inf).reshape(*scores.shape[:-1], groups, size)
    # In f32: XLA on CPU takes three times as long for the maxima of bf16.
    maxima = grouped.astype(jnp.float32).max(axis=-1).astype(scores.dtype)
    _, chosen = lax.top_k(maxima, min(count, groups))
    kept = jnp.take_along_axis(grouped, chosen[..., None], axis=-2)
    values, places = lax.top_k(kept.reshape(*scores.shape[:-1], -1).astype(jnp.float32), count)
    ids = jnp.take_along_axis(chosen, places // size, axis=-1) * size + places % size
    return values, jnp.minimum(ids, vocab_size - 1)  # where fewer are finite, the padding is among them


def group_size(vocab_size: int, chips: int) -> int:
    """Members of a group: GROUP, or less where only so many more groups can be dealt out to the chips, which would
    gather all logits otherwise.

    Examples: (151936, 1) -> 128, (151936, 4) -> 32.
    """
    fitting = [size for size in (GROUP, GROUP // 2, GROUP // 4) if vocab_size % (size * chips) == 0]
    return fitting[0] if fitting else GROUP


def greedy_several(logits: Array, count: int, chips: int) -> Several:
    """The `count` likeliest tokens behind logits [R,T,V]. chips: as for `best`."""
    values, ids = best(logits, count, chips)
    return Several(ids, values, jnp.zeros_like(values), jnp.ones(logits.shape[0], jnp.float32))
