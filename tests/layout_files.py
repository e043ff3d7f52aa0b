"""The same random drafter in every layout that the loader takes. Its target: three layers, 12 ids, hidden size 32."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from helpers import DRAFTER, write_drafter, write_target
from safetensors.torch import load_file, save_file

TAPS = [1, 0]
MUSE_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
LAYER_FIELDS = (
    *("model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("num_hidden_layers", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta"),
)
Tensors = dict[str, torch.Tensor]


def write_pair(folder: Path, **changes: Any) -> Path:
    """folder/target and folder/draft, the latter in z-lab's layout; `changes` go into the drafter's config."""
    write_target(folder / "target", num_hidden_layers=3)
    dflash = {"mask_token_id": 11, "target_layer_ids": TAPS}
    write_drafter(folder / "draft", **({"num_target_layers": 3, "dflash_config": dflash} | changes))
    return folder


def tensors_of(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def muse_config(**changes: Any) -> dict[str, Any]:
    own = {name: DRAFTER[name] for name in LAYER_FIELDS if name not in ("model_type", "vocab_size", "rope_theta")}
    return {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        **own,
        "block_size": 4,
        "mask_token_id": 11,
        "target_layer_ids": TAPS,
        "layer_types": ["full_attention"] * 2,
        "sliding_window": 2048,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "hidden_act": "silu",
        **changes,
    }


def write_muse(pair: Path, folder: Path, **changes: Any) -> Path:
    tensors = tensors_of(pair / "draft")
    return write(folder, muse_config(**changes), {MUSE_NAMES.get(name, name): t for name, t in tensors.items()})


def write_model_optimizer(pair: Path, folder: Path, **changes: Any) -> Path:
    """As its exporter writes it; `changes` go into dflash_config."""
    config = {
        **DRAFTER,
        "dflash_config": {"mask_token_id": 11, "target_layer_ids": TAPS} | changes,
        "num_target_layers": 3,
        "rope_scaling": None,
        "layer_types": ["full_attention"] * 2,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
    }
    return write(folder, config, tensors_of(pair / "draft"))


def speculators_config(draft_vocab_size: int = 12, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.6.0",
        "transformer_layer_config": {
            **{name: DRAFTER[name] for name in LAYER_FIELDS},
            "layer_types": ["full_attention"] * 2,
            "use_sliding_window": False,
            "sliding_window": None,
        },
        "aux_hidden_state_layer_ids": [i + 1 for i in TAPS],
        "block_size": 4,
        "draft_vocab_size": draft_vocab_size,
        "mask_token_id": 11,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        **changes,
    }


def write_speculators(
    pair: Path,
    folder: Path,
    *,
    rows: Sequence[int] | None = None,
    head: torch.Tensor | None = None,
    embedding: torch.Tensor | None = None,
    **changes: Any,
) -> Path:
    """rows: the target id of each row of a reduced head (None: all ids, no d2t). By default head and embedding are
    copies of the target's."""
    target, ids = tensors_of(pair / "target"), list(range(12)) if rows is None else list(rows)
    tensors = tensors_of(pair / "draft") | {
        "embed_tokens.weight": target["model.embed_tokens.weight"] if embedding is None else embedding,
        "lm_head.weight": target["lm_head.weight"][ids] if head is None else head,
        "verifier_norm.weight": target["model.norm.weight"],
    }
    if rows is not None:
        tensors["d2t"] = torch.tensor(ids) - torch.arange(len(ids))
        tensors["t2d"] = torch.isin(torch.arange(12), torch.tensor(ids))
    return write(folder, speculators_config(len(ids), **changes), tensors)
