"""The drafter's own cache: context keys and values, never those of a noise block.

It is a pool of pages like the target's, addressed by the same block tables: page p of a row holds the context of the
same positions in both. So a row's memory is reserved once, and a page that two prompts share carries both contexts.

Letters: L drafter layers, P pages of one layer, R rows, T tokens, M pages per row, S page_size, K key/value heads, d
head_dim.
"""

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as Spec

from bridge.attention import write_pages
from bridge.platform import POOL, ROWS, Platform

ALL_LAYERS = Spec(None, "data", None, "model")  # [L,R,T,K,d]


def write_context(
    pool: Array, keys: Array, values: Array, tables: Array, start: Array, num_new: Array, platform: Platform
) -> Array:
    """Write context K/V [L,R,T,K,d] of positions start.. [R] into the pages of all layers, in one scatter.

    pool [L*P,S,2*K,d], tables int32[R,M] (of layer 0). Columns from num_new [R] on are padding and dropped, and so is
    what lies behind the last page: nothing is ever moved back.
    """

    def local(pool: Array, keys: Array, values: Array, tables: Array, start: Array, num_new: Array) -> Array:
        layers, rows = keys.shape[:2]
        first_page = jnp.arange(layers, dtype=jnp.int32) * (pool.shape[0] // layers)
        every = (tables + first_page[:, None, None]).reshape(layers * rows, -1)
        keys, values = (part.reshape(layers * rows, *part.shape[2:]) for part in (keys, values))
        return write_pages(pool, keys, values, 0, every, jnp.tile(start, layers), jnp.tile(num_new, layers))

    spread = platform.spread(local, (POOL, ALL_LAYERS, ALL_LAYERS, ROWS, ROWS, ROWS), POOL)
    return spread(pool, keys, values, tables, start, num_new)
