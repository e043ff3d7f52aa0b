"""What attentions are held against: a dense one, head by head."""

import jax
import jax.numpy as jnp
import numpy as np


def random(seed: int, *shape: int, dtype: jnp.dtype = jnp.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def dense(q: np.ndarray, key: np.ndarray, value: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """q [T,H,d], key and value [N,K,d], visible [T,N], one head after the other, in float64."""
    out = np.zeros(q.shape)
    for head in range(q.shape[1]):
        kv_head = head // (q.shape[1] // key.shape[1])
        scores = q[:, head].astype(np.float64) @ key[:, kv_head].T.astype(np.float64) / np.sqrt(q.shape[2])
        weights = np.where(visible, np.exp(scores), 0)
        out[:, head] = weights / weights.sum(1, keepdims=True) @ value[:, kv_head].astype(np.float64)
    return out


def numpy(array: jax.Array | np.ndarray) -> np.ndarray:
    return np.asarray(array, np.float32)
