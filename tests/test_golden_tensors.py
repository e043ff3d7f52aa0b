"""Tensor by tensor against the original DFlash, so that a failure names the place where the two part."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from helpers import GOLDEN, golden, golden_data, golden_pair
from safetensors.torch import load_file
from torch import Tensor

from torch_dflash import reference
from torch_dflash.config import DrafterConfig, DraftLayer, TargetConfig
from torch_dflash.device import Device
from torch_dflash.engine import Engine
from torch_dflash.models.drafter import Drafter
from torch_dflash.models.target import Target
from torch_dflash.pace import Steady
from torch_dflash.pair import load_drafter, load_target
from torch_dflash.requests import Request
from torch_dflash.sampling import choose_greedily
from torch_dflash.state import Capacity

TOLERANCE = 2e-4
FULL = DraftLayer(causal=False, window=None)
WINDOW = DraftLayer(causal=False, window=16)
CASES: dict[str, tuple[str, str, tuple[DraftLayer, ...] | None]] = {
    "qwen3-gqa": ("qwen3-gqa", "golden", None),
    "qwen3-untied": ("qwen3-untied", "golden", None),
    "llama3-rope": ("llama3-rope", "golden", None),
    "swa, no window": ("qwen3-swa", "golden", (FULL, FULL, FULL)),
    "swa, window": ("qwen3-swa", "golden_fa2window", (WINDOW, WINDOW, FULL)),
    "swa, causal window": ("qwen3-swa", "golden_causalwindow", None),
}


@dataclass(frozen=True)
class Case:
    target_config: TargetConfig
    target: Target
    config: DrafterConfig
    drafter: Drafter
    data: dict[str, Any]
    tensors: dict[str, Tensor]

    def steps(self) -> Iterator[tuple[str, list[int]]]:
        """The key prefix of each recorded step and the tokens up to its anchor."""
        for i, prompt in enumerate(self.data["prompts"]):
            tokens = [*prompt["prompt_ids"], prompt["first_token"]]
            for k, step in enumerate(prompt["steps"]):
                assert len(tokens) == step["start"] + 1
                if f"p{i}.step{k}.draft_logits" in self.tensors:
                    yield f"p{i}.step{k}", list(tokens)
                tokens += [*step["draft_tokens"][: step["accepted"]], step["emitted"]]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    name, variant, layers = CASES[request.param]
    target_config, target = load_target(golden(name) / "target", torch.float32)
    config, drafter = load_drafter(golden(name) / "draft", torch.float32)
    config = config if layers is None else replace(config, layers=layers)
    tensors = load_file(GOLDEN / name / f"{variant}.safetensors")
    return Case(target_config, target, config, drafter, golden_data(name, variant), tensors)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs.reshape(ours.shape), atol=TOLERANCE, rtol=0)


def prefills(case: Case) -> Iterator[tuple[str, list[int]]]:
    for i, prompt in enumerate(case.data["prompts"]):
        if f"p{i}.prefill.logits" in case.tensors:
            yield f"p{i}.prefill", prompt["prompt_ids"]


def test_the_config_means_what_the_original_used(case: Case) -> None:
    assert list(case.config.target_layer_ids) == case.data["target_layer_ids"]
    assert case.config.mask_token_id == case.data["mask_token_id"]
    assert case.config.block_size == case.data["block_size"]
    for role, module in (("target", case.target), ("draft", case.drafter)):
        if f"rope.{role}.inv_freq" in case.tensors:
            ours = module.rotary.inv_freq
            torch.testing.assert_close(ours, case.tensors[f"rope.{role}.inv_freq"], atol=0, rtol=1e-6)


def test_target_layers(case: Case) -> None:
    """Every layer's output; the last one is tapped after the final norm."""
    taps = tuple(range(case.target_config.num_layers))
    for key, prompt_ids in prefills(case):
        logits, features = reference.target_pass(case.target, prompt_ids, taps)
        close(logits, case.tensors[f"{key}.logits"])
        outputs = features.unflatten(-1, (len(taps), -1)).transpose(0, 1)
        close(outputs, case.tensors[f"{key}.hidden_states"][1:])
        embedded = case.target.embed(torch.tensor(prompt_ids, dtype=torch.int32))
        close(embedded, case.tensors[f"{key}.hidden_states"][0])


def test_context(case: Case) -> None:
    for key, prompt_ids in prefills(case):
        _, features = reference.target_pass(case.target, prompt_ids, case.config.target_layer_ids)
        close(features, case.tensors[f"{key}.context_features"])
        close(case.drafter.project(features), case.tensors[f"{key}.context_projected"])


def test_draft_layers_and_logits(case: Case) -> None:
    layers: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda _, __, out: layers.append(out[0])) for layer in case.drafter.layers]
    count = 0
    for key, tokens in case.steps():
        layers.clear()
        _, features = reference.target_pass(case.target, tokens[:-1], case.config.target_layer_ids)
        hidden = reference.draft_hidden(case.target, case.drafter, case.config, features, tokens[-1])
        logits = reference.draft_logits(case.target, case.drafter, case.config, hidden)
        for i, hidden in enumerate(layers):
            close(hidden, case.tensors[f"{key}.draft_layer{i}"])
        close(case.drafter.norm(layers[-1]), case.tensors[f"{key}.draft_hidden"])
        close(logits, case.tensors[f"{key}.draft_logits"])
        newest = case.tensors[f"{key}.target_hidden"][0]
        close(features[-len(newest) :], newest)
        close(case.drafter.project(newest), case.tensors[f"{key}.context_projected"])
        count += 1
    for hook in hooks:
        hook.remove()
    assert count >= 9


def test_verification(case: Case) -> None:
    for key, tokens in case.steps():
        block = case.tensors[f"{key}.verify_ids"][0].tolist()
        assert block[0] == tokens[-1]
        logits, features = reference.target_pass(case.target, tokens[:-1] + block, case.config.target_layer_ids)
        close(logits[-len(block) :], case.tensors[f"{key}.target_logits"])
        close(features[-len(block) :], case.tensors[f"{key}.target_features"])


def test_draft_cache_of_the_running_engine() -> None:
    """After the absorb of steps 0 and 1, slot by slot; rejected and block K/V are not in it."""
    name = "qwen3-gqa"
    tensors, data = load_file(GOLDEN / name / "golden.safetensors"), golden_data(name)
    pair = golden_pair(name)
    proposer = pair.proposer("dflash", None)
    engine = Engine(Device(pair, [proposer], Capacity.whole(1, 1, 64), 1, choose_greedily), Steady(proposer))
    engine.submit(Request(0, tuple(data["prompts"][1]["prompt_ids"]), 48, ()))
    engine.step()  # prefill
    for k in range(2):
        engine.step()
        draft = jax.device_get(engine.device.state.draft)
        start = data["prompts"][1]["steps"][k]["start"]
        assert draft.draft_len.tolist() == [start]
        pages = draft.pool.reshape(-1, 2, *draft.pool.shape[1:])[:, 1]  # of each layer, the page behind NULL
        for part, cached in (("key", pages[:, :, 0::2]), ("value", pages[:, :, 1::2])):
            assert not cached[:, start:].any()
            for layer in range(len(cached)):
                theirs = tensors[f"p1.step{k}.draft_cache.{layer}.{part}"][0].numpy()
                np.testing.assert_allclose(cached[layer, :start].swapaxes(0, 1), theirs, atol=TOLERANCE)
