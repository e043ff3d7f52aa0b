"""The largest of many scores: one of each position, or several.

Letters: R rows, T tokens, V vocabulary, C candidates of a position.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

GROUP = 384  # of `best`: 2^7 * 3, of which a vocabulary that is spread over chips has many factors


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


def best(scores: Array, count: int) -> tuple[Array, Array]:
    """The `count` largest of [..., V] as f32, and their ids int32[..., count], in no order.

    Group by group first: they lie in the `count` groups with the largest maxima. top_k of all V is slow everywhere.
    A group's members are V / size apart, so that chips that share V have some of each group, and exchange maxima.
    """
    size = group_size(scores.shape[-1])
    groups = -(-scores.shape[-1] // size)
    padding = [(0, 0)] * (scores.ndim - 1) + [(0, groups * size - scores.shape[-1])]
    grouped = jnp.pad(scores, padding, constant_values=-jnp.inf).reshape(*scores.shape[:-1], size, groups)
    _, chosen = lax.top_k(grouped.max(axis=-2), min(count, groups))
    kept = jnp.take_along_axis(grouped, chosen[..., None, :], axis=-1)
    values, places = lax.top_k(kept.reshape(*scores.shape[:-1], -1).astype(jnp.float32), count)
    ids = places // chosen.shape[-1] * groups + jnp.take_along_axis(chosen, places % chosen.shape[-1], axis=-1)
    return values, jnp.minimum(ids, scores.shape[-1] - 1)  # where fewer are finite, the padding is among them


def group_size(vocab_size: int) -> int:
    """Members of a group: a multiple of the chips that may share the vocabulary; where it has few factors, nobody does.

    Examples: 49152 -> 384, 151936 -> 128, 50257 -> 384 with padding.
    """
    common = math.gcd(vocab_size, GROUP)
    return common if common >= GROUP // 4 else GROUP


def greedy_several(logits: Array, count: int) -> Several:
    """The `count` likeliest tokens behind logits [R,T,V]."""
    values, ids = best(logits, count)
    return Several(ids, values, jnp.zeros_like(values), jnp.ones(logits.shape[0], jnp.float32))
