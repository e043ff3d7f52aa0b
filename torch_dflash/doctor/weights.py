"""What the weights themselves say: tensors that are not finite, zero or constant, and the mask id's embedding.

That names, shapes and the head are those that config.json asks for, load_weights has seen to.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from torch_dflash.config import DrafterConfig
from torch_dflash.models.drafter import Drafter
from torch_dflash.models.target import Target

Level = Literal["ok", "hint", "broken"]
_VARIED = "varied"
_NAMED = 3  # tensors named in one finding; the rest is counted
_ODD_NORM = 10.0
_NEUTRAL = ((1.0, "base_kernel"), (0.0, "kernel_projection.weight"))


@dataclass(frozen=True)
class Check:
    """One finding. "hint": odd, but no proof of a fault."""

    level: Level
    text: str


def check_weights(target: Target, drafter: Drafter, config: DrafterConfig) -> list[Check]:
    """Findings about both models, then about the mask id."""
    checks = [*_tensors("target", target), *_tensors("drafter", drafter)]
    taps, hidden = len(config.target_layer_ids), config.block.hidden_size
    checks.append(Check("ok", f"fc {list(drafter.fc.weight.shape)} is [hidden, taps * hidden]: {taps} taps * {hidden}"))
    return [*checks, _mask_row(target, config.mask_token_id)]


def _tensors(role: str, module: nn.Module) -> Iterator[Check]:
    state, kinds = module.state_dict(), dict[str, list[str]]()
    for name, tensor in state.items():
        kinds.setdefault(_kind(name, tensor), []).append(name)
    kinds.pop(_VARIED, None)
    for kind, names in kinds.items():
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        yield Check("broken", f"{role}: {kind}: {', '.join(names[:_NAMED])}{more}")
    if not kinds:
        yield Check("ok", f"{role}: {len(state)} tensors as config.json asks for, all finite, none zero or constant")


def _kind(name: str, tensor: torch.Tensor) -> str:
    """Biases may be zero, and norm weights that were never trained are all one; so is DFlash 2's kernel of one position
    that changes nothing, and what would depend on the input is zero."""
    low, high = (value.item() for value in torch.aminmax(tensor))  # NaN comes through
    if not torch.isfinite(torch.tensor([low, high])).all():
        return "not finite"
    if low != high or name.endswith(".bias") or (low, name.rpartition("_conv.")[2]) in _NEUTRAL:
        return _VARIED
    if low == 0:
        return "all zero"
    return "constant" if tensor.ndim > 1 and tensor.numel() > 1 else _VARIED


def _mask_row(target: Target, mask_id: int) -> Check:
    """An embedding row unlike the others is no fault by itself: no text contains the mask id."""
    norms = torch.linalg.vector_norm(target.embed_tokens.weight, dim=1, dtype=torch.float32)
    own, middle = norms[mask_id].item(), norms.median().item()
    text = f"embedding row of mask id {mask_id}: norm {own:.3g}, median of all rows {middle:.3g}"
    odd = not middle / _ODD_NORM <= own <= middle * _ODD_NORM
    return Check("hint", f"{text}; is it the mask id of the training?") if odd else Check("ok", text)
