"""The drafter's own static cache: context keys and values, never those of a noise block.

Letters: L drafter layers, R rows, K key/value heads, N slots (slot n of a row is position n), T tokens, d head_dim.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from bridge.platform import storage_dtype, to_storage
from bridge.positions import block_positions


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftCache:
    """Row r is filled at slots 0..draft_len[r]-1; what lies behind is never visible."""

    keys: Array  # [L, R, K, N, d]
    values: Array  # [L, R, K, N, d]


def make_draft_cache(
    num_layers: int, rows: int, num_kv_heads: int, num_slots: int, head_dim: int, dtype: jnp.dtype
) -> DraftCache:
    """An empty cache."""
    shape = (num_layers, rows, num_kv_heads, num_slots, head_dim)
    return DraftCache(jnp.zeros(shape, storage_dtype(dtype)), jnp.zeros(shape, storage_dtype(dtype)))


def write_context(
    cache: DraftCache, keys: Array, values: Array, rows: Array, start: Array, num_new: Array
) -> DraftCache:
    """Write context K/V [L,r,T,K,d] of positions start.. into the cache rows `rows` int32[r]; padding is dropped.

    Columns from num_new[i] on are padding. A write past the last slot is dropped too, never moved back.
    """
    width, num_slots = keys.shape[2], cache.keys.shape[3]
    at = block_positions(start, width)
    at = jnp.where(jnp.arange(width) < num_new[:, None], at, num_slots)

    def put(into: Array, new: Array) -> Array:
        # The indexed axes (row, slot) come first: [r, T, L, K, d].
        ordered = to_storage(new.transpose(1, 2, 0, 3, 4), into.dtype)
        return into.at[:, rows[:, None], :, at].set(ordered, mode="drop")

    return DraftCache(put(cache.keys, keys), put(cache.values, values))
