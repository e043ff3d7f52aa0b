"""Features on their way to the drafter: each exactly once, in its column."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge.context import append, make_context

ROWS, WIDTH, FEATURES = 3, 5, 2


def coded(first: int) -> jax.Array:
    """Features [R,T,X] with the value 100*row + first + column, so that a wrong row or column shows."""
    value = 100 * np.arange(ROWS)[:, None] + first + np.arange(WIDTH)
    return jnp.broadcast_to(jnp.array(value, jnp.float32)[:, :, None], (ROWS, WIDTH, FEATURES))


def appended(num_pending: list[int], num_new: list[int]) -> np.ndarray:
    """Columns of the buffer after features 10.. came behind what was pending (1..)."""
    buffer = make_context(ROWS, 8, FEATURES, jnp.float32)
    pending, new = (jnp.array(count, jnp.int32) for count in (num_pending, num_new))
    buffer = append(buffer, coded(1), jnp.zeros(ROWS, jnp.int32), pending)
    buffer = append(buffer, coded(10), pending, new)
    assert (buffer.features[..., 0] == buffer.features[..., 1]).all()
    return np.asarray(buffer.features[..., 0]).astype(int)


@pytest.mark.parametrize(("block_size", "width"), [(2, 2), (4, 4), (5, 8), (16, 16)])
def test_a_buffer_holds_what_one_step_can_commit(block_size: int, width: int) -> None:
    assert make_context(3, block_size, 6, jnp.bfloat16).features.shape == (3, width, 6)


def test_append_puts_accepted_features_behind_pending_ones() -> None:
    assert appended([0, 2, 1], [3, 2, 5]).tolist() == [
        [10, 11, 12, 0, 0, 0, 0, 0],
        [101, 102, 110, 111, 0, 0, 0, 0],
        [201, 210, 211, 212, 213, 214, 0, 0],
    ]


def test_rejected_features_are_dropped() -> None:
    assert appended([1, 0, 5], [0, 0, 0]).tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [201, 202, 203, 204, 205, 0, 0, 0],
    ]


def test_what_does_not_fit_is_dropped_not_moved_back() -> None:
    assert appended([5, 0, 0], [5, 1, 0])[0].tolist() == [1, 2, 3, 4, 5, 10, 11, 12]
