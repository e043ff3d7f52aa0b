"""The EAGLE-3 head (arXiv:2503.01840; parameter names of yuhuili's checkpoints).

One decoder layer reads, at position p, the embedding of the token at p + 1 beside what is known of position p: the
fused features of the target, or, while drafting, its own output for the draft before. Its output guesses the token at
p + 2.

Letters: R rows, T tokens, D target hidden size (and its own), V vocabulary, V' rows of its head.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torch_dflash.config import Eagle3Config
from torch_dflash.models.layers import MLP, Attend, Attention, RMSNorm
from torch_dflash.models.rope import Rotary


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention reads two normed inputs side by side; the residual is that of the second."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        block, size = config.block, config.block.hidden_size
        self.self_attn = Attention(replace(block, hidden_size=2 * size))
        self.self_attn.o_proj = nn.Linear(block.num_heads * block.head_dim, size, bias=block.attention_bias)
        self.mlp = MLP(block)
        self.input_layernorm = RMSNorm(size, block.rms_norm_eps)
        self.hidden_norm = RMSNorm(size, block.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(size, block.rms_norm_eps)

    def forward(self, embeds: Tensor, hidden: Tensor, rotary: Any, attend: Attend, cache: Any) -> tuple[Tensor, Any]:
        both = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)
        out, cache = self.self_attn(both, rotary, 0, attend, cache)
        hidden = hidden + out
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), cache


class Eagle3(nn.Module):
    """The embedding is the target's. Row i of the head stands for the target's id i + d2t[i]."""

    d2t: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size = config.block.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * size, size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(size, config.block.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(config.rope, config.block.head_dim)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int32, device="cpu"))

    def fuse(self, features: Tensor) -> Tensor:
        """Features [R,T,3*D] of the target -> [R,T,D]"""
        return self.fc(features)

    def forward(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, cache: Any
    ) -> tuple[Tensor, Any]:
        """One pass over embedded tokens and hidden states [R,T,D] at int32 positions [R,T] -> [R,T,D], and the cache
        that attention handed on. The output is not normed: it is the next input."""
        return self.midlayer(embeds, hidden, self.rotary(positions), attend, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """Outputs [..., D] -> [..., V']"""
        return self.lm_head(self.norm(hidden))

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Rows of its head, int32 [...] -> the target's ids."""
        return draft_ids + self.d2t[draft_ids]
