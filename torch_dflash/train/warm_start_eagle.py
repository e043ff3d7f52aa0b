"""An EAGLE-3 head before its first step: sizes like the target's, weights copied from it where it has some.

Letters: D target hidden size, H query or key/value heads, d head_dim, V' rows of the head.
"""

from dataclasses import replace

import numpy as np
import torch

from bridge.views import Params
from torch_dflash.config import Eagle3Config, TargetConfig
from torch_dflash.config_eagle import NUM_TAPS, default_tap_inputs
from torch_dflash.errors import InputError
from torch_dflash.models.eagle3 import Eagle3
from torch_dflash.train.warm_start import average_taps, layer_tensors, to_tensor


def head_config(target: TargetConfig, taps: tuple[int, ...], draft_vocab_size: int) -> Eagle3Config:
    """A head as wide as the target. taps: empty for EAGLE's own choice. Raises InputError."""
    block = replace(target.block, attention_bias=False, mlp_bias=False, qk_norm=False)
    taps = taps or tuple(layer - 1 for layer in default_tap_inputs(target.num_layers))
    if len(set(taps)) != NUM_TAPS or len(taps) != NUM_TAPS or not all(0 <= tap < target.num_layers for tap in taps):
        wanted = f"an EAGLE-3 head taps {NUM_TAPS} different layers 0..{target.num_layers - 1}: name them"
        raise InputError(f"--tap-layers {' '.join(map(str, taps))}: {wanted}")
    return Eagle3Config(block, target.rope, taps, target.vocab_size, draft_vocab_size, target.context_limit)


def warm_start_head(config: Eagle3Config, ids: np.ndarray, target: Params, num_layers: int) -> Eagle3:
    """A float32 head whose layer is the target's last, reading half of each of its two inputs; whose logits are the
    target's, of the ids int32[V']; `fc` averages the taps. Per-head norms, which it has not, are left out.

    target: the parameters of a target of num_layers layers, in any dtype.
    """
    head = Eagle3(config)
    average_taps(head.fc.weight, len(config.target_layer_ids))
    held = layer_tensors(target, num_layers - 1)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = held[f"self_attn.{name}.weight"]
        held[f"self_attn.{name}.weight"] = torch.cat([weight, weight], dim=1) / 2
    held["hidden_norm.weight"] = held["input_layernorm.weight"]
    head.midlayer.load_state_dict({name: held[name] for name in head.midlayer.state_dict()})
    head.norm.weight.data.copy_(to_tensor(target["norm.weight"]))
    rows = target.get("lm_head.weight", target["embed_tokens.weight"])
    head.lm_head.weight.data.copy_(to_tensor(np.asarray(rows)[ids]))
    head.d2t.copy_(torch.from_numpy(ids - np.arange(len(ids), dtype=np.int32)))
    return head.requires_grad_(False)
