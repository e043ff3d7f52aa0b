"""A trained drafter -> a folder with config.json and model.safetensors: z-lab's layout, or yuhuili's for EAGLE-3."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save

from bridge.views import Params
from torch_dflash.config import BlockConfig, DefaultRope, DrafterConfig, Eagle3Config, Llama3Rope, Rope, Scales
from torch_dflash.config_eagle import ARCHITECTURE
from torch_dflash.config_layouts import DFLASH_2
from torch_dflash.train.checkpoint import write_atomically
from torch_dflash.train.trainer import split_buffers


def export(config: DrafterConfig | Eagle3Config, params: Params, folder: Path, eos_token_id: int | None = None) -> None:
    """Write the drafter in bfloat16. It loads in this project and wherever such checkpoints load. `params` with the
    buffers."""
    folder.mkdir(parents=True, exist_ok=True)
    trained, _ = split_buffers(params)
    tensors = {name: np.asarray(value).astype(ml_dtypes.bfloat16) for name, value in trained.items()}
    if isinstance(config, Eagle3Config):
        tensors |= _vocabulary_map(np.asarray(params["d2t"], np.int64), config.vocab_size)
    write_atomically(folder / "model.safetensors", save(tensors, {"format": "pt"}))
    fields = head_fields(config) if isinstance(config, Eagle3Config) else drafter_fields(config)
    content = json.dumps(fields | {"eos_token_id": eos_token_id}, indent=2, sort_keys=True) + "\n"
    write_atomically(folder / "config.json", content.encode())


def _vocabulary_map(d2t: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
    """d2t, and its inverse t2d: which of the target's ids have a row."""
    return {"d2t": d2t, "t2d": np.isin(np.arange(vocab_size), np.arange(len(d2t)) + d2t)}


def head_fields(config: Eagle3Config) -> dict[str, Any]:
    """The content of an EAGLE-3 head's config.json. Taps are counted as inputs of layers there."""
    return _block_fields(config.block) | {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids]},
        "max_position_embeddings": config.context_limit,
        "num_hidden_layers": 1,
        "rope_scaling": _rope_scaling(config.rope),
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }


def _block_fields(block: BlockConfig) -> dict[str, Any]:
    return {
        "attention_bias": block.attention_bias,
        "dtype": "bfloat16",
        "head_dim": block.head_dim,
        "hidden_act": "silu",
        "hidden_size": block.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": block.intermediate_size,
        "num_attention_heads": block.num_heads,
        "num_key_value_heads": block.num_kv_heads,
        "rms_norm_eps": block.rms_norm_eps,
        "use_cache": True,
    }


def drafter_fields(config: DrafterConfig) -> dict[str, Any]:
    """The content of a DFlash drafter's config.json."""
    return _block_fields(config.block) | {
        "architectures": ["DFlashDraftModel" if config.selector is None else DFLASH_2],
        "model_type": "qwen3",
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            **_scale_fields(config.scales),
            **_dflash2_fields(config),
        },
        "layer_types": ["full_attention"] * len(config.layers),
        "max_position_embeddings": config.context_limit,
        "max_window_layers": len(config.layers),
        "num_hidden_layers": len(config.layers),
        "num_target_layers": config.num_target_layers,
        "rope_scaling": _rope_scaling(config.rope),
        "rope_theta": config.rope.theta,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def _scale_fields(scales: Scales) -> dict[str, Any]:
    """None where they change nothing: readers older than they are take such a drafter."""
    if scales == Scales():
        return {}
    return {
        "final_logit_softcapping": scales.softcapping,
        "input_embedding_scale": scales.input_embedding,
        "output_multiplier": scales.output,
    }


def _dflash2_fields(config: DrafterConfig) -> dict[str, Any]:
    if config.selector is None:
        return {}
    assert config.convolution is not None, "DFlash 2 has both"
    return {
        "conv_group_size": config.convolution.group_size,
        "conv_kernel_size": config.convolution.kernel_size,
        "selector_rank": config.selector.rank,
        "selector_top_k": config.selector.top_k,
    }


def _rope_scaling(rope: Rope) -> dict[str, Any] | None:
    if isinstance(rope, DefaultRope):
        return None
    kind = "llama3" if isinstance(rope, Llama3Rope) else "yarn"
    return {"rope_type": kind} | {name: value for name, value in asdict(rope).items() if name != "theta"}
