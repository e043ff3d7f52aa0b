"""The drafter's cache: context K/V in the slots of their positions, nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge.draft_cache import DraftCache, make_draft_cache, write_context
from bridge.platform import from_storage

LAYERS, ROWS, HEADS, SLOTS, HEAD_DIM, WIDTH = 2, 3, 2, 8, 2, 4


def coded(rows: int) -> jax.Array:
    """Keys [L,r,T,K,d] with the value 1 + 100*layer + 10*row + column."""
    layer, row, column = np.ogrid[:LAYERS, :rows, :WIDTH]
    value = jnp.array(1 + 100 * layer + 10 * row + column, jnp.float32)
    return jnp.broadcast_to(value[..., None, None], (*value.shape, HEADS, HEAD_DIM))


def written(cache: DraftCache, rows: list[int], start: list[int], num_new: list[int]) -> DraftCache:
    arrays = (jnp.array(value, jnp.int32) for value in (rows, start, num_new))
    return write_context(cache, coded(len(rows)), -coded(len(rows)), *arrays)


def table(cache: DraftCache) -> np.ndarray:
    """[L, R, N] of the keys, which must be the same for all heads and the negative of the values."""
    keys, values = (np.asarray(from_storage(part), np.float32) for part in (cache.keys, cache.values))
    assert (values == -keys).all()
    assert (keys == keys[:, :, :1, :, :1]).all()
    return keys[:, :, 0, :, 0].astype(int)


def empty(dtype: jnp.dtype = jnp.float32) -> DraftCache:
    return make_draft_cache(LAYERS, ROWS, HEADS, SLOTS, HEAD_DIM, dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_context_lands_in_the_slots_of_its_positions(dtype: jnp.dtype) -> None:
    out = table(written(empty(dtype), [0, 1, 2], [0, 2, 5], [4, 1, 3]))
    first = [[1, 2, 3, 4, 0, 0, 0, 0], [0, 0, 11, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 21, 22, 23]]
    assert out[0].tolist() == first
    assert out[1].tolist() == [[v + 100 if v else 0 for v in row] for row in first]


def test_rows_are_chosen_by_number() -> None:
    out = table(written(empty(), [2, 0], [1, 0], [2, 1]))
    assert out[0].tolist() == [[11, 0, 0, 0, 0, 0, 0, 0], [0] * 8, [0, 1, 2, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("rows", "start", "num_new"),
    [([0, 1, 2], [0, 3, 7], [0, 0, 0]), ([0], [8], [4]), ([3], [0], [4])],
    ids=["padding", "past the last slot", "no such row"],
)
def test_such_writes_are_dropped(rows: list[int], start: list[int], num_new: list[int]) -> None:
    assert not table(written(empty(), rows, start, num_new)).any()


def test_a_write_over_the_end_is_cut_not_moved_back() -> None:
    cache = written(empty(), [0], [0], [4])
    out = table(written(cache, [0], [6], [4]))
    assert out[0, 0].tolist() == [1, 2, 3, 4, 0, 0, 1, 2]


def test_a_later_write_goes_over_the_slots_it_names_only() -> None:
    cache = written(empty(), [0, 1], [0, 0], [4, 4])
    out = table(written(cache, [0, 1], [2, 4], [1, 2]))
    assert out[0, :2].tolist() == [[1, 2, 1, 4, 0, 0, 0, 0], [11, 12, 13, 14, 11, 12, 0, 0]]
