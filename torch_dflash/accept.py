"""Which drafts the target agrees with. Integers only.

Letters: R rows, K number of drafts.
"""

import jax
import jax.numpy as jnp
from jax import Array


@jax.named_scope("accept")
def accept(draft_ids: Array, target_ids: Array, num_new: Array) -> tuple[Array, Array]:
    """draft_ids int32[R,K], target_ids int32[R,K+1] -> num_accepted, bonus, both int32[R].

    num_accepted is the length of the matching PREFIX; the bonus is the target's own token behind it. What is emitted
    is target_ids[:, :num_accepted + 1], so a draft never reaches the output by itself. That holds for drawn tokens as
    for greedy ones, see sampling.py. Of the block only the first num_new[r] columns were processed (fewer than K + 1
    near the context limit). Example: drafts [[5, 6, 9]], target [[5, 6, 7, 8]], num_new [4] -> 2, bonus 7.
    """
    column = jnp.arange(1, target_ids.shape[1])
    matches = (draft_ids == target_ids[:, :-1]) & (column < num_new[:, None])
    num_accepted = jnp.cumprod(matches.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
    bonus = jnp.take_along_axis(target_ids, num_accepted[:, None], axis=1)[:, 0]
    return num_accepted, bonus
