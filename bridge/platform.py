"""What differs between CPU, GPU and TPU, decided here and nowhere else."""

import jax
import jax.numpy as jnp
from jax import Array, lax


def compiler_options() -> dict[str, str]:
    """Options for programs that loop on the device.

    XLA on CPU would hoist a converted copy of the whole embedding out of the loop; on other platforms nothing is
    changed.
    """
    if jax.default_backend() != "cpu":
        return {}
    passes = "while-loop-invariant-code-motion,while-loop-expensive-invariant-code-motion"
    return {"xla_disable_hlo_passes": passes}


def storage_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """How cached keys and values of `dtype` are stored. XLA on CPU widens a whole bf16 array to f32 in order to write
    or gather a few rows of it, so there bf16 is stored as its bits."""
    bits = jax.default_backend() == "cpu" and dtype == jnp.bfloat16
    return jnp.dtype(jnp.uint16) if bits else jnp.dtype(dtype)


def to_storage(values: Array, dtype: jnp.dtype) -> Array:
    """Values in the dtype of the array that stores them."""
    if dtype != jnp.uint16:
        return values.astype(dtype)
    return lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)


def from_storage(stored: Array) -> Array:
    """Stored keys or values as numbers."""
    return lax.bitcast_convert_type(stored, jnp.bfloat16) if stored.dtype == jnp.uint16 else stored


def precision(dtype: jnp.dtype) -> lax.Precision:
    """Of a product with operands of `dtype`: f32 means f32, where TPUs would multiply in bf16 and GPUs in TF32."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def page_widths(pages_per_row: int) -> list[int]:
    """How many pages of each row attention may read, ascending; the last is all of them.

    On CPU the device takes the narrowest that holds the longest row; each width costs compile time, so there are
    two. A GPU would have to ask the host which to run.  Examples on CPU: 8 pages -> [4, 8]; 1 page -> [1].
    """
    if jax.default_backend() != "cpu" or pages_per_row == 1:
        return [pages_per_row]
    return [pages_per_row // 2, pages_per_row]
