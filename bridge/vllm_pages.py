"""A drafter's context in pages that vLLM hands out, and a block's attention over them. No vLLM is needed here.

tpu-inference keeps one array per layer, [P, S, n, g, w]: g 16-bit numbers share a 32-bit word, n * g >= the heads of a
token, w is what a head takes (its ragged paged attention kernels, v3). With 64 numbers a head, key and value lie side
by side, w = 128; otherwise they alternate along the heads, and w is padded to a multiple of 128.

Tokens come flat, as vLLM schedules them: those of row 0, then those of row 1, ...; padding behind.

Letters: L layers, R rows, T tokens of all rows, B block_size, H query heads, K key/value heads, d head_dim, P pages, S
page_size, M pages per row, G = H / K.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from bridge.jnp_attention import HIDDEN, in_sight
from bridge.platform import precision
from bridge.positions import block_positions, pages_for, round_up
from bridge.tpu_attention import LANES, as_it_lies
from bridge.views import take_rows

NARROW_HEAD = 64  # its key and value lie side by side
RUN = 256  # positions that attention reads at a time: bounds its memory, whatever the context

Pool: TypeAlias = Array  # [P,S,n,g,w]


def stored_width(head_dim: int) -> int:
    """Numbers that a head takes in a page, as tpu-inference counts them.  Examples: 64 -> 64; 96 -> 128."""
    return head_dim if head_dim == NARROW_HEAD else round_up(head_dim, LANES)


def rows_of(query_start: Array, num_tokens: int) -> Array:
    """Row of each of the flat tokens, int32[T], from where the rows start, int32[R+1].

    Example: [0, 3, 5, 5], 6 tokens -> [0, 0, 0, 1, 1, 2]; padding gets some row.
    """
    row = jnp.searchsorted(query_start[1:], jnp.arange(num_tokens, dtype=jnp.int32), side="right")
    return jnp.minimum(row, query_start.shape[0] - 2).astype(jnp.int32)


def _packed(key: Array, value: Array, pool: Pool) -> Array:
    """Key and value [T,K,d] as a pool stores them [T,n,g,w]."""
    side_by_side = key.shape[-1] == NARROW_HEAD
    both = jnp.concatenate([key, value], -1) if side_by_side else jnp.stack([key, value], 2)
    both = both.reshape(key.shape[0], -1, both.shape[-1])
    stored, width = pool.shape[2] * pool.shape[3], pool.shape[4]
    both = jnp.pad(both, ((0, 0), (0, stored - both.shape[1]), (0, width - both.shape[2])))
    return both.reshape(-1, *pool.shape[2:]).astype(pool.dtype)


def _unpacked(pages: Array, heads: int, head_dim: int) -> tuple[Array, Array]:
    """Pages [R,m,S,n,g,w] -> their keys and values, each [R,m*S,K,d]."""
    rows, width = pages.shape[0], pages.shape[-1]
    stored = pages.reshape(rows, pages.shape[1] * pages.shape[2], -1, width)
    if head_dim == NARROW_HEAD:
        stored = stored[:, :, :heads]
        return stored[..., :head_dim], stored[..., head_dim:]
    stored = stored[:, :, : 2 * heads, :head_dim].reshape(rows, -1, heads, 2, head_dim)
    return stored[..., 0, :], stored[..., 1, :]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Span:
    """Each row's new tokens, which follow each other: int32[R] each.

    begin: where they begin among the flat tokens. first: position of the first. count: how many there are; what lies
    behind them is dropped.
    """

    begin: Array
    first: Array
    count: Array


def write_tokens(pools: Sequence[Pool], keys: Array, values: Array, tables: Array, span: Span) -> list[Pool]:
    """Write K/V [L,T,K,d] into the rows' pages of L pools; tables int32[R,M].

    Page by page: XLA on TPU would copy a whole pool for a scatter, into an order of axes that it likes better.
    """
    size = pools[0].shape[1]
    packed = [
        _with_margin(_packed(key, value, pool), size) for key, value, pool in zip(keys, values, pools, strict=True)
    ]
    page_of_first = span.first // size
    pages = jnp.where(span.count > 0, (span.first + span.count - 1) // size - page_of_first + 1, 0)
    ends = jnp.cumsum(pages)

    def put(number: Array, pools: list[Pool]) -> list[Pool]:
        row = jnp.searchsorted(ends, number, side="right")
        page = page_of_first[row] + number - (ends[row] - pages[row])
        behind = page * size + jnp.arange(size, dtype=jnp.int32) - span.first[row]  # the row's first new token
        new = ((behind >= 0) & (behind < span.count[row]) & (page < tables.shape[1]))[:, None, None, None]
        here = tables[row, jnp.minimum(page, tables.shape[1] - 1)]

        def blend(pool: Pool, tokens: Array) -> Pool:
            old = lax.dynamic_index_in_dim(pool, here, keepdims=False)
            own = lax.dynamic_slice_in_dim(tokens, span.begin[row] + behind[0] + size, size)
            return lax.dynamic_update_index_in_dim(pool, jnp.where(new, own, old), here, 0)

        return [blend(pool, tokens) for pool, tokens in zip(pools, packed, strict=True)]

    return lax.fori_loop(0, ends[-1], put, list(pools))


def _with_margin(tokens: Array, size: int) -> Array:
    """`size` more tokens on either side, so that a page may begin and end anywhere."""
    return jnp.pad(tokens, ((size, size), *[(0, 0)] * (tokens.ndim - 1)))


@dataclass(frozen=True)
class _Softmax:
    """A softmax over keys that come in runs: of the runs so far, f32, per query [R,K,B,G,...]."""

    highest: Array
    total: Array  # of the weights
    out: Array  # [...,d], weighted values


def _over(queries: Array, key: Array, value: Array, visible: Array) -> _Softmax:
    """Scaled queries [R,B,K,G,d] over keys and values [R,s,K,d], visible bool [R,B,s]."""
    exact = precision(key.dtype)
    scores = jnp.einsum("rbkgd,rskd->rkbgs", queries, key.astype(jnp.float32), precision=exact)
    scores = jnp.where(visible[:, None, :, None], scores, HIDDEN)
    highest = scores.max(axis=-1)
    weights = jnp.exp(scores - highest[..., None])
    out = jnp.einsum("rkbgs,rskd->rkbgd", weights, value.astype(jnp.float32), precision=exact)
    return _Softmax(highest, weights.sum(axis=-1), out)


def _joined(a: _Softmax, b: _Softmax) -> _Softmax:
    highest = jnp.maximum(a.highest, b.highest)
    old, new = jnp.exp(a.highest - highest), jnp.exp(b.highest - highest)
    return _Softmax(highest, a.total * old + b.total * new, a.out * old[..., None] + b.out * new[..., None])


def block_attention(
    q: Array,
    key: Array,
    value: Array,
    pool: Pool,
    tables: Array,
    context_len: Array,
    causal: bool,
    window: int | None,
) -> Array:
    """A block sees its context (positions 0..context_len-1, in pages) and itself (positions context_len..).

    q [R,B,H,d], key and value [R,B,K,d], tables int32[R,M], context_len int32[R], 0 for padding rows -> [R,B,H,d]. The
    block's own K/V are written nowhere: vLLM need not have given it pages. Runs of pages are read one after the other,
    as many as the longest row has, from the first that a window lets anybody see. `causal`, `window`: see `in_sight`.
    """
    rows, width, heads, head_dim = q.shape
    kv_heads, page_size = key.shape[2], pool.shape[1]
    queries = q.reshape(rows, width, kv_heads, heads // kv_heads, head_dim).astype(jnp.float32) * head_dim**-0.5
    query_at = block_positions(context_len, width)
    pages = min(pages_for(RUN, page_size), tables.shape[1])
    missing = round_up(tables.shape[1], pages) - tables.shape[1]
    tables = jnp.pad(tables, ((0, 0), (0, missing)))

    def sees(key_at: Array) -> Array:  # [R,s] or [1,s] -> [R,B,s]
        return in_sight(query_at[:, :, None] - key_at[:, None], causal, window)

    def take(run: Array, so_far: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        of_run = lax.dynamic_slice_in_dim(tables, run * pages, pages, axis=1)
        keys, values = _unpacked(as_it_lies(take_rows(pool, of_run)), kv_heads, head_dim)
        key_at = (run * pages * page_size + jnp.arange(pages * page_size, dtype=jnp.int32))[None]
        visible = sees(key_at) & (key_at < context_len[:, None])[:, None]
        joined = _joined(_Softmax(*so_far), _over(queries, keys, values, visible))
        return joined.highest, joined.total, joined.out

    block = _over(queries, key, value, sees(query_at))
    first, last = _runs(context_len, pages * page_size, window)
    _, total, out = lax.fori_loop(first, last, take, (block.highest, block.total, block.out))
    return (out / total[..., None]).transpose(0, 2, 1, 3, 4).reshape(q.shape).astype(q.dtype)


def _runs(context_len: Array, run: int, window: int | None) -> tuple[Array, Array]:
    """Number of the first run of positions that any row sees, and of the one behind the last."""
    last = -(-context_len.max() // run)
    if window is None:
        return jnp.zeros_like(last), last
    oldest = jnp.where(context_len > 0, jnp.maximum(context_len - window + 1, 0), context_len.max())
    return oldest.min() // run, last
