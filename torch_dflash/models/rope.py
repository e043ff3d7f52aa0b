"""Rotary position embedding: inverse frequencies of the three kinds, and the rotation.

Letters: R rows, T tokens, H heads, d head_dim.
"""

import math

import torch
from torch import Tensor, nn

from torch_dflash.config import DefaultRope, Llama3Rope, Rope, YarnRope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """float32 [d/2] on the CPU, after scaling. Source: the RoPE, Llama 3.1 and YaRN (arXiv:2309.00071) definitions."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    base = 1.0 / rope.theta**exponents
    match rope:
        case DefaultRope():
            return base
        case Llama3Rope():
            return _llama3(base, rope)
        case YarnRope():
            return _yarn(base, rope, head_dim)


def _llama3(base: Tensor, rope: Llama3Rope) -> Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    turns = rope.original_max_position_embeddings * base / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0, 1)
    return keep * base + (1 - keep) * base / rope.factor


def _yarn(base: Tensor, rope: YarnRope, head_dim: int) -> Tensor:
    """Dimensions that turn more than beta_fast times are kept, less than beta_slow divided, a linear ramp between."""

    def dimension(turns: float) -> float:
        wavelength = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001
    divide = ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / width).clamp(0, 1)
    return (1 - divide) * base + divide * base / rope.factor


class Rotary(nn.Module):
    """Makes (cos, sin), float32 [R,T,1,d], from int32 positions [R,T]. Its buffer stays float32 whatever the weights
    are."""

    inv_freq: Tensor

    def __init__(self, rope: Rope, head_dim: int) -> None:
        super().__init__()
        self.scaling = rope.attention_factor if isinstance(rope, YarnRope) else 1.0
        self.register_buffer("inv_freq", inverse_frequencies(rope, head_dim), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None, None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x [R,T,H,d] by (cos, sin), computed in float32, returned in x's dtype."""
    cos, sin = rotary
    wide = x.float()
    left, right = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-right, left), dim=-1) * sin).to(x.dtype)
