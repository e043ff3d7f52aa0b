"""Context in vLLM's pages: where tokens land, and a block's attention over them against a dense one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_twins import dense, numpy, random

from bridge.vllm_pages import RUN, Span, block_attention, rows_of, write_tokens
from torch_dflash.config import DraftLayer

PAGE_SIZE, BLOCK = 16, 4
SHAPES = {  # head_dim, K/V heads: the trailing axes of a page in bf16 and f32, as tpu-inference makes them
    (8, 2): ((2, 2, 128), (4, 1, 128)),
    (64, 3): ((2, 2, 128), (3, 1, 128)),
    (128, 2): ((2, 2, 128), (4, 1, 128)),
}
LENGTHS = [0, 1, PAGE_SIZE - 1, PAGE_SIZE, RUN, RUN + 5, 2 * RUN + 40]
PAGES_PER_ROW = -(-max(LENGTHS) // PAGE_SIZE) + 1


def tables(rows: int, seed: int = 3) -> np.ndarray:
    """Shuffled pages, no page twice; page 0 belongs to nobody."""
    pages = np.random.default_rng(seed).permutation(np.arange(1, rows * PAGES_PER_ROW + 1))
    return pages.reshape(rows, PAGES_PER_ROW).astype(np.int32)


def pool_shape(head_dim: int, kv_heads: int, dtype: jnp.dtype) -> tuple[int, ...]:
    trailing = SHAPES[head_dim, kv_heads][0 if dtype == jnp.bfloat16 else 1]
    return (1 + len(LENGTHS) * PAGES_PER_ROW, PAGE_SIZE, *trailing)


def test_a_token_belongs_to_the_row_it_lies_in() -> None:
    """An empty row in the middle has none, and borders that repeat behind the last row change nothing."""
    assert rows_of(jnp.array([0, 3, 3, 5, 5, 5]), 7).tolist()[:5] == [0, 0, 0, 2, 2]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("head", SHAPES, ids=str)
def test_tokens_land_as_the_kernels_of_tpu_inference_lay_them(head: tuple[int, int], dtype: jnp.dtype) -> None:
    """Key and value alternate along the heads, or lie side by side at 64. Rows begin and end within pages, one has
    nothing, of one not all is committed, one reaches its table's end; all else stays."""
    head_dim, kv_heads = head
    end = PAGES_PER_ROW * PAGE_SIZE
    begin, scheduled, first, count = [0, 3, 43, 43, 44], [3, 40, 0, 1, 6], [14, 5, 9, end - 1, 0], [3, 37, 0, 1, 0]
    own, tokens = tables(5), begin[-1] + scheduled[-1]
    key, value = (random(seed, 1, tokens, kv_heads, head_dim, dtype=dtype) for seed in (1, 2))
    before = jnp.full(pool_shape(head_dim, kv_heads, dtype), 7, dtype)
    span = Span(*(jnp.array(part) for part in (begin, first, count)))
    (after,) = (numpy(pool) for pool in jax.jit(write_tokens)([before], key, value, jnp.array(own), span))
    untouched = np.ones(after.shape[:2], bool)
    for row in range(5):
        for i in range(count[row]):
            page, slot = own[row, (first[row] + i) // PAGE_SIZE], (first[row] + i) % PAGE_SIZE
            flat, untouched[page, slot] = after[page, slot].reshape(-1, 128), False
            for h in range(kv_heads):
                found = (flat[h, :64], flat[h, 64:]) if head_dim == 64 else (flat[2 * h], flat[2 * h + 1])
                for part, wanted in zip(found, (key, value), strict=True):
                    np.testing.assert_array_equal(part[:head_dim], numpy(wanted[0, begin[row] + i, h]))
    assert untouched.sum() == untouched.size - sum(count)
    assert (after[untouched] == 7).all()


@pytest.mark.parametrize(
    "sees", [DraftLayer(False, None), DraftLayer(True, None), DraftLayer(False, 20), DraftLayer(True, 3)], ids=str
)
@pytest.mark.parametrize("head", SHAPES, ids=str)
def test_a_block_sees_its_context_and_itself(head: tuple[int, int], sees: DraftLayer) -> None:
    """Rows of all lengths at once, an empty one among them; what lies in other slots is poison."""
    (head_dim, kv_heads), rows, length = head, len(LENGTHS), max(LENGTHS)
    keys, values = (random(seed, rows, length, kv_heads, head_dim) for seed in (1, 2))
    q = random(3, rows, BLOCK, 2 * kv_heads, head_dim)
    key, value = (random(seed, rows, BLOCK, kv_heads, head_dim) for seed in (4, 5))
    own, lengths = jnp.array(tables(rows)), jnp.array(LENGTHS)
    span = Span(length * jnp.arange(rows), jnp.zeros(rows, jnp.int32), lengths)
    flat = (part.reshape(1, -1, kv_heads, head_dim) for part in (keys, values))
    (pool,) = jax.jit(write_tokens)([jnp.full(pool_shape(head_dim, kv_heads, jnp.float32), 1e4)], *flat, own, span)
    attend = jax.jit(block_attention, static_argnames=("causal", "window"))
    out = numpy(attend(q, key, value, pool, own, lengths, causal=sees.causal, window=sees.window))
    for r, context in enumerate(LENGTHS):
        query_at, key_at = context + np.arange(BLOCK), np.arange(context + BLOCK)
        distance = query_at[:, None] - key_at
        visible = (distance >= 0) if sees.causal else np.ones(distance.shape, bool)
        if sees.window is not None:
            visible &= np.abs(distance) < sees.window
        both = (np.concatenate([old[r, :context], new[r]]) for old, new in ((keys, key), (values, value)))
        np.testing.assert_allclose(out[r], dense(q[r], *both, visible), atol=2e-5)
