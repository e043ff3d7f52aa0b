"""A trained drafter -> a folder in z-lab's layout: config.json and model.safetensors."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save

from bridge.views import Params
from torch_dflash.config import DefaultRope, DrafterConfig, Llama3Rope, Rope
from torch_dflash.train.checkpoint import write_atomically
from torch_dflash.train.trainer import split_buffers


def export_drafter(config: DrafterConfig, params: Params, folder: Path, eos_token_id: int | None = None) -> None:
    """Write the drafter in bfloat16. It loads in this project and wherever z-lab's checkpoints load."""
    folder.mkdir(parents=True, exist_ok=True)
    trained, _ = split_buffers(params)
    tensors = {name: np.asarray(value).astype(ml_dtypes.bfloat16) for name, value in trained.items()}
    write_atomically(folder / "model.safetensors", save(tensors, {"format": "pt"}))
    content = json.dumps(checkpoint_fields(config, eos_token_id), indent=2, sort_keys=True) + "\n"
    write_atomically(folder / "config.json", content.encode())


def checkpoint_fields(config: DrafterConfig, eos_token_id: int | None) -> dict[str, Any]:
    """The content of config.json."""
    block = config.block
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": block.attention_bias,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "dtype": "bfloat16",
        "eos_token_id": eos_token_id,
        "head_dim": block.head_dim,
        "hidden_act": "silu",
        "hidden_size": block.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": block.intermediate_size,
        "layer_types": ["full_attention"] * len(config.layers),
        "max_position_embeddings": config.context_limit,
        "max_window_layers": len(config.layers),
        "num_attention_heads": block.num_heads,
        "num_hidden_layers": len(config.layers),
        "num_key_value_heads": block.num_kv_heads,
        "num_target_layers": config.num_target_layers,
        "rms_norm_eps": block.rms_norm_eps,
        "rope_scaling": _rope_scaling(config.rope),
        "rope_theta": config.rope.theta,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def _rope_scaling(rope: Rope) -> dict[str, Any] | None:
    if isinstance(rope, DefaultRope):
        return None
    kind = "llama3" if isinstance(rope, Llama3Rope) else "yarn"
    return {"rope_type": kind} | {name: value for name, value in asdict(rope).items() if name != "theta"}
