"""The DFlash drafter (arXiv:2602.06036, section 3; parameter names of the z-lab checkpoints).

Letters: R rows, T tokens, B block_size, F tapped layers, D target hidden size, E drafter hidden size, L drafter
layers, K key/value heads, d head_dim, V vocabulary, V' rows of a drafter's own head, C candidates of a position.
"""

from typing import Any

import torch
from torch import Tensor, nn

from torch_dflash.config import DrafterConfig
from torch_dflash.models.dflash2 import BlockConvolution, CandidateSelector, convolve
from torch_dflash.models.layers import Attend, DecoderLayer, RMSNorm, RotaryAngles
from torch_dflash.models.rope import Rotary


class DrafterLayer(DecoderLayer):
    """In DFlash 2 with convolutions around attention and MLP, over the block alone: its context has none."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config.block)
        self.attention_conv = self.mlp_conv = None
        if config.convolution is not None:
            size = config.block.hidden_size
            self.attention_conv, self.mlp_conv = (BlockConvolution(config.convolution, size) for _ in range(2))

    def forward(
        self, hidden: Tensor, rotary: RotaryAngles, layer: int, attend: Attend, cache: Any
    ) -> tuple[Tensor, Any]:
        if self.attention_conv is None or self.mlp_conv is None:
            return super().forward(hidden, rotary, layer, attend, cache)
        x = self.input_layernorm(hidden)
        before, behind = self.attention_conv.kernels(x)
        out, cache = self.self_attn(convolve(before, x), rotary, layer, attend, cache)
        hidden = hidden + convolve(behind, out)
        x = self.post_attention_layernorm(hidden)
        before, behind = self.mlp_conv.kernels(x)
        return hidden + convolve(behind, self.mlp(convolve(before, x))), cache


class Drafter(nn.Module):
    """Usually neither embedding nor head: both are the target's. `embed_tokens` and `lm_head` are None then.

    A head of its own may cover a part of the vocabulary: its row i stands for the target's id i + d2t[i]
    (speculators' convention).
    """

    embed_tokens: nn.Embedding | None
    lm_head: nn.Linear | None
    candidate_selector: CandidateSelector | None
    d2t: Tensor

    def __init__(self, config: DrafterConfig, own_embedding: bool = False) -> None:
        super().__init__()
        block = config.block
        self.fc = nn.Linear(len(config.target_layer_ids) * block.hidden_size, block.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(block.hidden_size, block.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in config.layers)
        self.norm = RMSNorm(block.hidden_size, block.rms_norm_eps)
        self.rotary = Rotary(config.rope, block.head_dim)
        self.embed_tokens = self.lm_head = self.candidate_selector = None
        if own_embedding:
            assert config.vocab_size is not None
            self.embed_tokens = nn.Embedding(config.vocab_size, block.hidden_size)
        if config.draft_vocab_size is not None:
            self.lm_head = nn.Linear(block.hidden_size, config.draft_vocab_size, bias=False)
            offsets = torch.zeros(config.draft_vocab_size, dtype=torch.int32, device="cpu")
            self.register_buffer("d2t", offsets, persistent=config.draft_vocab_size != config.vocab_size)

        if config.selector is not None:
            assert config.vocab_size is not None
            self.candidate_selector = CandidateSelector(config.selector, config.vocab_size, block.hidden_size)

    def edges(self, hidden: Tensor, before: Tensor, candidates: Tensor) -> Tensor:
        """See `CandidateSelector`. DFlash 2 only."""
        assert self.candidate_selector is not None
        return self.candidate_selector(hidden, before, candidates)

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
