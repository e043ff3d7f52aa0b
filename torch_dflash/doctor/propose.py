"""Which drafts the target would accept, behind every anchor of a text at once, teacher-forced on the text.

Letters: A anchors, T tokens, N keys, B block_size, H query heads, K key/value heads, d head_dim, D target hidden size,
E drafter hidden size.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_dflash.config import DrafterConfig
from torch_dflash.doctor.texts import Text
from torch_dflash.doctor.variants import Variant
from torch_dflash.models.drafter import Drafter
from torch_dflash.models.target import Target
from torch_dflash.reference import attention, best_ids, draft_logits, draft_visible

MAX_BATCH_KEYS = 1 << 14  # context and block positions of one batch of anchors: bounds its memory


@dataclass(frozen=True)
class Tapped:
    """Outputs [T,D] of target layers over a text. `last_raw`: the last layer's, before the final norm."""

    outputs: Mapping[int, Tensor]
    last_layer: int
    last_raw: Tensor

    def features(self, variant: Variant) -> Tensor:
        """[T,F*D], in the order of the variant's taps."""
        raw = {} if variant.inputs.final_norm else {self.last_layer: self.last_raw}
        return torch.cat([raw.get(tap, self.outputs[tap]) for tap in variant.config.target_layer_ids], dim=-1)


@torch.inference_mode()
def tap(target: Target, text: Text, layers: Iterable[int]) -> Tapped:
    """One pass of the target over a text."""
    taps, positions = tuple(sorted(set(layers))), torch.arange(len(text.token_ids))
    visible, before_norm = positions[:, None] >= positions, list[Tensor]()

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, cache: None) -> tuple[Tensor, None]:
        return attention(q, k, v, visible), cache

    hook = target.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0]))
    try:
        _, features, _ = target(torch.tensor([text.token_ids]), positions[None], taps, attend, None)
    finally:
        hook.remove()
    outputs = dict(zip(taps, features[0].chunk(len(taps), -1), strict=True))
    return Tapped(outputs, len(target.layers) - 1, before_norm[0][0])


def drafter_of(drafter: Drafter, variant: Variant) -> Drafter:
    """The same weights under the variant's configuration."""
    with torch.device("meta"):
        module = type(drafter)(variant.config, drafter.embed_tokens is not None)
    module.load_state_dict(drafter.state_dict(), assign=True)
    if not variant.inputs.hidden_norm:
        module.add_module("hidden_norm", nn.Identity())
    return module.eval()


@torch.inference_mode()
def accepted_drafts(
    target: Target, drafter: Drafter, variant: Variant, tapped: Tapped, text: Text, anchors: Tensor
) -> Tensor:
    """int64 [A]: how many leading drafts behind each anchor position equal the text. `drafter` is the variant's.

    Drafts beyond the end of the text count as rejected.
    """
    features = tapped.features(variant)
    keys, values = drafter.absorb(features[None], torch.arange(len(features))[None])
    rows = max(1, MAX_BATCH_KEYS // (len(features) + variant.config.block_size))
    context = list(zip(keys, values, strict=True))
    blocks = [_block(target, drafter, variant, context, text, at) for at in anchors.split(rows)]
    return torch.cat(blocks)


def _block(
    target: Target,
    drafter: Drafter,
    variant: Variant,
    context: list[tuple[Tensor, Tensor]],
    text: Text,
    anchors: Tensor,
) -> Tensor:
    config, ids = variant.config, torch.tensor(text.token_ids)
    length, places = len(ids), torch.arange(config.block_size)
    block_at = anchors[:, None] + variant.inputs.block_offset + places
    key_at = torch.cat([torch.arange(length).expand(len(anchors), -1), block_at], 1)
    stands = _stands(variant, anchors, length)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, cache: None) -> tuple[Tensor, None]:
        visible = draft_visible(config.layers[layer], block_at, key_at) & stands
        key, value = (
            torch.cat([old.expand(len(anchors), -1, -1, -1), new], 1)
            for old, new in zip(context[layer], (k, v), strict=True)
        )
        return attention(q, key, value, visible[:, None]), cache

    noise_ids = ids[anchors][:, None].where(places == 0, config.mask_token_id)
    embeds = target if drafter.embed_tokens is None else drafter
    hidden = drafter(embeds.embed(noise_ids) * config.scales.input_embedding, block_at, attend, None)
    labels = torch.cat([ids, ids.new_full((config.block_size,), -1)]).unfold(0, config.block_size, 1)[anchors + 1]
    hidden = hidden[:, variant.inputs.first_read :]
    return _leading_matches(target, drafter, config, hidden, ids[anchors], labels[:, :-1])


def _stands(variant: Variant, anchors: Tensor, length: int) -> Tensor:
    """bool [A,1,T+B]: the keys that exist for an anchor: context strictly before it, and its block."""
    hidden = variant.inputs.hidden_context
    end = anchors - hidden if hidden is not None else torch.zeros_like(anchors)
    stands = torch.arange(length) < end[:, None]
    block = torch.ones(len(anchors), variant.config.block_size, dtype=torch.bool)
    return torch.cat([stands, block], 1)[:, None]


def _leading_matches(
    target: Target, drafter: Drafter, config: DrafterConfig, hidden: Tensor, anchor_ids: Tensor, labels: Tensor
) -> Tensor:
    """int64 [A]: leading j for which hidden [A,*,E] behind anchor_ids [A] gives labels [A,B-1].

    Column by column, and only the rows still alive, since the head costs most. Their drafts so far are the labels.
    """
    matches, alive, before = torch.zeros(len(labels), dtype=torch.int64), torch.arange(len(labels)), anchor_ids
    for column in range(labels.shape[1]):
        place = hidden[alive, column]
        drafts = best_ids(drafter, config, place, draft_logits(target, drafter, config, place), before[alive])
        alive, before = alive[drafts == labels[alive, column]], labels[:, column]
        if not len(alive):
            break
        matches[alive] += 1
    return matches
