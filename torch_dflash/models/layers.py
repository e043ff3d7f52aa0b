"""The decoder layer that Llama, Qwen3 and the DFlash drafter share. Parameter names are the checkpoints'.

Letters: R rows, T tokens, D hidden size, H query heads, K key/value heads, d head_dim.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_dflash.config import BlockConfig
from torch_dflash.models.rope import rotate

# attend(layer, q [R,T,H,d], k [R,T,K,d], v [R,T,K,d], cache) -> (out [R,T,H,d], cache). The cache is opaque to the
# models: what
# it is, and whether attention writes to it, is the caller's business. The layer number may be a traced value.
Attend = Callable[[Any, Tensor, Tensor, Tensor, Any], tuple[Tensor, Any]]
RotaryAngles = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Projections, per-head norms and rotation; attention itself is an argument."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def query(self, x: Tensor, rotary: RotaryAngles) -> Tensor:
        """[R,T,D] -> [R,T,H,d]"""
        return rotate(self.q_norm(self._heads(self.q_proj(x))), rotary)

    def key_value(self, x: Tensor, rotary: RotaryAngles) -> tuple[Tensor, Tensor]:
        """[R,T,D] -> two of [R,T,K,d]. The drafter also uses it for its context rows."""
        key = rotate(self.k_norm(self._heads(self.k_proj(x))), rotary)
        return key, self._heads(self.v_proj(x))

    def forward(self, x: Tensor, rotary: RotaryAngles, layer: int, attend: Attend, cache: Any) -> tuple[Tensor, Any]:
        key, value = self.key_value(x, rotary)
        out, cache = attend(layer, self.query(x, rotary), key, value, cache)
        return self.o_proj(out.flatten(-2)), cache


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, each with a residual."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def context_key_value(self, context: Tensor, rotary: RotaryAngles) -> tuple[Tensor, Tensor]:
        """Keys and values of drafter context rows [R,T,E], each [R,T,K,d]. They skip the input norm."""
        return self.self_attn.key_value(context, rotary)

    def forward(
        self, hidden: Tensor, rotary: RotaryAngles, layer: int, attend: Attend, cache: Any
    ) -> tuple[Tensor, Any]:
        out, cache = self.self_attn(self.input_layernorm(hidden), rotary, layer, attend, cache)
        hidden = hidden + out
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), cache
