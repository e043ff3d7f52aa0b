"""The drafter before its first step: sizes like the target's, layers copied from it.

Letters: F taps, D target hidden size.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bridge.views import Params
from torch_dflash.config import BlockConfig, DrafterConfig, DraftLayer, TargetConfig
from torch_dflash.config_draft import default_target_layer_ids
from torch_dflash.errors import InputError
from torch_dflash.models.drafter import Drafter
from torch_dflash.train.selector import PART


def default_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """DFlash's own choice: from layer 1 to the fourth last, evenly.  Example: (30, 4) -> (1, 10, 18, 27).

    Raises InputError where the target has too few layers for that.
    """
    taps = default_target_layer_ids(num_layers, count)
    if taps != tuple(sorted(set(taps))) or taps[0] < 0 or taps[-1] >= num_layers:
        raise InputError(f"a target of {num_layers} layers has no {count} default taps: name them yourself")
    return taps


def drafter_config(
    target: TargetConfig, num_layers: int, block_size: int, mask_token_id: int, taps: tuple[int, ...]
) -> DrafterConfig:
    """A drafter whose layers are as wide as the target's, with per-head norms, seeing everything. Raises InputError."""
    if not 0 <= mask_token_id < target.vocab_size:
        raise InputError(f"mask token {mask_token_id} is outside the vocabulary 0..{target.vocab_size - 1}")
    own = target.block
    return DrafterConfig(
        block=BlockConfig(
            own.hidden_size,
            own.intermediate_size,
            own.num_heads,
            own.num_kv_heads,
            own.head_dim,
            own.rms_norm_eps,
            attention_bias=False,
            mlp_bias=False,
            qk_norm=True,
        ),
        layers=(DraftLayer(causal=False, window=None),) * num_layers,
        rope=target.rope,
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=taps,
        num_target_layers=target.num_layers,
        vocab_size=target.vocab_size,
        context_limit=target.context_limit,
    )


def warm_start(config: DrafterConfig, target: Params) -> Drafter:
    """A float32 drafter: layers are target layers spread over the upper half, `fc` averages the taps, norms are 1.

    target: the target's parameters, in any dtype.
    """
    drafter = Drafter(config)
    average_taps(drafter.fc.weight, len(config.target_layer_ids))
    assert config.num_target_layers is not None  # `drafter_config` says it
    total, count = config.num_target_layers, len(config.layers)
    for index, layer in enumerate(drafter.layers):
        held = layer_tensors(target, total - 1 - (count - 1 - index) * max(total // (2 * count), 1))
        layer.load_state_dict({name: held.get(name, _neutral(name, t)) for name, t in layer.state_dict().items()})
    drafter.norm.weight.data.copy_(to_tensor(target["norm.weight"]))
    drafter.hidden_norm.weight.data.fill_(1.0)
    return drafter.requires_grad_(False)


def widened(drafter: Drafter, config: DrafterConfig) -> Drafter:
    """A drafter's weights under a config with a new selector; what is new changes nothing."""
    whole = Drafter(config, drafter.embed_tokens is not None)
    held = {name: value for name, value in drafter.state_dict().items() if not name.startswith(PART)}
    whole.load_state_dict({name: held.get(name, _neutral(name, t)) for name, t in whole.state_dict().items()})
    return whole.requires_grad_(False)


def _neutral(name: str, like: Tensor) -> Tensor:
    """What a parameter that has no forerunner starts as: norms and kernels pass on what comes, the rest is silent."""
    if name.endswith("base_kernel"):  # [2,W,E]
        return torch.zeros_like(like).index_fill_(1, torch.tensor([0]), 1.0)
    return torch.ones_like(like) if like.ndim == 1 else torch.zeros_like(like)


def layer_tensors(target: Params, layer: int) -> dict[str, Tensor]:
    """The parameters of a target layer by their names inside it, float32."""
    source = f"layers.{layer}."
    return {name.removeprefix(source): to_tensor(value) for name, value in target.items() if name.startswith(source)}


def to_tensor(value: Any) -> Tensor:
    """float32, a copy."""
    return torch.from_numpy(np.array(value, np.float32))


def average_taps(weight: Tensor, taps: int) -> None:
    """[E,F*D]: every tap contributes 1/F of itself, and a little noise keeps the directions apart."""
    size = weight.shape[0]
    noise = torch.empty_like(weight).normal_(std=0.02 / taps, generator=torch.Generator().manual_seed(0))
    weight.data.copy_(torch.eye(size).repeat(1, taps) / taps + noise)
