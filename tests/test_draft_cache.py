"""The drafter's cache: context K/V in the pages of their positions, in every layer, nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge.attention import make_pool
from bridge.draft_cache import write_context
from bridge.platform import CPU, from_storage

LAYERS, HEADS, HEAD_DIM, WIDTH, PAGE_SIZE, NUM_PAGES = 2, 2, 2, 4, 4, 7
TABLES = [[3, 6], [5, 1], [2, 4]]  # 8 positions a row


def coded(rows: int) -> jax.Array:
    """Keys [L,r,T,K,d] with the value 1 + 100*layer + 10*row + column."""
    layer, row, column = np.ogrid[:LAYERS, :rows, :WIDTH]
    value = jnp.array(1 + 100 * layer + 10 * row + column, jnp.float32)
    return jnp.broadcast_to(value[..., None, None], (*value.shape, HEADS, HEAD_DIM))


@jax.jit
def write(pool: jax.Array, tables: jax.Array, start: jax.Array, num_new: jax.Array) -> jax.Array:
    return write_context(pool, coded(len(start)), -coded(len(start)), tables, start, num_new, CPU)


def written(pool: jax.Array, rows: list[int], start: list[int], num_new: list[int]) -> jax.Array:
    arrays = (jnp.array(value, jnp.int32) for value in ([TABLES[row] for row in rows], start, num_new))
    return write(pool, *arrays)


def table(pool: jax.Array) -> np.ndarray:
    """[L, row, position] of the keys, which must be the same for all heads and the negative of the values."""
    pages = np.asarray(from_storage(pool), np.float32).reshape(LAYERS, NUM_PAGES, PAGE_SIZE, HEADS, 2, HEAD_DIM)
    assert (pages[:, :, :, :, 1] == -pages[:, :, :, :, 0]).all()
    assert (pages == pages[:, :, :, :1, :, :1]).all()
    assert not pages[:, 0].any()  # the NULL page
    return pages[..., 0, 0, 0][:, np.array(TABLES)].reshape(LAYERS, len(TABLES), -1).astype(int)


def empty(dtype: jnp.dtype = jnp.float32) -> jax.Array:
    return make_pool(LAYERS, NUM_PAGES, PAGE_SIZE, HEADS, HEAD_DIM, dtype, CPU)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_context_lands_in_the_slots_of_its_positions(dtype: jnp.dtype) -> None:
    out = table(written(empty(dtype), [0, 1, 2], [0, 2, 5], [4, 1, 3]))
    first = [[1, 2, 3, 4, 0, 0, 0, 0], [0, 0, 11, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 21, 22, 23]]
    assert out[0].tolist() == first
    assert out[1].tolist() == [[v + 100 if v else 0 for v in row] for row in first]


def test_rows_are_known_by_their_tables() -> None:
    out = table(written(empty(), [2, 0], [1, 0], [2, 1]))
    assert out[0].tolist() == [[11, 0, 0, 0, 0, 0, 0, 0], [0] * 8, [0, 1, 2, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize(("rows", "start", "num_new"), [([0, 1, 2], [0, 3, 7], [0, 0, 0]), ([0], [8], [4])])
def test_padding_and_what_lies_behind_the_last_page_is_dropped(
    rows: list[int], start: list[int], num_new: list[int]
) -> None:
    assert not table(written(empty(), rows, start, num_new)).any()


def test_a_write_over_the_end_is_cut_not_moved_back() -> None:
    pool = written(empty(), [0], [0], [4])
    out = table(written(pool, [0], [6], [4]))
    assert out[0, 0].tolist() == [1, 2, 3, 4, 0, 0, 1, 2]


def test_a_later_write_goes_over_the_slots_it_names_only() -> None:
    pool = written(empty(), [0, 1], [0, 0], [4, 4])
    out = table(written(pool, [0, 1], [2, 4], [1, 2]))
    assert out[0, :2].tolist() == [[1, 2, 1, 4, 0, 0, 0, 0], [11, 12, 13, 14, 11, 12, 0, 0]]
