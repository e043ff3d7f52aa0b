"""Small programs compiled for TPU on a host without one. Run in a process of its own, under the lock that lets one
process at a time use the compiler:

    flock /tmp/aot.lock python tests/tpu_programs.py OUT.json [FOLDER]

writes texts and memory analyses; with FOLDER also the texts of tests/hlo, without what says where the code stands.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

QUIET = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_LOG_DIR": "disabled",
}
SIZES = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes", "alias_size_in_bytes")
_NOISE = (
    re.compile(r", metadata=\{[^{}]*\}"),
    re.compile(r', sharding=\{[^{}]*\}, frontend_attributes=\{xla\.sdy\.sharding="[^"]*"\}'),
    re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d+ .*\n)*\n", re.MULTILINE),
)


def compiled_programs() -> dict[str, Any]:
    """Name -> program for one v5e, `shared` for four."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.experimental import pallas, topologies
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

    def devices(topology: str) -> Any:
        return topologies.get_topology_desc(topology_name=topology, platform="tpu").devices

    one = SingleDeviceSharding(devices("v5e:1x1")[0])
    mesh = Mesh(np.array(devices("v5e:2x2")), ("model",), axis_types=(AxisType.Auto,))
    whole, columns, lines = (
        NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), (None, "model"), ("model", None))
    )

    def array(*shape: int, dtype: Any = jnp.bfloat16, where: Any = one) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    def loop(x: Any, layers: Any, steps: Any) -> Any:
        """`steps` times through six layers."""

        def step(carry: Any) -> Any:
            return carry[0] + 1, lax.scan(lambda x, layer: (x @ layer, None), carry[1], layers)[0]

        return lax.while_loop(lambda carry: carry[0] < steps, step, (0, x))

    def write(pool: Any, new: Any, at: Any) -> Any:
        return pool.at[at].set(new)

    def kernel(x: Any) -> Any:
        def body(source: Any, out: Any) -> None:
            out[...] = source[...] * 2

        cost = pallas.CostEstimate(flops=1000, transcendentals=0, bytes_accessed=5000)
        return pallas.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), cost_estimate=cost)(x)

    def show(x: Any) -> Any:
        jax.debug.print("x {}", x[0, 0])
        return x + 1

    pool = array(4096, 8, 128), array(16, 8, 128), array(16, dtype=jnp.int32)
    x, matrix = array(16, 1024), array(1024, 1024)
    shared = array(16, 1024, where=whole), array(1024, 4096, where=columns), array(4096, 1024, where=lines)
    lowered = {
        "loop": jax.jit(loop).lower(x, array(6, 1024, 1024), array(dtype=jnp.int32)),
        "write": jax.jit(write, donate_argnums=0).lower(*pool),
        "copy": jax.jit(write).lower(*pool),
        "kernel": jax.jit(kernel).lower(array(256, 1024)),
        "branch": jax.jit(lambda p, x, v, w: lax.cond(p, lambda: x @ w, lambda: (x @ v) @ w)).lower(
            array(dtype=jnp.bool_), x, matrix, matrix
        ),
        "shared": jax.jit(lambda x, v, w: (x @ v) @ w, out_shardings=whole).lower(*shared),
        "show": jax.jit(show).lower(x),
    }
    return {name: program.compile() for name, program in lowered.items()}


def main(out: Path, folder: Path | None) -> None:
    os.environ.update(QUIET)
    programs = compiled_programs()
    content = {
        name: {"text": program.as_text()} | {size: getattr(program.memory_analysis(), size) for size in SIZES}
        for name, program in programs.items()
    }
    out.write_text(json.dumps(content))
    for name, program in programs.items() if folder is not None else ():
        text = program.as_text()
        for noise in _NOISE:
            text = noise.sub("", text)
        (folder / f"{name}.txt").write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
