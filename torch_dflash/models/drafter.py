"""The DFlash v1 drafter (arXiv:2602.06036, section 3; parameter names of the z-lab checkpoints).

Letters: R rows, T tokens, B block_size, F tapped layers, D target hidden size, E drafter hidden size, L drafter
layers, K key/value heads, d head_dim, V vocabulary, V' rows of a drafter's own head.
"""

from typing import Any

import torch
from torch import Tensor, nn

from torch_dflash.config import DrafterConfig
from torch_dflash.models.layers import Attend, DecoderLayer, RMSNorm
from torch_dflash.models.rope import Rotary


class Drafter(nn.Module):
    """Usually neither embedding nor head: both are the target's. `embed_tokens` and `lm_head` are None then.

    A head of its own may cover a part of the vocabulary: its row i stands for the target's id i + d2t[i]
    (speculators' convention).
    """

    embed_tokens: nn.Embedding | None
    lm_head: nn.Linear | None
    d2t: Tensor

    def __init__(self, config: DrafterConfig, own_embedding: bool = False) -> None:
        super().__init__()
        block = config.block
        self.fc = nn.Linear(len(config.target_layer_ids) * block.hidden_size, block.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(block.hidden_size, block.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(block) for _ in config.layers)
        self.norm = RMSNorm(block.hidden_size, block.rms_norm_eps)
        self.rotary = Rotary(config.rope, block.head_dim)
        self.embed_tokens = self.lm_head = None
        if own_embedding:
            assert config.vocab_size is not None
            self.embed_tokens = nn.Embedding(config.vocab_size, block.hidden_size)
        if config.draft_vocab_size is not None:
            self.lm_head = nn.Linear(block.hidden_size, config.draft_vocab_size, bias=False)
            offsets = torch.zeros(config.draft_vocab_size, dtype=torch.int32, device="cpu")
            self.register_buffer("d2t", offsets, persistent=config.draft_vocab_size != config.vocab_size)

    def embed(self, ids: Tensor) -> Tensor:
        """int32 ids [R,T] -> [R,T,E], through an embedding of its own."""
        assert self.embed_tokens is not None
        return self.embed_tokens(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden states [..., E] -> [..., V'], through a head of its own."""
        assert self.lm_head is not None
        return self.lm_head(hidden)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Rows of its own head, int32 [...] -> the target's ids."""
        return draft_ids + self.d2t[draft_ids]

    def project(self, features: Tensor) -> Tensor:
        """Features [R,T,F*D] -> context [R,T,E]"""
        return self.hidden_norm(self.fc(features))

    def absorb(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Context keys and values of all layers, each [L,R,T,K,d], for features [R,T,F*D] at positions [R,T]."""
        return self.context_key_value(self.project(features), positions)

    def context_key_value(self, context: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`absorb` of context that `project` has made [R,T,E]. It is the same for every layer and skips the layers'
        input norm."""
        rotary = self.rotary(positions)
        pairs = [layer.context_key_value(context, rotary) for layer in self.layers]  # type: ignore[operator]
        return torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs])

    def forward(self, noise: Tensor, positions: Tensor, attend: Attend, cache: Any) -> Tensor:
        """Embedded noise block [R,B,E] at positions [R,B] -> normed hidden states [R,B,E].

        `attend` lets the block see the context in `cache` and itself; block keys and values never persist.
        """
        rotary, hidden = self.rotary(positions), noise
        for index, layer in enumerate(self.layers):
            hidden, _ = layer(hidden, rotary, index, attend, cache)
        return self.norm(hidden)
