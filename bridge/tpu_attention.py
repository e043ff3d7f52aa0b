"""Attention by JAX's Pallas kernels for TPU: ragged paged attention for the target, flash attention for the drafter.

They are twins of `jnp_attention.py`. The flash kernel also runs in interpret mode on CPU; the ragged one does not, and
only compiles there (jax 0.10).

Letters: R rows, T tokens, H query heads, K key/value heads, d head_dim, M pages per row, S page_size, G = H /
K, B block.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, SegmentIds, flash_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from bridge.jnp_attention import HIDDEN, Keys
from bridge.positions import pages_for, round_up

KV_BLOCK = 512  # positions that the kernels hold on chip at a time
QUERY_BLOCK = 16
VMEM_BYTES = 48 << 20
LANES = 128  # the kernels want heads, and runs of keys, in multiples of so many
SUBLANES = 8  # and queries


def as_it_lies(pages: Array) -> Array:
    """Pages [R,m,S,2*K,d] read from a pool, in the pool's order in memory. XLA would choose the order that their next
    reader likes, and copy the whole pool into it."""
    return with_layout_constraint(pages, Layout(major_to_minor=tuple(range(pages.ndim))))


def ragged(
    q: Array, pool: Array, first_page: Array, tables: Array, start: Array, num_new: Array, num_kv_heads: int
) -> Array:
    """Query i of row r sees positions 0..start[r]+i, which are in the pages.

    q [R,T,H,d], pool [L*P,S,2*K',d'] with padded heads K' >= K = num_kv_heads, tables int32[R,M] -> [R,T,H,d].
    """
    queries, _, lengths, tables, ends, num_seqs = ragged_arguments(
        q, pool, first_page, tables, start, num_new, num_kv_heads
    )
    with _exact(q.dtype):
        out = ragged_paged_attention(
            queries,
            pool,
            lengths,
            tables,
            ends,
            num_seqs,
            sm_scale=q.shape[-1] ** -0.5,
            num_kv_pages_per_block=min(max(1, KV_BLOCK // pool.shape[1]), tables.shape[1]),
            num_queries_per_block=min(QUERY_BLOCK, len(queries)),
            vmem_limit_bytes=VMEM_BYTES,
        )
    return own_heads(out, q.shape, num_kv_heads, pool.shape[2] // 2)


def ragged_arguments(
    q: Array, pool: Array, first_page: Array | int, tables: Array, start: Array, num_new: Array, num_kv_heads: int
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """The kernel's: queries [R*T,H',d'], pages, kv_lens int32[R], page_indices, cu_q_lens int32[R+1], num_seqs.

    Every row has T queries, padding too, so that query i is at position start + i; a row that is not active looks at T
    positions only. What padding sees behind the row's pages is the last of them again: meaningless, but real memory.
    """
    rows, width, heads, head_dim = q.shape
    groups, kv_heads = heads // num_kv_heads, pool.shape[2] // 2
    missing = ((0, 0), (0, 0), (0, kv_heads - num_kv_heads), (0, 0), (0, pool.shape[3] - head_dim))
    queries = jnp.pad(q.reshape(rows, width, num_kv_heads, groups, head_dim), missing)
    lengths = jnp.where(num_new > 0, start, 0) + width
    behind = jnp.repeat(tables[:, -1:], pages_for(width, pool.shape[1]), axis=1)
    return (
        queries.reshape(rows * width, kv_heads * groups, pool.shape[3]),
        pool,
        lengths,
        jnp.concatenate([tables, behind], axis=1) + first_page,
        width * jnp.arange(rows + 1, dtype=jnp.int32),
        jnp.array([rows], jnp.int32),
    )


def _exact(dtype: Any) -> AbstractContextManager:
    """Products of f32 inside a kernel are f32, not bf16."""
    return jax.default_matmul_precision("highest") if dtype == jnp.float32 else nullcontext()


def own_heads(out: Array, shape: tuple[int, ...], num_kv_heads: int, stored_heads: int) -> Array:
    """The kernel's output [R*T,H',d'] without what was padded -> `shape` [R,T,H,d]."""
    out = out.reshape(*shape[:2], stored_heads, -1, out.shape[-1])
    return out[:, :, :num_kv_heads, :, : shape[3]].reshape(shape)


def flash(q: Array, context: Keys, block: Keys, masked: bool) -> Array:
    """q [R,B,H,d] over context and block -> [R,B,H,d].

    masked: the queries of a row do not all see the same keys (a causal block, a window).
    """
    rows, width, heads, head_dim = q.shape
    kv_heads = context.key.shape[2]
    groups, slots = heads // kv_heads, context.key.shape[1] * context.key.shape[3] + width
    kv_block = min(KV_BLOCK, round_up(slots, LANES))
    more, dim, queries = (
        round_up(slots, kv_block) - slots,
        round_up(head_dim, LANES),
        round_up(groups * width, SUBLANES),
    )

    def both(first: Array, second: Array) -> Array:
        """[R,m,K,s,d] twice -> [R,K,slots,d]"""
        runs = [part.transpose(0, 2, 1, 3, 4).reshape(rows, kv_heads, -1, head_dim) for part in (first, second)]
        return jnp.pad(jnp.concatenate(runs, axis=2), ((0, 0), (0, 0), (0, more), (0, dim - head_dim)))

    seen = jnp.concatenate([part.visible.reshape(rows, width, -1) for part in (context, block)], axis=2)
    seen = jnp.pad(seen, ((0, 0), (0, 0), (0, more)))
    folded = q.reshape(rows, width, kv_heads, groups, head_dim).transpose(0, 2, 3, 1, 4)
    folded = folded.reshape(rows, kv_heads, groups * width, head_dim)
    folded = jnp.pad(folded, ((0, 0), (0, 0), (0, queries - groups * width), (0, dim - head_dim)))
    with _exact(q.dtype):
        out = flash_attention(
            folded,
            both(context.key, block.key),
            both(context.value, block.value),
            ab=_bias(seen, kv_heads, groups, queries) if masked else None,
            segment_ids=SegmentIds(jnp.ones((rows, queries), jnp.int32), seen.any(axis=1).astype(jnp.int32)),
            sm_scale=head_dim**-0.5,
            block_sizes=BlockSizes(queries, kv_block, kv_block, 1),
        )
    out = out[:, :, : groups * width, :head_dim].reshape(rows, kv_heads, groups, width, head_dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


def _bias(seen: Array, kv_heads: int, groups: int, queries: int) -> Array:
    """seen bool [R,B,slots] -> f32 [R,K,queries,slots] to be added to the scores; query (g, b) is number g*B + b."""
    rows, width, slots = seen.shape
    every = jnp.broadcast_to(jnp.where(seen, 0.0, HIDDEN)[:, None, None], (rows, kv_heads, groups, width, slots))
    every = every.reshape(rows, kv_heads, groups * width, slots)
    return jnp.pad(every, ((0, 0), (0, 0), (0, queries - groups * width), (0, 0)))
