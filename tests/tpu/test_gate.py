"""Compiled for TPU chips that are not here: what every program must be, and that each demand can fail."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("libtpu", reason="libtpu is not installed: scripts/test-tpu runs these tests with it")

from gate import SECOND, Case, check, compiled, demands_of, lowered, programs_for

import torch_dflash.stacked
import torch_dflash.verify
from bridge.platform import Platform
from torch_dflash import decode, sampling
from torch_dflash.errors import InputError
from torch_dflash.tpu.chips import CHIPS, chip_named
from torch_dflash.tpu.compile import platform_of
from torch_dflash.tpu.hlo import facts_of

QWEN, LLAMA, SMOL = "Qwen3-4B", "Llama-3.1-8B", "default"
CASES = [
    *(Case("v5p", QWEN, kind) for kind in ("prefill", "plain", "dflash", "loop")),
    *(Case("v5p", QWEN, kind, rows=8) for kind in ("plain", "loop")),
    *(Case("v5p", QWEN, kind, tp=4) for kind in ("prefill", "plain", "loop")),
    *(Case("v5p", QWEN, "loop", rows=8, tp=tp, dp=dp) for tp, dp in ((4, 1), (4, 2), (8, 1))),
    *(Case("v5p", QWEN + SECOND, "loop", rows=rows, tp=tp) for rows, tp in ((8, 1), (1, 4))),
    *(Case("v5p", LLAMA, "loop", rows=rows, tp=tp) for rows, tp in ((1, 1), (8, 1), (1, 4))),
    *(Case("v5p", SMOL, "loop", rows=rows, tp=tp) for rows, tp in ((1, 1), (8, 1), (1, 3))),
    Case("v5p", SMOL, "loop", dtype="float32"),
    *(Case(chip, QWEN, kind) for chip in ("v6e", "v5e") for kind in ("prefill", "plain", "loop")),
    *(Case(chip, QWEN, "loop", rows=8, tp=4) for chip in ("v6e", "v5e")),
    *(Case(chip, SMOL, "loop") for chip in ("v6e", "v5e")),
    Case("v6e", LLAMA, "loop"),
    Case("v5e", LLAMA, "loop", tp=4),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_program_is_what_it_must_be(case: Case) -> None:
    check(*compiled(case))


SMALL = Case("v5p", SMOL, "loop")


@pytest.fixture
def platform() -> Platform:
    return platform_of(chip_named("v5p"), 1, 1)


def refused(message: str, case: Case = SMALL, platform: Platform | None = None) -> None:
    facts, demands = compiled(case, platform)
    with pytest.raises(AssertionError, match=message):
        check(facts, demands)


def test_attention_without_kernels_is_found(platform: Platform) -> None:
    refused("0 Mosaic calls, not 7", platform=replace(platform, kernels=False))


def test_a_state_that_is_not_donated_is_found(platform: Platform) -> None:
    pair, proposer = programs_for(SMALL, platform)
    kept = jax.jit(decode.decode, static_argnames=("target", "proposer", "choose", "max_steps"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_dflash.tpu.programs.decode_program", lambda platform: kept)
        facts = facts_of(lowered(SMALL, pair, proposer).compile())
    with pytest.raises(AssertionError, match="only 0 bytes are aliased"):
        check(facts, demands_of(SMALL, pair, proposer))


def test_a_pool_that_is_read_after_it_was_written_over_is_found(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once in every layer: the compiler has to keep what was there before."""
    right = torch_dflash.verify.paged_attention

    def attend(q: Any, k: Any, v: Any, pool: Any, *rest: Any) -> Any:
        out, new = right(q, k, v, pool, *rest)
        late = (out[0, 0, 0, 0] > 1e30).astype(jnp.int32)  # known only when all is written and read
        return out + pool[late, 0, 0, 0], new

    monkeypatch.setattr(torch_dflash.verify, "paged_attention", attend)
    refused("a pool is copied", platform=platform)


def test_a_question_to_the_host_is_found(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    right = decode.accept

    def accept(*given: Any) -> Any:
        jax.debug.callback(lambda ids: None, given[0])
        return right(*given)

    monkeypatch.setattr(decode, "accept", accept)
    refused("the host is asked", platform=platform)


def test_hidden_states_that_are_spread_over_chips_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Platform, "by_rows", lambda self, array: array)
    refused("exchanges between chips", replace(SMALL, tp=3))


def test_gathered_logits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "greedy", lambda logits: jnp.argsort(logits, axis=-1)[..., -1].astype(jnp.int32))
    refused("exchanges between chips", replace(SMALL, tp=3))


def test_too_much_scratch_and_too_little_memory_are_found(platform: Platform) -> None:
    facts, demands = compiled(SMALL, platform)
    check(facts, demands)
    with pytest.raises(AssertionError, match="bytes of scratch"):
        check(replace(facts, temp_bytes=facts.temp_bytes + 10**9), demands)
    with pytest.raises(AssertionError, match="do not fit in HBM"):
        check(facts, replace(demands, chip=replace(demands.chip, hbm_bytes=facts.argument_bytes)))


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_every_topology_has_its_chips(chip: Any) -> None:
    for count, _ in chip.topologies:
        assert platform_of(chip, 1, count).model == count
    with pytest.raises(InputError, match="at most 8 chips"):
        platform_of(chip, 2, 8)


def test_what_does_not_divide_is_refused_before_it_is_compiled() -> None:
    with pytest.raises(InputError, match=r"tp is 4, .* the target's num_key_value_heads 3: use 3 or 1"):
        compiled(replace(SMALL, tp=4))
