"""The oracle: plain greedy decoding and plain DFlash in eager torch, for one prompt.

No cache and no JAX: every round recomputes the target over the whole sequence and the drafter over the whole
context, so lengths, slots and what an earlier round left behind cannot go wrong here.

Letters: T tokens, N keys or places, H query heads, K key/value heads, d head_dim, F tapped layers, B block_size, D
target hidden size, E drafter hidden size, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dflash.config import DrafterConfig, DraftLayer
from torch_dflash.metrics import TraceEntry
from torch_dflash.models.drafter import Drafter
from torch_dflash.models.target import Target


def greedy(target: Target, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """The new tokens of plain greedy decoding."""
    ids = list(prompt_ids)
    for _ in range(max_new_tokens):
        ids += _argmax(target_pass(target, ids)[0][-1:])
    return ids[len(prompt_ids) :]


def dflash(
    target: Target,
    drafter: Drafter,
    config: DrafterConfig,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    num_drafts: int | None = None,
    context_limit: int | None = None,
) -> tuple[list[int], list[TraceEntry]]:
    """The new tokens, and one trace entry per round as `generate` gives it. num_drafts defaults to block_size - 1.

    context_limit: positions that the target has; a draft that lies behind them is never accepted.
    """
    drafts = config.block_size - 1 if num_drafts is None else num_drafts
    new, trace = greedy(target, prompt_ids, min(1, max_new_tokens)), list[TraceEntry]()
    while len(new) < max_new_tokens:
        ids = [*prompt_ids, *new]  # the last one is the anchor
        _, features = target_pass(target, ids[:-1], config.target_layer_ids)
        proposed = draft_ids(target, drafter, config, features, ids[-1])[:drafts]
        fitting = proposed if context_limit is None else proposed[: context_limit - len(ids)]
        logits, _ = target_pass(target, ids + fitting)
        target_ids = _argmax(logits[len(ids) - 1 :])
        accepted = matching_prefix(fitting, target_ids)
        emitted = target_ids[: accepted + 1][: max_new_tokens - len(new)]
        trace.append(TraceEntry(len(ids) - 1, proposed, accepted, emitted))
        new += emitted
    return new, trace


def matching_prefix(draft_ids: Sequence[int], target_ids: Sequence[int]) -> int:
    """How many leading drafts the target would have written too.  Example: [5, 6, 9], [5, 6, 7, 8] -> 2."""
    for position, (draft, token) in enumerate(zip(draft_ids, target_ids, strict=False)):
        if draft != token:
            return position
    return len(draft_ids)


@torch.inference_mode()
def target_pass(target: Target, ids: Sequence[int], taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    """Logits [T,V] and features [T,F*D] of a whole sequence."""
    positions = torch.arange(len(ids), dtype=torch.int32)
    visible = positions[:, None] >= positions

    def attend(layer: Any, q: Tensor, k: Tensor, v: Tensor, cache: None) -> tuple[Tensor, None]:
        return attention(q, k, v, visible), cache

    hidden, features, _ = target(torch.tensor([list(ids)], dtype=torch.int32), positions[None], taps, attend, None)
    return target.logits(hidden)[0], features[0]


def draft_ids(target: Target, drafter: Drafter, config: DrafterConfig, features: Tensor, anchor: int) -> list[int]:
    """The B-1 drafts behind `anchor`, which stands right after the positions of features [T,F*D]."""
    ids = torch.tensor([anchor])
    hidden = draft_hidden(target, drafter, config, features, anchor)
    for place, logits in zip(hidden, draft_logits(target, drafter, config, hidden), strict=True):
        ids = torch.cat([ids, best_ids(drafter, config, place[None], logits[None], ids[-1:])])
    return ids[1:].tolist()


@torch.inference_mode()
def draft_hidden(target: Target, drafter: Drafter, config: DrafterConfig, features: Tensor, anchor: int) -> Tensor:
    """Normed hidden states [B-1,E] of the places behind `anchor`, see `draft_ids`."""
    positions = torch.arange(len(features) + config.block_size, dtype=torch.int32)
    at_context, at_block = positions[: len(features)], positions[len(features) :]
    keys, values = drafter.absorb(features[None], at_context[None])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, cache: None) -> tuple[Tensor, None]:
        visible = draft_visible(config.layers[layer], at_block, positions)
        return attention(q, torch.cat([keys[layer], k], 1), torch.cat([values[layer], v], 1), visible), cache

    noise_ids = [anchor, *[config.mask_token_id] * (config.block_size - 1)]
    embeds = target if drafter.embed_tokens is None else drafter
    noise = embeds.embed(torch.tensor([noise_ids], dtype=torch.int32)) * config.scales.input_embedding
    return drafter(noise, at_block[None], attend, None)[0, 1:]


@torch.inference_mode()
def draft_logits(target: Target, drafter: Drafter, config: DrafterConfig, hidden: Tensor) -> Tensor:
    """Logits [...,V] of normed hidden states [...,E]. With a head of its own, V are the rows of that."""
    logits = (target if drafter.lm_head is None else drafter).logits(hidden) * config.scales.output
    bound = config.scales.softcapping
    return logits if bound is None else bound * torch.tanh(logits / bound)


def best_ids(drafter: Drafter, config: DrafterConfig, hidden: Tensor, logits: Tensor, before: Tensor) -> Tensor:
    """The drafts [N] of places with hidden states [N,E] and logits [N,V], behind the tokens `before` [N]."""
    best = draft_scores(drafter, config, hidden, logits, before).argmax(-1)
    return best if drafter.lm_head is None else drafter.target_ids(best)


@torch.inference_mode()
def draft_scores(drafter: Drafter, config: DrafterConfig, hidden: Tensor, logits: Tensor, before: Tensor) -> Tensor:
    """[N,V], whose largest are the drafts: the logits; with a selector, in float32, those of the candidates and their
    edges."""
    if config.selector is None:
        return logits
    logits = logits.float()
    unary, candidates = logits.topk(config.selector.top_k)
    edges = drafter.edges(hidden[:, None], before[:, None, None], candidates[:, None])[:, 0, 0]
    return torch.full_like(logits, float("-inf")).scatter(1, candidates, unary + edges)


def draft_visible(layer: DraftLayer, query_at: Tensor, key_at: Tensor) -> Tensor:
    """bool [...,T,N]: which key positions [...,N] each query [...,T] of a drafter layer sees."""
    distance = query_at[..., :, None] - key_at[..., None, :]
    visible = torch.ones_like(distance, dtype=torch.bool)
    if layer.causal:
        visible &= distance >= 0
    if layer.window is not None:
        visible &= distance.abs() < layer.window
    return visible


def attention(q: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """q [1,T,H,d], key and value [1,N,K,d], visible bool [T,N] -> [1,T,H,d]. Query head h reads K/V head h // (H/K)."""
    group = q.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(group, 2).float(), value.repeat_interleave(group, 2).float()
    scores = torch.einsum("rthd,rnhd->rhtn", q.float(), key) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("rhtn,rnhd->rthd", weights, value).to(q.dtype)


def _argmax(logits: Tensor) -> list[int]:
    return logits.argmax(-1).tolist()
