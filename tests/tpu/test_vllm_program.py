"""The vLLM plugin's proposal, compiled for TPU chips that are not here."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("libtpu", reason="libtpu is not installed: scripts/test-tpu runs these tests with it")

from gate import SECOND, configs

from bridge.positions import round_up
from torch_dflash.tpu.chips import chip_named
from torch_dflash.tpu.compile import platform_of
from torch_dflash.tpu.hlo import Facts, facts_of
from torch_dflash.tpu.programs import shapes_only
from torch_dflash.vllm.step import Context, Served, propose, propose_program

ROWS, TOKENS, PAGES, PAGES_PER_ROW, PAGE_SIZE = 8, 64, 20_000, 128, 16
MOST_TEMP = 256e6


def proposal(pair: str, tp: int, donated: bool = True) -> tuple[Facts, int]:
    """Facts of the program, and bytes on one chip of one layer's pool."""
    platform = platform_of(chip_named("v5p"), 1, tp)
    shapes = shapes_only(*configs(pair), "bfloat16", platform)
    assert shapes.method == "dflash" and shapes.drafter is not None
    block = shapes.drafter.config.block
    served = Served(shapes.drafter, shapes.target, shapes.drafter.config.block_size - 1, platform)

    def array(shape: tuple[int, ...], dtype: Any = jnp.int32, *axes: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=platform.sharding(*axes))

    own = block.num_kv_heads // tp * (1 if block.head_dim == 64 else 2)
    words = tp * (round_up(own, 2) // 2)
    pool = array((PAGES, PAGE_SIZE, words, 2, 128), jnp.bfloat16, None, None, "model")
    context = Context(
        array((TOKENS, block.hidden_size), jnp.bfloat16, None, "model"),
        array((ROWS + 1,)),
        array((TOKENS,)),
        array((ROWS,)),
    )
    program = propose_program(served) if donated else jax.jit(partial(propose, served))
    pools = [pool for _ in shapes.drafter.config.layers]
    given = (shapes.params["drafter"], shapes.params["target"], pools)
    names = ("params", "target_params", "pools", "tables", "context", "anchor")
    rest = array((ROWS, PAGES_PER_ROW)), context, array((ROWS,))
    compiled = program.lower(**dict(zip(names, (*given, *rest), strict=True))).compile()
    size = PAGES * PAGE_SIZE * words * 2 * 128 * 2 // tp
    return facts_of(compiled, large=size), size * len(pools)


def check(facts: Facts, pools: int) -> None:
    """Pages are written in place, and nothing goes to the host."""
    assert facts.alias_bytes >= pools, f"only {facts.alias_bytes} bytes are aliased, the pools are {pools}"
    assert not facts.large_copies, f"a pool is copied: {facts.large_copies}"
    assert facts.temp_bytes <= MOST_TEMP, f"{facts.temp_bytes} bytes of scratch"
    assert not facts.host_transfers, f"the host is asked: {facts.host_transfers}"


@pytest.mark.parametrize(("pair", "tp"), [("Qwen3-4B", 1), ("Qwen3-4B", 4), ("Qwen3-4B" + SECOND, 1), ("default", 1)])
def test_pages_are_written_in_place(pair: str, tp: int) -> None:
    check(*proposal(pair, tp))


def test_pools_that_are_not_donated_are_found() -> None:
    with pytest.raises(AssertionError, match="are aliased"):
        check(*proposal("default", 1, donated=False))
