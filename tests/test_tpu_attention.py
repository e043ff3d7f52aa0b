"""The kernels for TPU against their jnp twins: the flash kernel in interpret mode; for the ragged one, which only
compiles here, JAX's own reference of it, which takes the kernel's arguments."""

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

from bridge.attention import draft_attention, make_pool, paged_attention, write_pages
from bridge.platform import CPU, TPU, Platform
from bridge.tpu_attention import own_heads, ragged_arguments

ROWS, PAGE_SIZE, PAGES_PER_ROW = 3, 16, 4
NUM_PAGES = 1 + ROWS * PAGES_PER_ROW
TABLES = np.random.default_rng(7).permutation(np.arange(1, NUM_PAGES)).reshape(ROWS, PAGES_PER_ROW).astype(np.int32)
# query heads, key/value heads, head_dim: three heads that must be padded to four, and narrow ones
SHAPES = pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [(6, 3, 64, jnp.float32), (4, 2, 128, jnp.bfloat16)],
    ids=["fp32", "bf16"],
)
TOLERANCE = {jnp.float32: 2e-5, jnp.bfloat16: 2e-2}
ON_TPU = replace(TPU, narrowest=2 * PAGE_SIZE)
ON_CPU = replace(CPU, bits=False)


def random(seed: int, *shape: int, dtype: jnp.dtype) -> jax.Array:
    return jnp.array(np.random.default_rng(seed).normal(size=shape), dtype)


def pool_with(platform: Platform, lengths: np.ndarray, kv_heads: int, head_dim: int, dtype: jnp.dtype) -> jax.Array:
    """The rows' first `lengths` K/V in their pages, 1e4 in all other slots of the model's own heads."""
    slots = PAGES_PER_ROW * PAGE_SIZE
    keys, values = (random(seed, ROWS, slots, kv_heads, head_dim, dtype=dtype) for seed in (2, 3))
    beyond = np.arange(slots)[None, :, None, None] >= lengths[:, None, None, None]
    keys, values = (jnp.where(beyond, 1e4, part).astype(dtype) for part in (keys, values))
    pool = make_pool(1, NUM_PAGES, PAGE_SIZE, kv_heads, head_dim, dtype, platform)
    return write_pages(pool, keys, values, 0, TABLES, jnp.zeros(ROWS, jnp.int32), jnp.full(ROWS, slots))


@pytest.fixture
def interpreted() -> Iterator[None]:
    with pltpu.force_tpu_interpret_mode():
        yield


@pytest.mark.usefixtures("interpreted")
@SHAPES
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 3), (True, 5)])
def test_flash_is_the_jnp_attention(
    heads: int, kv_heads: int, head_dim: int, causal: bool, window: int | None, dtype: jnp.dtype
) -> None:
    lengths = np.array([0, 37, 21], np.int32)
    q, key, value = (random(i, ROWS, 5, n, head_dim, dtype=dtype) for i, n in enumerate((heads, kv_heads, kv_heads)))

    def attend(platform: Platform) -> np.ndarray:
        pool = pool_with(platform, lengths, kv_heads, head_dim, dtype)
        out = draft_attention(q, key, value, pool, 0, TABLES, lengths, causal, window, platform)
        assert out.dtype == dtype
        return np.asarray(out, np.float32)

    np.testing.assert_allclose(attend(ON_TPU), attend(ON_CPU), atol=TOLERANCE[dtype])


@SHAPES
@pytest.mark.parametrize(
    ("start", "num_new", "width"),
    [
        ([3, 20, 0], [6, 6, 6], 6),  # blocks
        ([0, 32, 16], [6, 0, 2], 6),  # a prompt's beginning, a row that is not active, a chunk with padding
        ([62, 60, 5], [2, 4, 1], 6),  # padding lies behind the row's last page
        ([63, 9, 0], [1, 1, 1], 1),  # plain decoding
    ],
)
def test_the_ragged_kernel_is_told_what_the_jnp_attention_sees(
    heads: int, kv_heads: int, head_dim: int, start: list[int], num_new: list[int], width: int, dtype: jnp.dtype
) -> None:
    lengths = (np.array(start, np.int32), np.array(num_new, np.int32))
    q, key, value = (
        random(i, ROWS, width, n, head_dim, dtype=dtype) for i, n in enumerate((heads, kv_heads, kv_heads))
    )
    pool = pool_with(ON_CPU, lengths[0], kv_heads, head_dim, dtype)
    expected, _ = paged_attention(q, key, value, pool, 0, TABLES, *lengths, ON_CPU)

    padded = pool_with(ON_TPU, lengths[0], kv_heads, head_dim, dtype)
    padded = write_pages(padded, key, value, 0, TABLES, *lengths)
    arguments = ragged_arguments(q, padded, 0, TABLES, *lengths, kv_heads)
    kv_lens, tables = arguments[2], arguments[3]
    assert (kv_lens <= tables.shape[1] * PAGE_SIZE).all()  # the kernel reads no page that is not in the table
    out = ref_ragged_paged_attention(*arguments, sm_scale=head_dim**-0.5)
    out = own_heads(out, q.shape, kv_heads, padded.shape[2] // 2)
    for row in range(ROWS):
        real = slice(0, num_new[row])
        np.testing.assert_allclose(
            *(np.asarray(x[row, real], np.float32) for x in (out, expected)), atol=TOLERANCE[dtype]
        )
