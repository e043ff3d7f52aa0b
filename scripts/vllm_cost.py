"""What a proposal of the vLLM plugin costs against the length of the context, beside one that keeps nothing.

Usage: .venv/bin/python scripts/vllm_cost.py [--contexts 128 ...] [--dtype bfloat16], on an idle machine.

Definition. One row whose context has that many positions; a step has committed 4 more (the anchor and three drafts).
"ours" is `torch_dflash.vllm.step.propose`, the function that serves: it takes up 4 positions and drafts a block over
pages. "stateless" projects the features of the whole context again and drafts over that, as upstream's torchax proposer
does. The target's embedding and head are in both. FLOPs: XLA's count; ours has a loop over runs of 256 positions, which
XLA counts once, so the products of the other runs are added (4 * B * H * d per position and layer). Seconds: median of
--repeats, in turns. The last line is one JSON document.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bridge.jnp_attention import Keys, attend_to
from bridge.positions import pages_for
from bridge.vllm_pages import NARROW_HEAD, RUN
from torch_dflash.block import LIKELIEST, draft_block
from torch_dflash.pair import DTYPES, Pair, load_pair
from torch_dflash.vllm.step import Context, Served, propose

PAGE_SIZE, NEW = 16, 4


def served_by(pair: Pair) -> Served:
    """The pair's drafter as the plugin has it."""
    assert pair.method == "dflash" and pair.drafter is not None
    return Served(pair.drafter, pair.target, pair.drafter.config.block_size - 1, pair.target.platform)


def pools_of(served: Served, length: int, dtype: Any) -> list[Array]:
    """One row's pages, as tpu-inference shapes them in 16 bits."""
    block = served.drafter.config.block
    heads = block.num_kv_heads if block.head_dim == NARROW_HEAD else 2 * block.num_kv_heads
    packing = 4 // jnp.dtype(dtype).itemsize
    shape = (1 + pages_for(length, PAGE_SIZE), PAGE_SIZE, -(-heads // packing), packing, 128)
    return [jnp.zeros(shape, dtype) for _ in served.drafter.config.layers]


def ours(pair: Pair, context: int, dtype: Any) -> tuple[Any, Callable[[Any], Any], Any]:
    """The compiled program, how to call it again with the pools of the call before, and the first ones."""
    served = served_by(pair)
    room = context + served.drafter.config.block_size
    tables = 1 + jnp.arange(pages_for(room, PAGE_SIZE), dtype=jnp.int32)[None]
    hidden = jnp.ones((NEW, served.drafter.config.block.hidden_size), dtype)
    new = Context(hidden, jnp.array([0, NEW]), context - NEW + jnp.arange(NEW, dtype=jnp.int32), jnp.array([context]))
    program = jax.jit(partial(propose, served), donate_argnums=2)
    rest = (tables, new, jnp.array([5], jnp.int32))
    given = (pair.params["drafter"], pair.params["target"])
    pools = pools_of(served, room, dtype)
    compiled = program.lower(*given, pools, *rest).compile()
    return compiled, lambda pools: compiled(*given, pools, *rest), pools


def stateless(pair: Pair, context: int, dtype: Any) -> tuple[Any, Callable[[Any], Any], Any]:
    """The same, for a proposer that has only the features of the whole context."""
    served = served_by(pair)
    config = served.drafter.config

    def step(params: Any, target: Any, features: Array, anchor: Array) -> Array:
        at = jnp.arange(context, dtype=jnp.int32)[None]
        keys, values = served.drafter.absorb(params, features, at)
        start = jnp.array([context], jnp.int32)

        def attend(layer: int, q: Array, key: Array, value: Array, _: Any) -> tuple[Array, Any]:
            visible = jnp.ones((1, config.block_size, 1, context), bool)
            of_context = Keys(keys[layer].swapaxes(1, 2)[:, None], values[layer].swapaxes(1, 2)[:, None], visible)
            own = jnp.ones((1, config.block_size, 1, config.block_size), bool)
            of_block = Keys(key.swapaxes(1, 2)[:, None], value.swapaxes(1, 2)[:, None], own)
            return attend_to(q, of_context, of_block), None

        return draft_block(
            served.drafter, params, served.target, target, anchor, start, served.num_drafts, attend, LIKELIEST
        )

    features = jnp.ones((1, context, len(config.target_layer_ids) * config.block.hidden_size), dtype)
    given = (pair.params["drafter"], pair.params["target"], features, jnp.array([5], jnp.int32))
    compiled = jax.jit(step).lower(*given).compile()
    return compiled, lambda _: (None, compiled(*given)), None


def flops(compiled: Any, pair: Pair, context: int, runs: bool) -> float:
    """Of one proposal. runs: the program has a loop over runs of positions, counted once."""
    counted = compiled.cost_analysis()["flops"]
    if not runs:
        return counted
    config, others = served_by(pair).drafter.config, (pages_for(context, RUN) - 1) * RUN
    of_a_layer = 4 * config.block_size * config.block.num_heads * config.block.head_dim
    return counted + others * of_a_layer * len(config.layers)


def main() -> None:
    """Prints one line per context."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--target", default="default")
    parser.add_argument("--draft", default="default")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    pair = load_pair(arguments.target, arguments.draft, arguments.dtype)
    table = []
    for context in arguments.contexts:
        made = {"ours": ours(pair, context, pair.dtype), "stateless": stateless(pair, context, pair.dtype)}
        count = {name: flops(program, pair, context, name == "ours") for name, (program, *_) in made.items()}
        seconds: dict[str, list[float]] = {name: [] for name in made}
        state = {name: pools for name, (_, _, pools) in made.items()}
        for _ in range(arguments.repeats + 1):  # the first is not counted
            for name, (_, call, _) in made.items():
                begin = time.perf_counter()
                state[name], ids = call(state[name])
                np.asarray(ids)
                seconds[name].append(time.perf_counter() - begin)
        median = {name: statistics.median(times[1:]) for name, times in seconds.items()}
        table.append({"context": context, "flops": count, "seconds": median, "all_seconds": seconds})
        each = [f"{name} {count[name] / 1e6:.0f} MFLOP {median[name] * 1e3:.1f} ms" for name in made]
        ratios = count["stateless"] / count["ours"], median["stateless"] / median["ours"]
        print(
            f"context {context}: {', '.join(each)}; ratio {ratios[0]:.2f} in FLOPs, {ratios[1]:.2f} in time", flush=True
        )
    print(json.dumps({"arguments": vars(arguments), "table": table}))


if __name__ == "__main__":
    main()
