"""prepare_inputs and propose under what vLLM's scheduler does, without vLLM: every proposal is that of a drafter that
recomputes its whole context."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import Loaded, compilations, load, prompt_of, second, write_drafter, write_target
from vllm_runner import Runner, setup_for

from torch_dflash.errors import InputError
from torch_dflash.vllm.pair import served_config
from torch_dflash.vllm.step import take_context

THREE = {"num_target_layers": 3}
WINDOWED = {
    "use_sliding_window": True,
    "sliding_window": 6,
    "layer_types": ["full_attention", "sliding_attention"],
}


def make(folder: Path, **changes: Any) -> Loaded:
    """A random pair; `changes` go into the drafter's config."""
    write_target(folder / "target", num_hidden_layers=3)  # the last is not tapped
    write_drafter(folder / "draft", **(THREE | changes))
    return load(folder)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return make(tmp_path_factory.mktemp("pair"))


def serve(runner: Runner, steps: list[dict[str, int]]) -> int:
    """Take the steps; every proposal is checked. Returns the number of accepted drafts."""
    accepted = 0
    for scheduled in steps:
        before = {name: len(runner.requests[name].ids) for name in scheduled}
        for name, (drafts, expected) in runner.step(scheduled).items():
            assert drafts == expected, f"{name} in {scheduled}"
            accepted += max(0, len(runner.requests[name].ids) - before[name] - 1)
    return accepted


def scenario(runner: Runner) -> int:
    """Three requests: chunked prompts, rows that come, leave and change places, decoding with and without drafts."""
    runner.add("a", prompt_of(9))
    runner.add("b", prompt_of(20))
    runner.add("c", prompt_of(3))
    accepted = serve(
        runner,
        [
            {"a": 9, "b": 7},  # b's prompt in parts
            {"a": 4, "b": 7, "c": 3},
            {"b": 6, "c": 4, "a": 4},  # reordered; b's prompt ends
            {"b": 4, "c": 4, "a": 4},
            {"c": 4},  # the others wait
            {"a": 2, "c": 4, "b": 1},  # fewer drafts than were proposed, or none
            *[{"a": 4, "b": 4, "c": 4}] * 8,  # across pages
        ],
    )
    assert min(len(runner.requests[name].ids) for name in "abc") > 16  # more than a page
    return accepted


def test_every_proposal_is_that_of_a_full_recompute(loaded: Loaded) -> None:
    """With lengths that include drafts later rejected, parts of prompts, padding, reordered rows, and taps that the
    drafter wants in another order than the target's. Nothing is compiled after the first step of a kind."""
    runner = Runner(loaded, max_rows=4, max_tokens=24, devices=jax.devices()[:1])
    assert loaded.config.target_layer_ids == (1, 0)
    assert scenario(runner) > 0, "no draft was accepted: rejection was all that was tested"
    with compilations() as seen:
        serve(runner, [{"b": 4, "a": 4}, {"c": 1}])
    assert not seen


@pytest.mark.parametrize(
    "changes",
    [
        WINDOWED | {"num_hidden_layers": 2},
        {"is_causal": True},
        {"head_dim": 64},
        {"num_key_value_heads": 4},
        second(),
    ],
    ids=["window and full", "causal", "64 wide", "heads", "DFlash 2"],
)
def test_other_drafters(changes: dict[str, Any], tmp_path: Path) -> None:
    """Windows, causality, explicit head_dim, convolutions and a selector."""
    scenario(Runner(make(tmp_path, **changes), max_rows=3, max_tokens=24, devices=jax.devices()[:1]))


@pytest.mark.skipif(len(jax.devices()) < 2, reason="run by the test below")
@pytest.mark.parametrize("changes", [{}, second()], ids=["DFlash", "DFlash 2"])
def test_spread_over_two_devices(changes: dict[str, Any], tmp_path: Path) -> None:
    """Heads on the model axis."""
    scenario(Runner(make(tmp_path, **changes), max_rows=4, max_tokens=24, devices=jax.devices()[:2]))


def test_two_devices_in_a_process_of_their_own() -> None:
    flags = "--xla_force_host_platform_device_count=2 " + os.environ.get("XLA_FLAGS", "")
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", __file__, "-k", "test_spread_over_two_devices"]
    done = subprocess.run(command, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, text=True)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("fault", ["positions + 1", "context zeroed"])
def test_planted_faults_are_noticed(fault: str, loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any) -> Any:
        context = take_context(*args)
        if fault == "context zeroed":
            return replace(context, hidden=jnp.zeros_like(context.hidden))
        return replace(context, positions=jnp.where(context.positions < 0, -1, context.positions + 1))

    monkeypatch.setattr("torch_dflash.vllm.proposer.take_context", wrong)
    runner = Runner(loaded, max_rows=4, max_tokens=24, devices=jax.devices()[:1])
    with pytest.raises(AssertionError, match=r"in \{"):
        scenario(runner)


REFUSED = {
    "target architecture Qwen3NextForCausalLM has recurrent layers": {
        "is_hybrid": True,
        "architecture": "Qwen3NextForCausalLM",
    },
    "M-RoPE": {"has_mrope": True},
    "cannot hand over its layers' outputs": {"gives_hidden_states": False},
    "pipeline_parallel_size is 2": {"pp": 2},
    "data_parallel_size is 4": {"dp": 4},
    "dtype is float16": {"dtype": "float16"},
    "kv_cache_dtype is fp8": {"cache_dtype": "fp8"},
    "num_speculative_tokens is 4: use an integer in 1..3": {"num_speculative_tokens": 4},
    "tp is 3, which does not divide": {"tp": 3},
    "2 K/V heads of 8 and the target 1 K/V heads of 8: they do not fit": {"kv_heads": 1},
    "2 K/V heads of 8 and the target 2 K/V heads of 64: they do not fit": {"head_dim": 64},
    'draft "/nowhere"': {"draft": "/nowhere"},
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_does_not_fit_is_refused_before_weights_move(line: str, loaded: Loaded) -> None:
    with pytest.raises(InputError, match=line):
        served_config(setup_for(loaded, **REFUSED[line]))


def test_a_drafter_for_another_target_is_refused(loaded: Loaded) -> None:
    setup = setup_for(loaded)
    with pytest.raises(InputError, match="made for another target"):
        served_config(replace(setup, shape=replace(setup.shape, num_layers=4)))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"dflash_config": {"target_layer_ids": [1, 0]}}, "mask_token_id"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_drafters_that_lack_or_have_too_much(changes: dict[str, Any], line: str, tmp_path: Path) -> None:
    loaded = make(tmp_path / "right")
    write_drafter(tmp_path / "wrong", **THREE)
    config = tmp_path / "wrong" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(InputError, match=line):
        served_config(setup_for(loaded, draft=str(tmp_path / "wrong")))
