"""The stacked target, padded pools and a one-device mesh change no number that matters: what TPU programs are made of,
run on CPU."""

from dataclasses import replace

import jax
import pytest
import torch
from helpers import golden, golden_pair, prompt_of

from bridge.platform import CPU, Platform, with_mesh
from torch_dflash import Pair, generate, load_pair
from torch_dflash.stacked import stack_layers, stacked_name

PADDED = replace(CPU, lanes=128, fast_tokens=8, narrowest=32)
ALL = replace(PADDED, stacked=True, turned=True)
CASES = {
    "stacked": ("qwen3-gqa", replace(CPU, stacked=True)),
    "padded pools and passes, turned weights": ("llama3-rope", replace(PADDED, turned=True)),
    "all, in a mesh": ("qwen3-untied", with_mesh(ALL, jax.devices("cpu"), 1, 1)),
}


def rounds(pair: Pair, method: str) -> list:
    """Three prompts, one of them longer than a page, in one batch."""
    prompts = [prompt_of(length, pair.target.config.vocab_size) for length in (20, 70, 24)]
    results = generate(pair, prompts, 20, method=method, trace=True, ignore_eos=True)
    return [(result.token_ids, result.trace) for result in results]


@pytest.mark.parametrize(("name", "platform"), CASES.values(), ids=CASES.keys())
def test_tokens_and_proposals_are_those_of_the_plain_target(name: str, platform: Platform) -> None:
    other = load_pair(golden(name) / "target", golden(name) / "draft", platform=platform)
    for method in ("dflash", "plain"):
        assert rounds(other, method) == rounds(golden_pair(name), method)


def test_tensors_are_stacked_by_layer_and_none_is_held_twice() -> None:
    tensors = {f"layers.{i}.mlp.up_proj.weight": torch.full((2, 3), float(i)) for i in range(12)}
    given = {**tensors, "norm.weight": torch.ones(3)}
    stacked = stack_layers(given)
    assert not given
    assert set(stacked) == {"layers.mlp.up_proj.weight", "norm.weight"}
    assert stacked["layers.mlp.up_proj.weight"][:, 1, 2].tolist() == [float(i) for i in range(12)]


def test_names() -> None:
    assert stacked_name("layers.11.self_attn.q_norm.weight") == "layers.self_attn.q_norm.weight"
    assert stacked_name("embed_tokens.weight") == "embed_tokens.weight"
