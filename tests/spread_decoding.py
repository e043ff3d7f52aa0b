"""Run by test_spread.py with four fake devices: the same requests on meshes of one, two and four devices, for each pair
whose folder is named.

Prints JSON lines: the pair, the mesh, what the requests came to, and on how many devices weights and pages lay; then
the most numbers that a device hands to others while `best` looks through a vocabulary that four share.
"""

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
from helpers import prompt_of
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from bridge.platform import CPU, with_mesh
from torch_dflash import Sampling, load_pair, make_request
from torch_dflash.likeliest import best
from torch_dflash.service import engine_for, make_pace

PAGED = replace(
    CPU, stacked=True, turned=True, lanes=128, fast_tokens=8, narrowest=32
)  # as on TPU, but for the kernels
MESHES = ((1, 1), (1, 2), (2, 1), (2, 2))
FEWER = ((1, 1), (2, 2))  # for pairs behind the first


def most_gathered(vocab_size: int) -> int:
    """Of one array, for seven positions and 16 candidates."""
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    shared = NamedSharding(mesh, PartitionSpec(None, None, "model"))
    scores = jax.ShapeDtypeStruct((1, 7, vocab_size), jnp.bfloat16, sharding=shared)
    program = jax.jit(best, static_argnums=(1, 2)).lower(scores, 16, 4).compile().as_text()
    arrays = re.findall(r"= \w+\[([\d,]+)\]\S* (?:all-gather|all-reduce|all-to-all|collective-permute)", program)
    return max(math.prod(map(int, shape.split(","))) for shape in arrays)


def main(folder: Path, meshes: Sequence[tuple[int, int]], methods: Sequence[str]) -> None:
    for data, model in meshes:
        platform = CPU if data * model == 1 else with_mesh(PAGED, jax.devices(), data, model)
        pair = load_pair(folder / "target", folder / "draft", platform=platform)
        for method in methods if data == model else methods[:1]:
            lengths, drawn = (70, 20, 70, 30, 25), Sampling(temperature=0.7 if method == "dflash" else 0.0, seed=3)
            requests = [
                make_request(pair, prompt_of(length), 16, stop_ids=(), sampling=drawn if i == 3 else Sampling())
                for i, length in enumerate(lengths)
            ]
            engine = engine_for(pair, make_pace(pair, method, None), requests, 4, 4)
            runs = [engine.submit(request) for request in requests]
            while not engine.idle:
                engine.step()
                engine.pages.check_integrity()
            texts = [[run.token_ids, [entry.proposed for entry in run.trace]] for run in runs]
            held = {
                name: len({str(s.index) for s in array.addressable_shards})
                for name, array in pair.params["target"].items()
            }
            pool = len({str(shard.index) for shard in engine.device.state.pool.addressable_shards})
            shown = {
                "pair": folder.name,
                "data": data,
                "model": model,
                "method": method,
                "texts": texts,
                "weights": held,
                "pool": pool,
            }
            print(json.dumps(shown))


main(Path(sys.argv[1]), MESHES, ("dflash", "plain"))
for name in sys.argv[2:]:
    main(Path(name), FEWER, ("dflash",))
print(json.dumps({size: most_gathered(size) for size in (49152, 151936, 128256)}))
