"""Attention over paged K/V (the target's) and over context + block (the drafter's), and the pool they write.

Letters: R rows, T tokens, H query heads, K key/value heads, d head_dim, L layers, P pages of one layer, S page_size,
M pages per row, N draft cache slots.

The pool is one flat array [L*P, S, 2*K, d]: layer l owns pages l*P..(l+1)*P-1, so a block table plus l*P addresses
it. Keys are the even and values the odd entries of the third axis. This is the layout of JAX's ragged paged
attention kernel on TPU.
"""

from functools import partial

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


def _attend(q: Array, key: Array, value: Array, visible: Array) -> Array:
    """q [R,T,H,d], key and value [R,m,K,s,d] in m runs of s positions, visible bool [R,T,m,s] -> [R,T,H,d]. In
    float32.

    One softmax over all m*s keys. The runs (pages) stay a batch axis of the products, so that no key is moved.
    """
    rows, width, heads, head_dim = q.shape
    kv_heads, exact = key.shape[2], precision(q.dtype)
    grouped = q.reshape(rows, width, kv_heads, heads // kv_heads, head_dim).astype(jnp.float32)
    runs = jnp.broadcast_to(grouped[:, None], (rows, key.shape[1], *grouped.shape[1:]))
    scores = jnp.einsum("rmtkgd,rmksd->rmktgs", runs, key.astype(jnp.float32), precision=exact) * head_dim**-0.5
    scores = jnp.where(visible.transpose(0, 2, 1, 3)[:, :, None, :, None, :], scores, HIDDEN)
    weights = jnp.exp(scores - scores.max(axis=(1, 5), keepdims=True))
    out = jnp.einsum("rmktgs,rmksd->rmktgd", weights, value.astype(jnp.float32), precision=exact).sum(axis=1)
    out = out / weights.sum(axis=(1, 5))[..., None]
    return out.transpose(0, 2, 1, 3, 4).reshape(q.shape).astype(q.dtype)


def paged_attention(
    q: Array, key: Array, value: Array, pool: Array, tables: Array, start: Array, num_new: Array
) -> tuple[Array, Array]:
    """Write the new K/V, then let query i of row r see positions 0..start[r]+i. Causal; returns (out [R,T,H,d],
    pool).

    q [R,T,H,d], key and value [R,T,K,d], tables int32[R,M] (already offset to the layer), start and num_new
    int32[R]. Outputs of columns from num_new on are meaningless.
    """
    pool = write_pages(pool, key, value, tables, start, num_new)
    widths = page_widths(tables.shape[1])
    longest = jnp.where(num_new > 0, start + num_new, 0).max()
    shorter = jnp.array([width * pool.shape[1] for width in widths[:-1]], jnp.int32) < longest
    branches = [partial(_attend_pages, width) for width in widths]
    return lax.switch(shorter.sum(), branches, q, pool, tables, start), pool


def _attend_pages(width: int, q: Array, pool: Array, tables: Array, start: Array) -> Array:
    """Attention over the first `width` pages of every row."""
    rows, num_queries = q.shape[:2]
    page_size, heads, head_dim = pool.shape[1:]
    pages = from_storage(pool[tables[:, :width]]).reshape(rows, width, page_size, heads // 2, 2, head_dim)
    pages = pages.transpose(4, 0, 1, 3, 2, 5)
    key_at = jnp.arange(width * page_size, dtype=jnp.int32).reshape(width, page_size)
    visible = key_at <= block_positions(start, num_queries)[:, :, None, None]
    return _attend(q, pages[0], pages[1], visible)


def draft_attention(
    q: Array,
    key: Array,
    value: Array,
    context_key: Array,
    context_value: Array,
    draft_len: Array,
    causal: bool,
    window: int | None,
) -> Array:
    """The drafter's block sees its context (positions 0..draft_len-1) and itself (positions draft_len..).

    q [R,B,H,d], key and value [R,B,K,d], context_key and context_value [R,K,N,d], draft_len int32[R] -> [R,B,H,d].
    `causal` hides later block positions; with `window` W a query sees only |q - k| < W, each query by its own
    position.
    """
    rows, width = key.shape[:2]
    num_slots = context_key.shape[2]
    query_at = block_positions(draft_len, width)
    slot_at = jnp.broadcast_to(jnp.arange(num_slots, dtype=jnp.int32), (rows, num_slots))
    key_at = jnp.concatenate([slot_at, query_at], axis=1)[:, None, :]
    filled = jnp.concatenate([slot_at < draft_len[:, None], jnp.ones((rows, width), bool)], axis=1)
    distance = query_at[:, :, None] - key_at
    visible = jnp.broadcast_to(filled[:, None, :], distance.shape)
    if causal:
        visible &= distance >= 0
    if window is not None:
        visible &= jnp.abs(distance) < window
    keys = jnp.concatenate([from_storage(context_key), key.transpose(0, 2, 1, 3)], axis=2)
    values = jnp.concatenate([from_storage(context_value), value.transpose(0, 2, 1, 3)], axis=2)
    return _attend(q, keys[:, None], values[:, None], visible[:, :, None])
