"""Attention in plain jnp, for every platform: what the kernels for TPU are held against.

Letters: R rows, T tokens, H query heads, K key/value heads, d head_dim, m runs of s positions, G = H / K.
"""

import functools
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from bridge.platform import precision

HIDDEN = -1e30  # finite: a row of padding that sees nothing stays a number


@dataclass(frozen=True)
class Keys:
    """Keys to look at, in m runs of s positions: key and value [R,m,K,s,d], visible bool [R,T,m,s]."""

    key: Array
    value: Array
    visible: Array


def in_sight(distance: Array, causal: bool, window: int | None) -> Array:
    """Whether a query of a drafter's layer may see a key so many positions before it, bool in distance's shape.
    `causal` hides what is behind the query; with `window` W it sees only |distance| < W."""
    visible = distance >= 0 if causal else jnp.ones(distance.shape, bool)
    return visible if window is None else visible & (jnp.abs(distance) < window)


def attend_to(q: Array, *parts: Keys) -> Array:
    """q [R,T,H,d] over all keys of all parts, one softmax -> [R,T,H,d]. In float32.

    The runs (pages) stay a batch axis of the products, so that no key is moved, and parts are never joined.
    """
    rows, width, heads, head_dim = q.shape
    kv_heads, exact = parts[0].key.shape[2], precision(q.dtype)
    grouped = q.reshape(rows, width, kv_heads, heads // kv_heads, head_dim).astype(jnp.float32) * head_dim**-0.5

    def scores_of(part: Keys) -> Array:  # [R,m,K,T,G,s]
        runs = jnp.broadcast_to(grouped[:, None], (rows, part.key.shape[1], *grouped.shape[1:]))
        scores = jnp.einsum("rmtkgd,rmksd->rmktgs", runs, part.key.astype(jnp.float32), precision=exact)
        return jnp.where(part.visible.transpose(0, 2, 1, 3)[:, :, None, :, None, :], scores, HIDDEN)

    scores = [scores_of(part) for part in parts]
    highest = functools.reduce(jnp.maximum, [s.max(axis=(1, 5), keepdims=True) for s in scores])
    weights = [jnp.exp(s - highest) for s in scores]
    total = sum(w.sum(axis=(1, 5)) for w in weights)
    out = sum(
        jnp.einsum("rmktgs,rmksd->rmktgd", w, part.value.astype(jnp.float32), precision=exact).sum(axis=1)
        for w, part in zip(weights, parts, strict=True)
    )
    return (out / total[..., None]).transpose(0, 2, 1, 3, 4).reshape(q.shape).astype(q.dtype)
