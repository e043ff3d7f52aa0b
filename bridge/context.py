"""Features on their way from the target to the drafter.

Letters: R rows, W width of the buffer (a power of two >= block_size), X feature width (tapped layers times hidden
size).
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array

from bridge.positions import power_of_two


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ContextBuffer:
    """Features that the target has committed and the drafter has not absorbed: positions draft_len..committed_len-1.

    Column j of a row is position draft_len + j. The lengths are the decode state's; the buffer holds rows only, so
    the two cannot disagree. Columns from committed_len - draft_len on are padding.
    """

    features: Array  # [R, W, X]


def make_context(rows: int, block_size: int, feature_size: int, dtype: jnp.dtype) -> ContextBuffer:
    """An empty buffer, wide enough for what one verify step can commit."""
    return ContextBuffer(jnp.zeros((rows, power_of_two(block_size), feature_size), dtype))


def append(buffer: ContextBuffer, features: Array, num_pending: Array, num_new: Array) -> ContextBuffer:
    """Add the first num_new[r] columns of features [R,T,X] behind the num_pending[r] that row r holds already.

    num_pending + num_new must fit in W. Other columns of `features` (rejected positions) are dropped.
    """
    rows, width = features.shape[:2]
    column = jnp.arange(width, dtype=jnp.int32)
    target = jnp.where(column < num_new[:, None], num_pending[:, None] + column, buffer.features.shape[1])
    row = jnp.arange(rows)[:, None]
    new = buffer.features.at[row, target].set(features.astype(buffer.features.dtype), mode="drop")
    return replace(buffer, features=new)
