"""Targets against Hugging Face: random weights, saved by Hugging Face, read by the production loader."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from helpers import prompt_of
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config

from bridge.attention import make_pool
from torch_dflash import Pair, generate, load_pair
from torch_dflash.config_reader import read_target_config
from torch_dflash.verify import run_target

TOLERANCE = 1e-4
VOCAB, PROMPT_LENGTH, NEW = 48, 13, 16
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
DEFAULT = {"rope_type": "default", "rope_theta": 500.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {"rope_parameters": DEFAULT, "tie_word_embeddings": True}),
    "llama: heads alone, llama3": (LlamaConfig, {"rope_parameters": LLAMA3, "num_key_value_heads": 4, "head_dim": 16}),
    "llama: biases, yarn": (LlamaConfig, {"rope_parameters": YARN, "attention_bias": True, "mlp_bias": True}),
    "qwen3": (Qwen3Config, {"rope_parameters": DEFAULT, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen3: heads alone, yarn": (Qwen3Config, {"rope_parameters": YARN, "num_key_value_heads": 4, "head_dim": 8}),
    "qwen3: one K/V head, biases, llama3": (
        Qwen3Config,
        {"rope_parameters": LLAMA3, "num_key_value_heads": 1, "head_dim": 12, "attention_bias": True},
    ),
}


@dataclass(frozen=True)
class Case:
    folder: Path
    model: PreTrainedModel
    prompt_ids: list[int]
    token_ids: list[int]  # what HF writes behind the prompt


def save(folder: Path, kind: type, changes: dict[str, Any]) -> PreTrainedModel:
    """A random model of Hugging Face's, in `folder`; biases and norms are random too, so that none may be skipped."""
    torch.manual_seed(2)
    config = kind(**SMALL | changes, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        scale = 0.3 if parameter.ndim == 2 else 0.2
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.ndim == 2 else 1.0, std=scale)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("hf")
    model, prompt_ids = save(folder, *CASES[request.param]), prompt_of(PROMPT_LENGTH, VOCAB)
    return Case(folder, model, prompt_ids, hf_tokens(model, prompt_ids, eos_token_id=None))


def hf_tokens(model: PreTrainedModel, prompt_ids: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt_ids])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0, **options
    )
    return out[0, len(prompt_ids) :].tolist()


def hf_logits(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float().numpy()


def our_logits(pair: Pair, ids: list[int]) -> np.ndarray:
    """One pass over paged K/V, as in prefill."""
    config = pair.target.config

    def logits(params: Any, ids: Any) -> Any:
        block = config.block
        pool = make_pool(config.num_layers, 3, 16, block.num_kv_heads, block.head_dim, pair.dtype, pair.target.platform)
        tables, zero = np.array([[2, 1]], np.int32), np.zeros(1, np.int32)
        hidden, _, _ = run_target(pair.target, params, ids, (), pool, tables, zero, zero + ids.shape[1])
        return pair.target.logits(params, hidden)

    return np.asarray(jax.jit(logits)(pair.params["target"], np.array([ids], np.int32))[0], np.float32)


def test_logits_and_tokens_equal_hugging_faces(case: Case) -> None:
    pair, ids = load_pair(case.folder, None), [*case.prompt_ids, *case.token_ids]
    np.testing.assert_allclose(our_logits(pair, ids), hf_logits(case.model, ids), rtol=0, atol=TOLERANCE)
    result = generate(pair, case.prompt_ids, NEW, ignore_eos=True)[0]
    assert result.token_ids == case.token_ids
    assert len(set(case.token_ids)) > 3


def test_the_old_form_of_the_config_means_the_same(case: Case, tmp_path: Path) -> None:
    """transformers 4 wrote rope_theta and rope_scaling, with null for no scaling."""
    new = json.loads((case.folder / "config.json").read_text())
    rope = new.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    old = new | {"rope_theta": theta, "rope_scaling": None if rope["rope_type"] == "default" else rope}
    (tmp_path / "config.json").write_text(json.dumps(old))
    for name in ("generation_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(case.folder / name)
    assert read_target_config(tmp_path) == read_target_config(case.folder)


def test_eos_of_the_generation_config_ends_a_text(tmp_path: Path) -> None:
    model, prompt_ids = save(tmp_path, *CASES["qwen3"]), prompt_of(PROMPT_LENGTH, VOCAB)
    free = hf_tokens(model, prompt_ids, eos_token_id=None)
    model.generation_config.eos_token_id = [free[5], free[7]]
    model.save_pretrained(tmp_path)
    ours = generate(load_pair(tmp_path, None), prompt_ids, NEW)[0]
    assert ours.token_ids == hf_tokens(model, prompt_ids)
    assert len(ours.token_ids) < NEW
    assert ours.finish_reason == "stop"


@pytest.mark.parametrize("name", ["llama: biases, yarn", "qwen3"])
def test_bf16_chooses_what_hugging_face_chooses_but_for_ties(name: str, tmp_path: Path) -> None:
    """Teacher-forced on the same tokens: our choice is HF's best, or as good as bf16 can tell."""
    save(tmp_path, *CASES[name])
    pair = load_pair(tmp_path, None, dtype="bfloat16")
    prompt_ids = prompt_of(PROMPT_LENGTH, VOCAB)
    result = generate(pair, prompt_ids, NEW, ignore_eos=True)[0]
    ids = [*prompt_ids, *result.token_ids]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager").eval()
    ours, theirs = our_logits(pair, ids), hf_logits(model, ids)
    chosen = theirs[np.arange(len(ids)), ours.argmax(1)]
    tie = 0.02 * theirs.std()
    assert (chosen >= theirs.max(1) - tie).all()
    emitted = theirs[np.arange(PROMPT_LENGTH - 1, len(ids) - 1), list(result.token_ids)]
    assert (emitted >= theirs[PROMPT_LENGTH - 1 : -1].max(1) - tie).all()
