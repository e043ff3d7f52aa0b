"""What differs between CPU, GPU and TPU, as a value: chosen once, and handed to whatever depends on it.

Compiling for a TPU on a host that has none is a matter of handing over `TPU`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as Spec

from bridge.positions import doublings, pages_for, power_of_two, round_up

NO_LOOP_MOTION = "while-loop-invariant-code-motion,while-loop-expensive-invariant-code-motion"
TILE = 8  # heads: TPU memory is in tiles of 8 x 128
ROWS, HEADS = Spec("data"), Spec("data", None, "model")  # [R,...]; [R,T,heads,d] or [R,T,width]
POOL = HEADS  # [pages, S, 2*K, d]
EVERYWHERE = Spec()


@dataclass(frozen=True)
class Platform:
    """The choices that depend on the hardware, and the devices over which the work is spread.

    kernels: attention is Pallas kernels for TPU; otherwise jnp.
    stacked: the target's layers are one traced layer under `lax.scan`, their weights stacked.
    turned: weights of products are kept [in, out] instead of torch's [out, in].
    bits: cached bf16 K/V is stored as uint16.
    lanes: cached heads are padded to a multiple of so many numbers, and their number to one that tiles.
    fast_tokens: a pass over fewer tokens is padded to so many.
    narrowest: fewest positions that attention reads of a row; the widths double from there. None: always all; 0: half
        or all.
    compiler_options: XLA's, of programs that draft or loop on the device.
    mesh: axes "data" (rows and their pages) and "model" (heads, MLP width, vocabulary). None: one device.
    """

    kernels: bool = False
    stacked: bool = False
    turned: bool = False
    bits: bool = False
    lanes: int = 1
    fast_tokens: int = 1
    narrowest: int | None = None
    compiler_options: tuple[tuple[str, str], ...] = ()
    mesh: Mesh | None = None

    @property
    def data(self) -> int:
        """Devices over which rows are spread."""
        return 1 if self.mesh is None else self.mesh.shape["data"]

    @property
    def model(self) -> int:
        """Devices over which heads, MLP width and vocabulary are spread."""
        return 1 if self.mesh is None else self.mesh.shape["model"]

    def sharding(self, *axes: str | None) -> Any:
        """Where an array lives whose axes are spread over these mesh axes."""
        if self.mesh is None:
            return SingleDeviceSharding(jax.devices()[0])
        return NamedSharding(self.mesh, Spec(*axes))

    def by_rows(self, array: Array) -> Array:
        """The array [R,...] with whole rows on their devices: XLA may not spread it further."""
        return array if self.mesh is None else lax.with_sharding_constraint(array, self.sharding(*ROWS))

    def spread(self, function: Callable[..., Any], inputs: tuple[Spec, ...], outputs: Any) -> Callable[..., Any]:
        """`function` on every device's own part of the arrays."""
        if self.mesh is None:
            return function
        return jax.shard_map(function, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)

    def storage_dtype(self, dtype: Any) -> Any:
        """How cached keys and values of `dtype` are stored."""
        return jnp.dtype(jnp.uint16) if self.bits and dtype == jnp.bfloat16 else jnp.dtype(dtype)

    def stored_heads(self, num_kv_heads: int) -> int:
        """K/V heads in a pool, a device's own share padded.  Examples on TPU: 3 -> 4; 10 -> 16; 8 over 4 -> 8."""
        if self.lanes == 1:
            return num_kv_heads
        own = num_kv_heads // self.model
        return self.model * (power_of_two(own) if own <= TILE else round_up(own, TILE))

    def stored_dim(self, head_dim: int) -> int:
        """Numbers of a head in a pool.  Example on TPU: 64 -> 128."""
        return round_up(head_dim, self.lanes)

    def page_widths(self, pages_per_row: int, page_size: int) -> list[int]:
        """How many pages of each row attention may read, ascending; the last is all of them. The device takes the
        fewest that hold the longest row; each width costs compile time.

        Examples: CPU, 8 pages -> [4, 8]; TPU, 40 pages of 64 -> [8, 16, 32, 40].
        """
        if self.narrowest is None or pages_per_row == 1:
            return [pages_per_row]
        if self.narrowest == 0:
            return [pages_per_row // 2, pages_per_row]
        return doublings(pages_for(self.narrowest, page_size), pages_per_row)


# XLA on CPU widens a whole bf16 array to f32 in order to write or gather a few rows of it, hence bits; and it would
# hoist a converted copy of the whole embedding out of the loop.
CPU = Platform(bits=True, narrowest=0, compiler_options=(("xla_disable_hlo_passes", NO_LOOP_MOTION),))
GPU = Platform()  # would have to ask the host which of several widths to run
# On a chip's SparseCore a gather makes the decoding loop wait (github.com/jax-ml/jax/issues/40553), and libtpu 0.0.52
# cannot even compile the selector's for 8 rows on v5p.
TPU = Platform(
    kernels=True,
    stacked=True,
    turned=True,
    lanes=128,
    fast_tokens=8,
    narrowest=512,
    compiler_options=(
        ("xla_tpu_offload_gather_to_sparsecore", "false"),
        ("xla_tpu_offload_all_supported_gathers_to_sparsecore", "false"),
    ),
)


def with_mesh(platform: Platform, devices: Sequence[Any], data: int, model: int) -> Platform:
    """The platform over data * model of the devices, those of one model side by side."""
    grid = np.array(devices[: data * model]).reshape(data, model)
    # Auto: torchax's gather does not know explicit axes.
    return replace(platform, mesh=Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto)))


def own_platform() -> Platform:
    """Of JAX's default backend in this process, on one device. On TPU that is a mesh too: what is compiled there is
    what is compiled in the tests."""
    if jax.default_backend() == "tpu":
        return with_mesh(TPU, jax.devices(), 1, 1)
    return CPU if jax.default_backend() == "cpu" else GPU


def to_storage(values: Array, dtype: Any) -> Array:
    """Values in the dtype of the array that stores them."""
    if dtype != jnp.uint16:
        return values.astype(dtype)
    return lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)


def from_storage(stored: Array) -> Array:
    """Stored keys or values as numbers."""
    return lax.bitcast_convert_type(stored, jnp.bfloat16) if stored.dtype == jnp.uint16 else stored


def precision(dtype: Any) -> lax.Precision:
    """Of a product with operands of `dtype`: f32 means f32, where TPUs would multiply in bf16 and GPUs in TF32."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
