"""Index arithmetic against literal tables."""

import jax.numpy as jnp
import numpy as np
import pytest

from bridge.positions import block_positions, chunks, pages_for, power_of_two, round_up, slots

PAGE_SIZE, NUM_SLOTS = 4, 40


def slots_of(table: list[int], positions: list[int], num_new: int) -> list[int]:
    """The slots of one row."""
    arrays = (jnp.array([value], jnp.int32) for value in (table, positions, num_new))
    return slots(*arrays, PAGE_SIZE, NUM_SLOTS)[0].tolist()


def test_block_positions_count_up_from_each_rows_start() -> None:
    out = block_positions(jnp.array([0, 5], jnp.int32), 3)
    assert out.tolist() == [[0, 1, 2], [5, 6, 7]]
    assert out.dtype == jnp.int32


@pytest.mark.parametrize(
    ("positions", "num_new", "expected"),
    [
        ([0, 1, 2], 3, [28, 29, 30]),
        ([3, 4, 5], 3, [31, 12, 13]),  # over a page border
        ([3, 4, 5], 1, [31, NUM_SLOTS, NUM_SLOTS]),  # padding is dropped
        ([0, 1, 2], 0, [NUM_SLOTS] * 3),  # an inactive row writes nothing
        ([6, 7, 8], 3, [14, 15, NUM_SLOTS]),  # past the end: dropped, not moved back
        ([8, 9, 10], 3, [NUM_SLOTS] * 3),
    ],
)
def test_slots(positions: list[int], num_new: int, expected: list[int]) -> None:
    assert slots_of([7, 3], positions, num_new) == expected


def test_slots_of_rows_do_not_mix() -> None:
    tables = jnp.array([[1, 2], [9, 8]], jnp.int32)
    positions = jnp.array([[2, 3, 4], [4, 5, 6]], jnp.int32)
    out = slots(tables, positions, jnp.array([3, 2], jnp.int32), PAGE_SIZE, NUM_SLOTS)
    assert out.tolist() == [[6, 7, 8], [32, 33, NUM_SLOTS]]


def test_slots_are_a_lookup_for_every_position() -> None:
    """No slot is negative (JAX would wrap it) and none falls outside the row's own pages."""
    table = [5, 1, 7, 2]
    for start in range(20):
        for num_new in range(7):
            positions = list(range(start, start + 6))
            real = [i < num_new and p < len(table) * PAGE_SIZE for i, p in enumerate(positions)]
            expected = [
                table[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE if ok else NUM_SLOTS
                for p, ok in zip(positions, real, strict=True)
            ]
            assert slots_of(table, positions, num_new) == expected


@pytest.mark.parametrize(
    ("length", "smallest", "expected"),
    [(0, 1, 1), (1, 1, 1), (2, 1, 2), (3, 1, 4), (5, 1, 8), (8, 1, 8), (9, 1, 16), (3, 16, 16), (17, 16, 32)],
)
def test_power_of_two(length: int, smallest: int, expected: int) -> None:
    assert power_of_two(length, smallest) == expected


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (1, [(0, 1, 16)]),
        (16, [(0, 16, 16)]),
        (17, [(0, 17, 32)]),
        (256, [(0, 256, 256)]),
        (257, [(0, 256, 256), (256, 1, 16)]),
        (300, [(0, 256, 256), (256, 44, 64)]),
        (513, [(0, 256, 256), (256, 256, 256), (512, 1, 16)]),
    ],
)
def test_chunks(length: int, expected: list[tuple[int, int, int]]) -> None:
    assert chunks(length, 256, 16) == expected


def test_chunks_lose_nothing_and_repeat_nothing() -> None:
    for length in range(1, 70):
        covered = [at + i for at, n, _ in chunks(length, 16, 4) for i in range(n)]
        assert covered == list(range(length))
        widths = [(n, width) for _, n, width in chunks(length, 16, 4)]
        assert all(n <= width <= 16 and np.log2(width).is_integer() for n, width in widths)


@pytest.mark.parametrize(("length", "expected"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (129, 3)])
def test_pages_for(length: int, expected: int) -> None:
    assert pages_for(length, 64) == expected


@pytest.mark.parametrize(("number", "multiple", "result"), [(70, 8, 72), (72, 8, 72), (1, 128, 128), (0, 8, 0)])
def test_round_up(number: int, multiple: int, result: int) -> None:
    assert round_up(number, multiple) == result
