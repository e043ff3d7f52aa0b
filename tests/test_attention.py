"""Both attentions against a dense one, which has no pages, slots or padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_twins import dense, numpy, random

from bridge.attention import draft_attention, make_pool, paged_attention, write_pages
from bridge.platform import CPU, from_storage, to_storage

ROWS, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, PAGES_PER_ROW = 3, 4, 2, 8, 4, 5
NUM_PAGES = 1 + ROWS * PAGES_PER_ROW
BLOCK = 4
SHUFFLED = np.random.default_rng(7).permutation(np.arange(1, NUM_PAGES)).reshape(ROWS, PAGES_PER_ROW)
DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["fp32", "bf16"])
TOLERANCE = {jnp.float32: 2e-6, jnp.bfloat16: 1e-2}

attend_pages = jax.jit(functools.partial(paged_attention, platform=CPU))
attend_draft = jax.jit(functools.partial(draft_attention, platform=CPU), static_argnames=("causal", "window"))


@jax.jit
def filled_pool(keys: jax.Array, values: jax.Array, lengths: jax.Array, poison: jax.Array) -> jax.Array:
    """The first `lengths` K/V of every row in its pages, `poison` in every other slot."""
    pool = make_pool(1, NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM, keys.dtype, CPU)
    pool = to_storage(jnp.full(pool.shape, poison), pool.dtype)
    return write_pages(pool, keys, values, 0, jnp.array(SHUFFLED), jnp.zeros(ROWS, jnp.int32), lengths)


class Paged:
    """Rows with `start` tokens in shuffled pages and `width` new ones, some of them padding."""

    def __init__(self, start: list[int], num_new: list[int], width: int, dtype: jnp.dtype) -> None:
        self.start, self.num_new, self.dtype = start, num_new, dtype
        self.q = random(1, ROWS, width, HEADS, HEAD_DIM, dtype=dtype)
        length = PAGES_PER_ROW * PAGE_SIZE
        self.keys = random(2, ROWS, length, KV_HEADS, HEAD_DIM, dtype=dtype)
        self.values = random(3, ROWS, length, KV_HEADS, HEAD_DIM, dtype=dtype)
        columns = (np.array(start)[:, None] + np.arange(width)) % length  # wraps for padding only
        self.new = [part[np.arange(ROWS)[:, None], columns] for part in (self.keys, self.values)]

    def pool(self, poison: float = 0.0) -> jax.Array:
        """The committed K/V in its pages, `poison` everywhere else."""
        return filled_pool(self.keys, self.values, np.array(self.start, np.int32), np.float32(poison))

    def attend(self, pool: jax.Array) -> tuple[np.ndarray, jax.Array]:
        lengths = (np.array(value, np.int32) for value in (self.start, self.num_new))
        out, pool = attend_pages(self.q, *self.new, pool, 0, SHUFFLED.astype(np.int32), *lengths)
        assert out.dtype == self.dtype
        return numpy(out), pool

    def expected(self, row: int) -> np.ndarray:
        kv_len = self.start[row] + self.num_new[row]
        position = self.start[row] + np.arange(self.num_new[row])
        visible = np.arange(kv_len) <= position[:, None]
        key, value = (numpy(part)[row, :kv_len] for part in (self.keys, self.values))
        return dense(numpy(self.q)[row, : self.num_new[row]], key, value, visible)


PAGED = pytest.mark.parametrize(
    ("start", "num_new", "width"),
    [
        ([0, 0, 0], [6, 1, 4], 6),  # prefill, with a page border inside the chunk
        ([3, 8, 13], [6, 6, 6], 6),  # blocks of rows of different lengths
        ([14, 3, 0], [6, 0, 2], 6),  # up to the last slot; an inactive row
        ([19, 4, 7], [1, 1, 1], 1),  # plain decoding
        ([2, 0, 1], [6, 3, 2], 6),  # the longest row ends with the narrowest reading of pages, 2 of 5
        ([3, 0, 1], [6, 3, 2], 6),  # one position behind it
        ([14, 2, 0], [0, 6, 2], 6),  # a long row that is inactive
    ],
)


@DTYPES
@PAGED
def test_paged_attention_is_dense_attention(start: list[int], num_new: list[int], width: int, dtype: jnp.dtype) -> None:
    case = Paged(start, num_new, width, dtype)
    out, _ = case.attend(case.pool())
    for row in range(ROWS):
        np.testing.assert_allclose(out[row, : num_new[row]], case.expected(row), atol=TOLERANCE[dtype])


@DTYPES
@PAGED
def test_what_lies_in_other_slots_changes_no_bit(
    start: list[int], num_new: list[int], width: int, dtype: jnp.dtype
) -> None:
    case = Paged(start, num_new, width, dtype)
    clean, _ = case.attend(case.pool())
    poisoned, _ = case.attend(case.pool(poison=1e9))
    for row in range(ROWS):
        assert (clean[row, : num_new[row]] == poisoned[row, : num_new[row]]).all()


@DTYPES
def test_attention_writes_the_new_keys_and_nothing_else(dtype: jnp.dtype) -> None:
    case = Paged([3, 8, 13], [6, 0, 2], 6, dtype)
    _, pool = case.attend(case.pool(poison=5.0))
    ends = [start + new for start, new in zip(case.start, case.num_new, strict=True)]
    expected = filled_pool(case.keys, case.values, np.array(ends, np.int32), np.float32(5.0))
    assert (numpy(pool) == numpy(expected)).all()


def test_storage_keeps_every_bit_of_bf16() -> None:
    values = jnp.array(random(4, 64, dtype=jnp.bfloat16))
    stored = to_storage(values, CPU.storage_dtype(jnp.bfloat16))
    assert stored.dtype == jnp.uint16  # on CPU
    assert (from_storage(stored) == values).all()


class Draft:
    """Rows with `draft_len` context positions in shuffled pages and a block behind them."""

    def __init__(self, draft_len: list[int], dtype: jnp.dtype) -> None:
        self.draft_len, self.dtype = draft_len, dtype
        self.q = random(1, ROWS, BLOCK, HEADS, HEAD_DIM, dtype=dtype)
        self.key = random(2, ROWS, BLOCK, KV_HEADS, HEAD_DIM, dtype=dtype)
        self.value = random(3, ROWS, BLOCK, KV_HEADS, HEAD_DIM, dtype=dtype)
        length = PAGES_PER_ROW * PAGE_SIZE
        self.context_keys = random(4, ROWS, length, KV_HEADS, HEAD_DIM, dtype=dtype)
        self.context_values = random(5, ROWS, length, KV_HEADS, HEAD_DIM, dtype=dtype)

    def attend(self, causal: bool, window: int | None, poison: float = 0.0) -> np.ndarray:
        lengths, tables = np.array(self.draft_len, np.int32), SHUFFLED.astype(np.int32)
        pool = filled_pool(self.context_keys, self.context_values, lengths, np.float32(poison))
        return numpy(attend_draft(self.q, self.key, self.value, pool, 0, tables, lengths, causal=causal, window=window))

    def expected(self, row: int, causal: bool, window: int | None) -> np.ndarray:
        length = self.draft_len[row]
        key = np.concatenate([numpy(self.context_keys)[row, :length], numpy(self.key)[row]])
        value = np.concatenate([numpy(self.context_values)[row, :length], numpy(self.value)[row]])
        visible = np.ones((BLOCK, length + BLOCK), bool)
        for i, k in np.ndindex(*visible.shape):  # one query and key at a time: each has its own position
            distance = length + i - k
            visible[i, k] = not (causal and distance < 0) and (window is None or abs(distance) < window)
        return dense(numpy(self.q)[row], key, value, visible)


RULES = pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 3), (True, 3), (False, 1)])


@DTYPES
@RULES
@pytest.mark.parametrize("draft_len", [[0, 1, 5], [12, 7, 2], [20, 0, 8], [8, 4, 3], [9, 0, 0]])
def test_draft_attention_is_dense_attention(
    draft_len: list[int], causal: bool, window: int | None, dtype: jnp.dtype
) -> None:
    case = Draft(draft_len, dtype)
    out = case.attend(causal, window)
    for row in range(ROWS):
        np.testing.assert_allclose(out[row], case.expected(row, causal, window), atol=TOLERANCE[dtype])


@DTYPES
@RULES
def test_what_lies_behind_the_context_changes_no_bit(causal: bool, window: int | None, dtype: jnp.dtype) -> None:
    attend = functools.partial(Draft([0, 7, 2], dtype).attend, causal, window)
    assert (attend() == attend(poison=1e9)).all()
