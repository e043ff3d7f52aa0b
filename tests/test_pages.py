"""The page allocator, and what writes to pages may touch."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge.attention import make_pool, write_pages
from bridge.pages import NULL_PAGE, OutOfPagesError, PageAllocator
from bridge.platform import CPU

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


def test_pages_are_never_lost_and_only_remembered_ones_are_shared() -> None:
    """Rows come and go with prompts of few beginnings; a page that is found holds what was written to it."""
    source = random.Random(0)
    pages = PageAllocator(num_pages=12, page_size=4, rows=4, pages_per_row=5)
    content: dict[int, tuple[int, ...]] = {}  # page -> its tokens
    found = refused = 0
    for _ in range(600):
        row = source.randrange(4)
        pages.release(row)
        prompt = [source.randrange(2) for _ in range(source.randrange(1, 16))]
        try:
            known = pages.reserve(row, len(prompt) + source.randrange(5), prompt)
        except OutOfPagesError:
            refused += 1
            known, prompt = 0, []
        assert known % 4 == 0
        assert known < max(1, len(prompt))
        found += known > 0
        for i, page in enumerate(pages.table([row])[0][: len(prompt) // 4].tolist()):
            tokens = tuple(prompt[4 * i : 4 * i + 4])
            assert i >= known // 4 or content[page] == tokens
            content[page] = tokens
        if source.random() < 0.8:
            pages.remember(row, prompt[: source.randrange(len(prompt) + 1)])
        pages.check_integrity()
        assert pages.num_free == 11 - len({page for owned in pages._owned for page in owned})
    assert found > 30
    assert refused > 10


def test_a_prompt_finds_the_pages_of_its_beginning_but_not_of_all_of_it() -> None:
    pages = PageAllocator(num_pages=9, page_size=2, rows=3, pages_per_row=4)
    assert pages.reserve(0, 7, [1, 2, 3, 4, 5]) == 0
    pages.remember(0, [1, 2, 3, 4, 5])
    assert pages.reserve(1, 6, [1, 2, 3, 4]) == 2  # the last token is to be processed for what follows
    assert pages.reserve(2, 5, [1, 2, 3, 4, 9]) == 4
    first, second = pages.table()[0][:2]
    assert pages.table()[1][0] == first
    assert pages.table()[2][:2].tolist() == [first, second]
    assert pages.table()[1][1] != second


def test_the_same_page_behind_another_beginning_is_another_page() -> None:
    pages = PageAllocator(num_pages=9, page_size=2, rows=2, pages_per_row=4)
    pages.reserve(0, 4, [1, 2, 3, 4])
    pages.remember(0, [1, 2, 3, 4])
    assert pages.reserve(1, 5, [9, 9, 3, 4, 5]) == 0
    assert not set(pages.table()[0][:2]) & set(pages.table()[1][:3])


def test_of_idle_pages_the_end_of_the_longest_unused_prompt_goes_first() -> None:
    pages = PageAllocator(num_pages=5, page_size=2, rows=2, pages_per_row=4)
    for prompt in ([1, 1, 1, 1], [2, 2, 2, 2]):
        pages.reserve(0, 4, prompt)
        pages.remember(0, prompt)
        pages.release(0)
    assert pages.num_free == 4
    pages.reserve(0, 2)  # takes the second page of the first prompt
    assert pages.reserve(1, 6, [1, 1, 1, 1, 5]) == 2
    pages.release(1)
    pages.check_integrity()


def test_the_limit_of_a_row_and_of_free_pages_counts_shared_ones_once() -> None:
    pages = PageAllocator(num_pages=5, page_size=2, rows=2, pages_per_row=4)
    pages.reserve(0, 6, [1, 2, 3, 4, 5])
    pages.remember(0, [1, 2, 3, 4, 5])
    assert pages.num_free == 1
    assert pages.reserve(1, 6, [1, 2, 3, 4, 6]) == 4
    assert pages.num_free == 0
    pages.release(0)
    assert pages.num_free == 1  # the shared two still have a user
    pages.check_integrity()


@pytest.mark.parametrize("damage", ["lost", "shared", "forgotten", "users"])
def test_check_integrity_notices(damage: str) -> None:
    pages = PageAllocator(num_pages=4, page_size=4, rows=2, pages_per_row=4)
    pages.reserve(0, 8, [1] * 8)
    pages.remember(0, [1] * 8)
    pages.check_integrity()
    if damage == "lost":
        pages._free.pop()
    elif damage == "shared":
        pages._free.append(pages._owned[0][0])
    elif damage == "forgotten":
        pages._key_of.popitem()
    else:
        pages._owned[1] = pages._owned[0][:1]
    with pytest.raises(AssertionError):
        pages.check_integrity()


@jax.jit
def written(tables: jax.Array, start: jax.Array, num_new: jax.Array, key: jax.Array) -> jax.Array:
    pool = make_pool(1, 6, PAGE_SIZE, HEADS, HEAD_DIM, jnp.float32, CPU)
    return write_pages(pool, key, -key, 0, tables, start, num_new)


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
