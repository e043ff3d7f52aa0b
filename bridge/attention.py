"""Attention over paged K/V (the target's) and over paged context + block (the drafter's), and the pools they read.

Letters: R rows, T tokens, H query heads, K key/value heads, d head_dim, L layers, P pages of one layer, S page_size,
M pages per row, m runs of s positions.

A pool is one flat array [L*P, S, 2*K, d]: layer l owns pages l*P..(l+1)*P-1, so its first page l*P is added to what
a block table says. What does not depend on the layer is computed before that, and by XLA only once. Keys are the even
and values the odd entries of the third axis. This is the layout of JAX's ragged paged attention kernel on TPU. A pool
may have more heads and wider ones than the model (see `Platform`): zeros.

With a mesh every device has its own rows' pages and its own heads, and all of this happens on each of them alone.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from bridge.jnp_attention import Keys, attend_to, in_sight
from bridge.platform import EVERYWHERE, HEADS, POOL, ROWS, Platform, from_storage, to_storage
from bridge.positions import block_positions, slots
from bridge.tpu_attention import as_it_lies, flash, ragged


def make_pool(
    num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: Any, platform: Platform
) -> Array:
    """An empty pool [L*P, S, 2*K, d]; num_pages: of each row group, a data-parallel device's own rows."""
    heads, dim = platform.stored_heads(num_kv_heads), platform.stored_dim(head_dim)
    shape = (platform.data * num_layers * num_pages, page_size, 2 * heads, dim)
    return jnp.zeros(shape, platform.storage_dtype(dtype))


def write_pages(
    pool: Array, key: Array, value: Array, first_page: Array | int, tables: Array, start: Array, num_new: Array
) -> Array:
    """Write K/V [R,T,K,d] of positions start.. [R] into the rows' pages; columns from num_new [R] on are dropped."""
    rows, width, heads, head_dim = key.shape
    flat = pool.reshape(-1, *pool.shape[2:])
    where = slots(tables, block_positions(start, width), num_new, pool.shape[1], flat.shape[0])
    where += first_page * pool.shape[1]  # what is to be dropped lies behind the pool, and stays there
    missing = ((0, 0), (0, 0), (0, pool.shape[2] // 2 - heads), (0, 0), (0, pool.shape[3] - head_dim))
    both = jnp.pad(jnp.stack([key, value], axis=3), missing).reshape(rows * width, *pool.shape[2:])
    where, both = _at_least_two(where.reshape(-1), both, dropped=flat.shape[0])
    flat = flat.at[where].set(to_storage(both, pool.dtype), mode="drop")
    return flat.reshape(pool.shape)


def _at_least_two(where: Array, values: Array, dropped: int) -> tuple[Array, Array]:
    """Pad a single write with one that is dropped: XLA on CPU copies the whole pool for a scatter of one row, not of
    two."""
    if where.shape[0] > 1:
        return where, values
    return jnp.pad(where, (0, 1), constant_values=dropped), jnp.pad(values, ((0, 1), (0, 0), (0, 0)))


def _gather(pool: Array, tables: Array, like: Array, platform: Platform) -> tuple[Array, Array, Array]:
    """Keys and values [R,m,K,S,d] of the pages in tables [R,m], K and d as in like [R,T,K,d], and their positions
    int32[m,S]."""
    rows, width = tables.shape
    page_size, heads, head_dim = pool.shape[1:]
    pages = from_storage(as_it_lies(pool[tables]) if platform.kernels else pool[tables])
    pages = pages.reshape(rows, width, page_size, heads // 2, 2, head_dim)
    pages = pages[:, :, :, : like.shape[2], :, : like.shape[3]].transpose(4, 0, 1, 3, 2, 5)
    return pages[0], pages[1], jnp.arange(width * page_size, dtype=jnp.int32).reshape(width, page_size)


def _narrowest(
    platform: Platform, page_size: int, tables: Array, longest: Array, attend: Callable[[Array], Array]
) -> Array:
    """attend(tables cut to as few pages as hold `longest` positions), chosen on the device."""
    widths = platform.page_widths(tables.shape[1], page_size)
    shorter = jnp.array([width * page_size for width in widths[:-1]], jnp.int32) < longest
    return lax.switch(shorter.sum(), [lambda t, w=w: attend(t[:, :w]) for w in widths], tables)


def paged_attention(
    q: Array,
    key: Array,
    value: Array,
    pool: Array,
    first_page: Array | int,
    tables: Array,
    start: Array,
    num_new: Array,
    platform: Platform,
) -> tuple[Array, Array]:
    """Write the new K/V, then let query i of row r see positions 0..start[r]+i. Causal; returns (out [R,T,H,d],
    pool).

    q [R,T,H,d], key and value [R,T,K,d], first_page int32[] of the layer, tables int32[R,M], start and num_new
    int32[R]. Outputs of columns from num_new on are meaningless.
    """

    def local(
        q: Array, key: Array, value: Array, pool: Array, first: Array, tables: Array, start: Array, num_new: Array
    ) -> tuple[Array, Array]:
        pool = write_pages(pool, key, value, first, tables, start, num_new)
        if platform.kernels:
            return ragged(q, pool, first, tables, start, num_new, key.shape[2]), pool

        def attend(tables: Array) -> Array:
            keys, values, key_at = _gather(pool, tables + first, key, platform)
            visible = key_at <= block_positions(start, q.shape[1])[:, :, None, None]
            return attend_to(q, Keys(keys, values, visible))

        longest = jnp.where(num_new > 0, start + num_new, 0).max()
        return _narrowest(platform, pool.shape[1], tables, longest, attend), pool

    spread = platform.spread(local, (HEADS, HEADS, HEADS, POOL, EVERYWHERE, ROWS, ROWS, ROWS), (HEADS, POOL))
    return spread(q, key, value, pool, jnp.int32(first_page), tables, start, num_new)


def draft_attention(
    q: Array,
    key: Array,
    value: Array,
    pool: Array,
    first_page: Array | int,
    tables: Array,
    draft_len: Array,
    causal: bool,
    window: int | None,
    platform: Platform,
) -> Array:
    """The drafter's block sees its context (positions 0..draft_len-1, in pages) and itself (positions draft_len..).

    q [R,B,H,d], key and value [R,B,K,d], pool [L*P,S,2*K,d], first_page int32[] of the layer, tables int32[R,M],
    draft_len int32[R] -> [R,B,H,d]. `causal` hides later block positions; with `window` W a query sees only
    |q - k| < W, each query by its own position. The block's K/V are written nowhere.
    """

    def local(q: Array, key: Array, value: Array, pool: Array, first: Array, tables: Array, draft_len: Array) -> Array:
        query_at = block_positions(draft_len, q.shape[1])

        def sees(key_at: Array) -> Array:  # [R,m,s] -> [R,B,m,s]
            return in_sight(query_at[:, :, None, None] - key_at[:, None], causal, window)

        block_key, block_value = (part.transpose(0, 2, 1, 3)[:, None] for part in (key, value))
        block = Keys(block_key, block_value, sees(query_at[:, None]))

        def attend(tables: Array) -> Array:
            keys, values, key_at = _gather(pool, tables + first, key, platform)
            filled = key_at < draft_len[:, None, None]
            context = Keys(keys, values, sees(key_at[None]) & filled[:, None])
            if platform.kernels:
                return flash(q, context, block, masked=causal or window is not None)
            return attend_to(q, context, block)

        return _narrowest(platform, pool.shape[1], tables, draft_len.max(), attend)

    spread = platform.spread(local, (HEADS, HEADS, HEADS, POOL, EVERYWHERE, ROWS, ROWS), HEADS)
    return spread(q, key, value, pool, jnp.int32(first_page), tables, draft_len)
