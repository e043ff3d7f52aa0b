"""Index arithmetic, pure and small. A position is 0-based in the row's own sequence; a slot is an address in the K/V
pool.

Letters: R rows, T tokens, M pages per row, S page_size.
"""

import jax.numpy as jnp
from jax import Array


def block_positions(start: Array, width: int) -> Array:
    """int32[R] -> int32[R,width]: start, start+1, ...  Example: start [5], width 3 -> [[5, 6, 7]]."""
    return start[:, None] + jnp.arange(width, dtype=jnp.int32)


def slots(tables: Array, positions: Array, num_new: Array, page_size: int, num_slots: int) -> Array:
    """Slots int32[R,T] of `positions` [R,T]; columns from `num_new` [R] on are padding and get `num_slots`.

    A write to `num_slots` is out of range and dropped. It is never -1, which JAX would wrap to the last slot.
    Example: tables [[7, 3]], page_size 4, positions [[3, 4]] -> [[7*4+3, 3*4+0]] = [[31, 12]].
    """
    width = positions.shape[1]
    page = jnp.minimum(positions // page_size, tables.shape[1] - 1)
    slot = jnp.take_along_axis(tables, page, axis=1) * page_size + positions % page_size
    real = (jnp.arange(width) < num_new[:, None]) & (positions < tables.shape[1] * page_size)
    return jnp.where(real, slot, num_slots)


def power_of_two(length: int, smallest: int = 1) -> int:
    """The smallest power of two that is >= length and >= smallest.  Examples: 5 -> 8; 8 -> 8; (3, 16) -> 16."""
    return max(smallest, 1 << max(0, length - 1).bit_length())


def doublings(first: int, last: int) -> list[int]:
    """first, twice that, ... as long as it is below `last`; then `last`.  Examples: (8, 40) -> [8, 16, 32, 40]; (8, 5)
    -> [5]."""
    widths = []
    while first < last:
        widths.append(first)
        first *= 2
    return [*widths, last]


def chunks(length: int, largest: int, smallest: int) -> list[tuple[int, int, int]]:
    """Cut `length` tokens into (start, number of tokens, padded width) with power-of-two widths <= largest.

    Example: (300, 256, 16) -> [(0, 256, 256), (256, 44, 64)].
    """
    starts = range(0, length, largest)
    return [(at, n, power_of_two(n, smallest)) for at in starts for n in [min(largest, length - at)]]


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is >= number.  Example: (70, 8) -> 72."""
    return -(-number // multiple) * multiple


def pages_for(length: int, page_size: int) -> int:
    """Pages that hold `length` positions.  Example: (65, 64) -> 2."""
    return -(-length // page_size)
