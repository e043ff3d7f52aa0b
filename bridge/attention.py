"""Attention over paged K/V (the target's) and over paged context + block (the drafter's), and the pools they read.

Letters: R rows, T tokens, H query heads, K key/value heads, d head_dim, L layers, P pages of one layer, S page_size,
M pages per row, m runs of s positions, G = H / K.

A pool is one flat array [L*P, S, 2*K, d]: layer l owns pages l*P..(l+1)*P-1, so a block table plus l*P addresses
it. Keys are the even and values the odd entries of the third axis. This is the layout of JAX's ragged paged
attention kernel on TPU.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from bridge.platform import from_storage, page_widths, precision, storage_dtype, to_storage
from bridge.positions import block_positions, slots

HIDDEN = -1e30  # finite: a row of padding that sees nothing stays a number


def make_pool(
    num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype
) -> Array:
    """An empty pool [L*P, S, 2*K, d]."""
    shape = (num_layers * num_pages, page_size, 2 * num_kv_heads, head_dim)
    return jnp.zeros(shape, storage_dtype(dtype))


def write_pages(pool: Array, key: Array, value: Array, tables: Array, start: Array, num_new: Array) -> Array:
    """Write K/V [R,T,K,d] of positions start.. [R] into the rows' pages; columns from num_new [R] on are dropped."""
    rows, width, heads, head_dim = key.shape
    flat = pool.reshape(-1, 2 * heads, head_dim)
    where = slots(tables, block_positions(start, width), num_new, pool.shape[1], flat.shape[0])
    both = jnp.stack([key, value], axis=3).reshape(rows * width, 2 * heads, head_dim)
    where, both = _at_least_two(where.reshape(-1), both, dropped=flat.shape[0])
    flat = flat.at[where].set(to_storage(both, pool.dtype), mode="drop")
    return flat.reshape(pool.shape)


def _at_least_two(where: Array, values: Array, dropped: int) -> tuple[Array, Array]:
    """Pad a single write with one that is dropped: XLA on CPU copies the whole pool for a scatter of one row, not of
    two."""
    if where.shape[0] > 1:
        return where, values
    return jnp.pad(where, (0, 1), constant_values=dropped), jnp.pad(values, ((0, 1), (0, 0), (0, 0)))


@dataclass(frozen=True)
class _Keys:
    """Keys to look at, in m runs of s positions: key and value [R,m,K,s,d], visible bool [R,T,m,s]."""

    key: Array
    value: Array
    visible: Array


def _attend(q: Array, *parts: _Keys) -> Array:
    """q [R,T,H,d] over all keys of all parts, one softmax -> [R,T,H,d]. In float32.

    The runs (pages) stay a batch axis of the products, so that no key is moved, and parts are never joined.
    """
    rows, width, heads, head_dim = q.shape
    kv_heads, exact = parts[0].key.shape[2], precision(q.dtype)
    grouped = q.reshape(rows, width, kv_heads, heads // kv_heads, head_dim).astype(jnp.float32) * head_dim**-0.5

    def scores_of(part: _Keys) -> Array:  # [R,m,K,T,G,s]
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


def _gather(pool: Array, tables: Array) -> tuple[Array, Array, Array]:
    """Keys and values [R,m,K,S,d] of the pages in tables [R,m], and their positions int32[m,S]."""
    rows, width = tables.shape
    page_size, heads, head_dim = pool.shape[1:]
    pages = from_storage(pool[tables]).reshape(rows, width, page_size, heads // 2, 2, head_dim)
    pages = pages.transpose(4, 0, 1, 3, 2, 5)
    return pages[0], pages[1], jnp.arange(width * page_size, dtype=jnp.int32).reshape(width, page_size)


def _narrowest(page_size: int, tables: Array, longest: Array, attend: Callable[[Array], Array]) -> Array:
    """attend(tables cut to as few pages as hold `longest` positions), chosen on the device."""
    widths = page_widths(tables.shape[1])
    shorter = jnp.array([width * page_size for width in widths[:-1]], jnp.int32) < longest
    return lax.switch(shorter.sum(), [lambda t, w=w: attend(t[:, :w]) for w in widths], tables)


def paged_attention(
    q: Array, key: Array, value: Array, pool: Array, tables: Array, start: Array, num_new: Array
) -> tuple[Array, Array]:
    """Write the new K/V, then let query i of row r see positions 0..start[r]+i. Causal; returns (out [R,T,H,d],
    pool).

    q [R,T,H,d], key and value [R,T,K,d], tables int32[R,M] (already offset to the layer), start and num_new
    int32[R]. Outputs of columns from num_new on are meaningless.
    """
    pool = write_pages(pool, key, value, tables, start, num_new)

    def attend(tables: Array) -> Array:
        keys, values, key_at = _gather(pool, tables)
        visible = key_at <= block_positions(start, q.shape[1])[:, :, None, None]
        return _attend(q, _Keys(keys, values, visible))

    longest = jnp.where(num_new > 0, start + num_new, 0).max()
    return _narrowest(pool.shape[1], tables, longest, attend), pool


def draft_attention(
    q: Array,
    key: Array,
    value: Array,
    pool: Array,
    tables: Array,
    draft_len: Array,
    causal: bool,
    window: int | None,
) -> Array:
    """The drafter's block sees its context (positions 0..draft_len-1, in pages) and itself (positions draft_len..).

    q [R,B,H,d], key and value [R,B,K,d], pool [L*P,S,2*K,d], tables int32[R,M] (already offset to the layer),
    draft_len int32[R] -> [R,B,H,d]. `causal` hides later block positions; with `window` W a query sees only
    |q - k| < W, each query by its own position. The block's K/V are written nowhere.
    """
    query_at = block_positions(draft_len, q.shape[1])

    def sees(key_at: Array) -> Array:  # [R,m,s] -> [R,B,m,s]
        distance = query_at[:, :, None, None] - key_at[:, None]
        visible = jnp.ones(distance.shape, bool)
        if causal:
            visible &= distance >= 0
        return visible if window is None else visible & (jnp.abs(distance) < window)

    block_key, block_value = (part.transpose(0, 2, 1, 3)[:, None] for part in (key, value))
    block = _Keys(block_key, block_value, sees(query_at[:, None]))

    def attend(tables: Array) -> Array:
        keys, values, key_at = _gather(pool, tables)
        filled = key_at < draft_len[:, None, None]
        return _attend(q, _Keys(keys, values, sees(key_at[None]) & filled[:, None]), block)

    return _narrowest(pool.shape[1], tables, draft_len.max(), attend)
