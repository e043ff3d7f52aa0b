"""The oracle of the EAGLE-3 baseline: eager torch, one prompt, no cache and no JAX. See reference.py.

Letters: T tokens, D target hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dflash.config import Eagle3Config
from torch_dflash.metrics import TraceEntry
from torch_dflash.models.eagle3 import Eagle3
from torch_dflash.models.target import Target
from torch_dflash.reference import attention, greedy, matching_prefix, target_pass


def eagle3(
    target: Target, head: Eagle3, config: Eagle3Config, prompt_ids: Sequence[int], max_new_tokens: int, num_drafts: int
) -> tuple[list[int], list[TraceEntry]]:
    """The new tokens of greedy decoding, and one trace entry per round as `generate` gives it."""
    new, trace = greedy(target, prompt_ids, min(1, max_new_tokens)), list[TraceEntry]()
    while len(new) < max_new_tokens:
        ids = [*prompt_ids, *new]  # the last one is the anchor
        _, features = target_pass(target, ids[:-1], config.target_layer_ids)
        draft_ids = drafts(target, head, features, ids[1:], num_drafts)
        logits, _ = target_pass(target, ids + draft_ids)
        target_ids = logits[len(ids) - 1 :].argmax(-1).tolist()
        accepted = matching_prefix(draft_ids, target_ids)
        emitted = target_ids[: accepted + 1][: max_new_tokens - len(new)]
        trace.append(TraceEntry(len(ids) - 1, draft_ids, accepted, emitted))
        new += emitted
    return new, trace


@torch.inference_mode()
def drafts(target: Target, head: Eagle3, features: Tensor, next_ids: list[int], num_drafts: int) -> list[int]:
    """Drafts behind next_ids [T], the tokens behind the T positions of features [T,3*D]. Each one recomputes all."""
    hidden, ids = head.fuse(features[None]), list(next_ids)
    for _ in range(num_drafts):
        out = head_pass(head, target.embed(torch.tensor([ids], dtype=torch.int32)), hidden)
        best = head.logits(out[:, -1]).argmax(-1)
        ids.append(int(head.target_ids(best)))
        hidden = torch.cat([hidden, out[:, -1:]], dim=1)
    return ids[len(next_ids) :]


def head_pass(head: Eagle3, embeds: Tensor, hidden: Tensor) -> Tensor:
    """Outputs [1,T,D] of the whole sequence."""
    positions = torch.arange(embeds.shape[1], dtype=torch.int32)
    visible = positions[:, None] >= positions

    def attend(layer: Any, q: Tensor, k: Tensor, v: Tensor, cache: None) -> tuple[Tensor, None]:
        return attention(q, k, v, visible), cache

    return head(embeds, hidden, positions[None], attend, None)[0]
