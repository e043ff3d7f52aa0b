"""Llama and Qwen3 targets: one module, the differences are in the config.

Letters: R rows, T tokens, D hidden size, V vocabulary, F tapped layers.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_dflash.config import TargetConfig
from torch_dflash.models.layers import Attend, DecoderLayer, RMSNorm, RotaryAngles
from torch_dflash.models.rope import Rotary


class Target(nn.Module):
    """Parameter names are Hugging Face's without the leading `model.`. A tied head is not a parameter of its own."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        block = config.block
        self.embed_tokens = nn.Embedding(config.vocab_size, block.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(block) for _ in range(config.num_layers))
        self.norm = RMSNorm(block.hidden_size, block.rms_norm_eps)
        self.rotary = Rotary(config.rope, block.head_dim)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(block.hidden_size, config.vocab_size, bias=False)
        self.tied = config.tie_word_embeddings

    def embed(self, ids: Tensor) -> Tensor:
        """int32 ids [R,T], all below V -> [R,T,D]"""
        return self.embed_tokens(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden states [..., D] -> [..., V], through the embedding when the head is tied."""
        return F.linear(hidden, self.embed_tokens.weight if self.tied else self.lm_head.weight)

    def angles(self, positions: Tensor) -> RotaryAngles:
        """int32 positions [R,T] -> what rotates queries and keys."""
        return self.rotary(positions)

    def last_norm(self, hidden: Tensor) -> Tensor:
        """Output of the last layer [R,T,D] -> normed hidden states [R,T,D]"""
        return self.norm(hidden)

    def forward(
        self, ids: Tensor, positions: Tensor, taps: tuple[int, ...], attend: Attend, cache: Any
    ) -> tuple[Tensor, Tensor, Any]:
        """One pass over ids [R,T] at int32 positions [R,T].

        Returns normed hidden states [R,T,D], features [R,T,F*D] (outputs of the layers `taps`, in that order) and
        the cache that attention handed on. The last layer's output is tapped after the final norm, as in HF's
        hidden_states.
        """
        rotary = self.angles(positions)
        hidden = self.embed(ids)
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            hidden, cache = layer(hidden, rotary, index, attend, cache)
            tapped[index] = hidden
        hidden = self.last_norm(hidden)
        tapped[len(self.layers) - 1] = hidden
        features = torch.cat([tapped[tap] for tap in taps], dim=-1) if taps else hidden[..., :0]
        return hidden, features, cache
