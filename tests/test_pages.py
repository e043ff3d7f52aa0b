"""The page allocator, and what writes to pages may touch."""

import contextlib
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge.attention import make_pool, write_pages
from bridge.pages import NULL_PAGE, OutOfPagesError, PageAllocator

PAGE_SIZE, HEADS, HEAD_DIM = 4, 2, 3


def test_reserve_gives_the_pages_a_length_needs() -> None:
    pages = PageAllocator(num_pages=9, page_size=4, rows=2, pages_per_row=4)
    pages.reserve(0, 5)
    pages.reserve(1, 4)
    pages.reserve(0, 9)
    assert pages.table().tolist() == [[1, 2, 4, 0], [3, 0, 0, 0]]
    assert pages.table().dtype == np.int32
    assert pages.num_free == 4


def test_reserving_what_is_there_changes_nothing() -> None:
    pages = PageAllocator(num_pages=9, page_size=4, rows=2, pages_per_row=4)
    pages.reserve(0, 8)
    before = pages.table()
    pages.reserve(0, 3)
    assert (pages.table() == before).all()


@pytest.mark.parametrize("length", [17, 9])  # more than a row may hold; more than is free
def test_reserve_is_all_or_nothing(length: int) -> None:
    pages = PageAllocator(num_pages=4, page_size=4, rows=2, pages_per_row=4)
    pages.reserve(0, 4)
    pages.reserve(1, 1)
    before = pages.table()
    with pytest.raises(OutOfPagesError):
        pages.reserve(0, length)
    assert (pages.table() == before).all()
    assert pages.num_free == 1
    pages.check_integrity()


def test_released_pages_serve_another_row() -> None:
    pages = PageAllocator(num_pages=3, page_size=4, rows=2, pages_per_row=2)
    pages.reserve(0, 8)
    pages.release(0)
    pages.reserve(1, 8)
    assert pages.table()[0].tolist() == [NULL_PAGE, NULL_PAGE]
    assert sorted(pages.table()[1]) == [1, 2]


def test_pages_are_never_lost_or_shared() -> None:
    source = random.Random(0)
    pages = PageAllocator(num_pages=12, page_size=4, rows=4, pages_per_row=5)
    for _ in range(300):
        row = source.randrange(4)
        if source.random() < 0.3:
            pages.release(row)
        else:
            with contextlib.suppress(OutOfPagesError):
                pages.reserve(row, source.randrange(1, 24))
        pages.check_integrity()
        used = pages.table()[pages.table() != NULL_PAGE]
        assert len(used) == len(set(used.tolist())) == 11 - pages.num_free


@pytest.mark.parametrize("damage", ["lost", "shared"])
def test_check_integrity_notices(damage: str) -> None:
    pages = PageAllocator(num_pages=4, page_size=4, rows=2, pages_per_row=4)
    pages.reserve(0, 8)
    if damage == "lost":
        pages._owned[0].pop()
    else:
        pages._owned[1] = pages._owned[0][:1]
    with pytest.raises(AssertionError, match="lost or shared"):
        pages.check_integrity()


@jax.jit
def written(tables: jax.Array, start: jax.Array, num_new: jax.Array, key: jax.Array) -> jax.Array:
    pool = make_pool(1, 6, PAGE_SIZE, HEADS, HEAD_DIM, jnp.float32)
    return write_pages(pool, key, -key, tables, start, num_new)


def coded(rows: int, width: int) -> jax.Array:
    """Keys whose value is 1 + 10*row + column."""
    value = 1 + 10 * np.arange(rows)[:, None] + np.arange(width)
    return jnp.broadcast_to(jnp.array(value, jnp.float32)[:, :, None, None], (rows, width, HEADS, HEAD_DIM))


@pytest.mark.parametrize(
    ("start", "num_new", "expected"),
    [
        ([2, 0], [3, 2], {(4, 2): 1, (4, 3): 2, (2, 0): 3, (5, 0): 11, (5, 1): 12}),
        ([2, 0], [1, 0], {(4, 2): 1}),  # padding and an inactive row write nowhere
        ([6, 3], [3, 3], {(2, 2): 1, (2, 3): 2, (5, 3): 11, (1, 0): 12, (1, 1): 13}),  # past the end: dropped
        ([0, 0], [0, 0], {}),
    ],
)
def test_writes_land_in_their_slots_and_nowhere_else(
    start: list[int], num_new: list[int], expected: dict[tuple[int, int], int]
) -> None:
    tables = jnp.array([[4, 2], [5, 1]], jnp.int32)
    pool = written(tables, jnp.array(start, jnp.int32), jnp.array(num_new, jnp.int32), coded(2, 3))
    want = np.zeros((6, PAGE_SIZE))
    for address, value in expected.items():
        want[address] = value
    for head in range(HEADS):
        assert (np.asarray(pool)[:, :, 2 * head, 0] == want).all()
        assert (np.asarray(pool)[:, :, 2 * head + 1, 0] == -want).all()


def test_null_page_stays_untouched_by_rows_without_pages() -> None:
    tables = jnp.zeros((2, 2), jnp.int32)
    pool = written(tables, jnp.array([0, 5], jnp.int32), jnp.array([0, 0], jnp.int32), coded(2, 3))
    assert not np.asarray(pool).any()


def test_a_single_token_is_written_like_any_other() -> None:
    """XLA on CPU gets a second, dropped write beside it."""
    tables = jnp.array([[3, 1]], jnp.int32)
    one = written(tables, jnp.array([5], jnp.int32), jnp.array([1], jnp.int32), coded(1, 1))
    assert np.argwhere(np.asarray(one)[:, :, 0, 0]).tolist() == [[1, 1]]
    none = written(tables, jnp.array([5], jnp.int32), jnp.array([0], jnp.int32), coded(1, 1))
    assert not np.asarray(none).any()
