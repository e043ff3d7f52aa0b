"""Hugging Face's own DFlash candidate generator as a second oracle, round by round.

Its assistant class has DFlash v1's layers, with two names of its own. Blocks are bidirectional in every layer.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import changed_draft, golden, golden_data, golden_pair
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from torch_dflash import generate, load_pair
from torch_dflash.config import ZLAB
from torch_dflash.config_reader import read_drafter_config

RENAMED = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
CASES = {"qwen3-gqa": "{}", "qwen3-untied": "{}", "llama3-rope": "{}", "qwen3-swa": '{"is_causal": false}'}
SHARED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "rms_norm_eps", "max_position_embeddings", "layer_types"),
)


def assistant(folder: Path) -> MuseGlimmerAssistantModel:
    """Our drafter folder as Hugging Face's model."""
    raw, ours = json.loads((folder / "config.json").read_text()), read_drafter_config(folder)
    shared = {name: raw[name] for name in SHARED}
    # HF's bidirectional window counts its edge in.
    shared["sliding_window"] = raw["sliding_window"] - 1 if raw["use_sliding_window"] else 1
    config = MuseGlimmerAssistantConfig(
        **shared,
        rope_parameters={"rope_type": "default", "rope_theta": raw["rope_theta"], **(raw["rope_scaling"] or {})},
        block_size=ours.block_size,
        mask_token_id=ours.mask_token_id,
        target_layer_ids=list(ours.target_layer_ids),
        attn_implementation="eager",
    )
    model = MuseGlimmerAssistantModel(config).eval()
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({RENAMED.get(name, name): tensor for name, tensor in weights.items()})
    return model


def hf_rounds(
    target: Any, drafter: Any, prompt_ids: list[int], new: int, spy: pytest.MonkeyPatch
) -> tuple[list[int], list[tuple[int, tuple[int, ...]]]]:
    """All tokens, and the anchor's position and the drafts of each round in which HF drafted."""
    rounds: list[tuple[int, tuple[int, ...]]] = []
    candidates = DFlashTokenCandidateGenerator.get_candidates

    def listen(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out = candidates(self, input_ids, *args, **kwargs)
        drafts = out[0][0, input_ids.shape[1] :].tolist()
        if drafts:
            rounds.append((input_ids.shape[1] - 1, drafts))
        return out

    spy.setattr(DFlashTokenCandidateGenerator, "get_candidates", listen)
    ids = torch.tensor([prompt_ids])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "speculation_type": "dflash"}
    out = target.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, assistant_model=drafter, **options
    )
    return out[0].tolist(), rounds


@pytest.mark.parametrize(("name", "changes"), CASES.items())
def test_rounds_equal_hugging_faces(name: str, changes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = AutoModelForCausalLM.from_pretrained(golden(name) / "target", attn_implementation="eager").eval()
    drafter = assistant(golden(name) / "draft")
    prompts, new = [prompt["prompt_ids"] for prompt in golden_data(name)["prompts"]], 48
    results = generate(golden_pair(name, changes), prompts, new, trace=True, ignore_eos=True)
    for prompt_ids, result in zip(prompts, results, strict=True):
        with monkeypatch.context() as spy:
            ids, theirs = hf_rounds(target, drafter, prompt_ids, new, spy)
        assert [*prompt_ids, *result.token_ids] == ids
        ours = [(entry.start, entry.proposed) for entry in result.trace or ()]
        # Equal anchors mean equal accept counts. HF drafts no more when one token is missing.
        assert ours[: len(theirs)] == theirs
        assert len(ours) - len(theirs) <= 1


@pytest.mark.parametrize(("name", "changes"), CASES.items())
def test_what_hugging_face_saves_is_the_same_drafter(name: str, changes: str, tmp_path: Path) -> None:
    """Config and weights as in z-lab's layout, so rounds are those of the test above."""
    assistant(changed_draft(name, json.loads(changes), tmp_path / "draft")).save_pretrained(tmp_path / "saved")
    ours, theirs = golden_pair(name, changes), load_pair(golden(name) / "target", tmp_path / "saved")
    assert ours.drafter is not None and theirs.drafter is not None
    config = theirs.drafter.config
    assert config.layout.name == "Muse assistant"
    assert replace(config, layout=ZLAB, num_target_layers=6, vocab_size=256) == ours.drafter.config
    assert theirs.params["drafter"].keys() == ours.params["drafter"].keys()
    for key, value in ours.params["drafter"].items():
        np.testing.assert_array_equal(theirs.params["drafter"][key], value, err_msg=key)
