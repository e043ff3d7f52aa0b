"""From logits to token ids."""

import jax.numpy as jnp
from jax import Array


def greedy(logits: Array) -> Array:
    """[..., V] -> int32[...]: the largest logit, the smallest id among equals. Drafter and target use this one
    function."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
