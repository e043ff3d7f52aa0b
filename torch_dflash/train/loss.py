"""DFlash's training loss: randomly anchored blocks, many of them packed behind one text.

Letters: R rows, T padded length, A anchors, B block_size, X feature width, E hidden size, H query heads, K key/value
heads, G = H / K, d head_dim, n = B - 1, S the loss's subset of the vocabulary, C candidates of a selector,
N tokens.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bridge.jnp_attention import HIDDEN
from bridge.positions import block_positions
from bridge.views import Params, take_rows
from torch_dflash import block
from torch_dflash.block import DrafterFunctions, scale_logits
from torch_dflash.config import DrafterConfig
from torch_dflash.errors import InputError
from torch_dflash.likeliest import best
from torch_dflash.models.drafter import Drafter
from torch_dflash.train.batches import Batch
from torch_dflash.train.objective import (
    ABSENT,
    Frozen,
    Measures,
    Objective,
    Subset,
    Teacher,
    guess_loss,
    labels_behind,
    placed_loss,
    taught,
)
from torch_dflash.train.selector import stillness


def lower_drafter(module: Drafter, config: DrafterConfig) -> DrafterFunctions:
    """Lower a drafter for training. Raises InputError for one that `check_trainable` refuses."""
    check_trainable(config)
    return block.lower_drafter(module, config)


def check_trainable(config: DrafterConfig) -> None:
    """Layers must see the whole context and, without causality, their own block, and the loss runs over the target's
    head. Raises InputError."""
    if config.draft_vocab_size is not None:
        reason = "a drafter with a head of its own cannot be trained"
        raise InputError(f"drafter draft_vocab_size is {config.draft_vocab_size}; {reason}, use one without")
    for number, layer in enumerate(config.layers):
        if layer.causal or layer.window is not None:
            seen = "is causal" if layer.causal else f"has a window of {layer.window}"
            raise InputError(f"drafter layer {number} {seen}; only full attention can be trained, use another drafter")


def product_dtype(dtype: Any) -> Any:
    """XLA on CPU has no batched bf16 products with an f32 result."""
    return jnp.float32 if jax.default_backend() == "cpu" else dtype


def packed_attention(q: Array, key: Array, value: Array, ctx_key: Array, ctx_value: Array, anchors: Array) -> Array:
    """Block a of row r sees the context strictly before its anchor, and itself, in both directions; no other block.

    q [R,A*B,H,d], key and value [R,A*B,K,d] of the noise; ctx_key and ctx_value [R,T,K,d]; anchors int32[R,A].
    """
    rows, _, heads, head_dim = q.shape
    num_anchors, kv_heads, dtype = anchors.shape[1], key.shape[2], product_dtype(q.dtype)
    blocks = (rows, num_anchors, -1, kv_heads)
    query = q.reshape(*blocks, heads // kv_heads, head_dim).astype(dtype)
    key, value = (x.reshape(*blocks, head_dim).astype(dtype) for x in (key, value))
    ctx_key, ctx_value = ctx_key.astype(dtype), ctx_value.astype(dtype)

    def product(spec: str, a: Array, b: Array) -> Array:
        return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)

    before = jnp.arange(ctx_key.shape[1]) < anchors[:, :, None]  # [R,A,T]
    on_context = jnp.where(before[:, None, :, None, None, :], product("rabkgd,rtkd->rkabgt", query, ctx_key), HIDDEN)
    on_block = product("rabkgd,rackd->rkabgc", query, key)
    weights = jax.nn.softmax(jnp.concatenate([on_context, on_block], axis=-1) * head_dim**-0.5, axis=-1).astype(dtype)
    split = ctx_key.shape[1]
    out = product("rkabgt,rtkd->rabkgd", weights[..., :split], ctx_value)
    out += product("rkabgc,rackd->rabkgd", weights[..., split:], value)
    return out.reshape(q.shape).astype(q.dtype)


def block_hidden(
    drafter: DrafterFunctions, params: Params, embedding: Array, features: Array, token_ids: Array, anchors: Array
) -> Array:
    """Normed hidden states [R,A,B,E] of the blocks anchored at `anchors`; column 0 is the anchor's own."""
    rows, width = token_ids.shape
    size = drafter.config.block_size
    ctx_at = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))
    keys, values = drafter.absorb(params, features, ctx_at)
    anchor_ids = jnp.take_along_axis(token_ids, anchors, axis=1)
    noise_ids = jnp.pad(
        anchor_ids[:, :, None], ((0, 0), (0, 0), (0, size - 1)), constant_values=drafter.config.mask_token_id
    )
    noise = take_rows(embedding, noise_ids.reshape(-1, size)).astype(features.dtype)
    noise = noise * drafter.config.scales.input_embedding

    def attend(layer: int, q: Array, k: Array, v: Array, _: Any) -> tuple[Array, Any]:
        q, k, v = (x.reshape(rows, -1, *x.shape[2:]) for x in (q, k, v))  # the blocks of a text side by side
        out = packed_attention(q, k, v, keys[layer], values[layer], anchors)
        return out.reshape(-1, size, *out.shape[2:]), None

    hidden = drafter.forward(params, noise, block_positions(anchors.reshape(-1), size), attend, None)
    return hidden.reshape(*anchors.shape, size, -1)


def block_loss(
    drafter: DrafterFunctions,
    objective: Objective,
    params: Params,
    frozen: Frozen,
    features: Array,
    batch: Batch,
    subset: Subset | None,
    teacher: Teacher | None = None,
) -> tuple[Array, Measures]:
    """The objective over all blocks of a batch; with a selector its own is added, and the measures are of what it
    chooses. Every label must be in the subset."""
    hidden, logits = _block_logits(drafter, params, frozen, features, batch, subset)
    loss, measures = guess_loss(objective, logits, batch, subset, teacher)
    if drafter.edges is None:
        return loss, measures
    chosen, measures = _choice_loss(drafter, objective, params, hidden, logits, batch, subset, teacher)
    return loss + chosen, replace(measures, loss=loss + chosen)


def selector_loss(
    drafter: DrafterFunctions,
    objective: Objective,
    params: Params,
    frozen: Frozen,
    features: Array,
    batch: Batch,
    subset: Subset | None,
    teacher: Teacher | None = None,
) -> tuple[Array, Measures]:
    """The selector's part of `block_loss`, for a drafter whose other parameters stay."""
    hidden, logits = _block_logits(drafter, params, frozen, features, batch, subset)
    return _choice_loss(drafter, objective, params, hidden, logits, batch, subset, teacher)


def _block_logits(
    drafter: DrafterFunctions,
    params: Params,
    frozen: Frozen,
    features: Array,
    batch: Batch,
    subset: Subset | None,
) -> tuple[Array, Array]:
    """Normed hidden states [R,A,n,E] of the guesses, and their logits f32[R,A,n,S]."""
    assert frozen.head is not None
    hidden = block_hidden(drafter, params, frozen.embedding, features, batch.token_ids, batch.anchors)[:, :, 1:]
    head = frozen.head if subset is None else take_rows(frozen.head, subset.ids)
    logits = jnp.einsum("rabe,se->rabs", hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)
    return hidden, scale_logits(drafter.config.scales, logits)


def _choice_loss(
    drafter: DrafterFunctions,
    objective: Objective,
    params: Params,
    hidden: Array,
    logits: Array,
    batch: Batch,
    subset: Subset | None,
    teacher: Teacher | None,
) -> tuple[Array, Measures]:
    """The objective over each position's likeliest tokens, behind the right token before it (where a guess counts, all
    before it are right), and `stillness`."""
    labels, inside = labels_behind(batch, logits.shape[2])
    anchor_ids = jnp.take_along_axis(batch.token_ids, batch.anchors, axis=1)
    before = jnp.concatenate([anchor_ids[:, :, None], labels[:, :, :-1]], axis=2)
    ids, scores, edges = _candidates(drafter, params, hidden, logits, before, subset)
    behind = taught(objective, teacher, batch, logits.shape[2])
    placed = None if behind is None else replace(behind, ids=places_among(behind.ids, ids))
    right = places_among(labels[..., None], ids)[..., 0]
    loss, measures = placed_loss(objective, scores, right, inside, batch.used, placed)
    loss = loss + stillness(edges[:, :, 0], batch.used)
    return loss, replace(measures, loss=loss)


def _candidates(
    drafter: DrafterFunctions, params: Params, hidden: Array, logits: Array, before: Array, subset: Subset | None
) -> tuple[Array, Array, Array]:
    """Of each position's likeliest tokens the ids int32[R,A,n,C], the selector's scores f32[R,A,n,C], and the part of
    them that depends on the token before, int32[R,A,n]."""
    assert drafter.edges is not None and drafter.config.selector is not None
    count = min(drafter.config.selector.top_k, logits.shape[-1])
    _, near = best(jax.lax.stop_gradient(logits), count)
    ids = near if subset is None else subset.ids[near]
    blocks = (x.reshape(-1, *x.shape[2:]) for x in (hidden, before[..., None], ids))
    edges = drafter.edges(params, *blocks).reshape(ids.shape)
    return ids, jnp.take_along_axis(logits, near, axis=-1) + edges, edges


def places_among(wanted: Array, ids: Array) -> Array:
    """int32[...,N]: where each of `wanted` [...,N] stands in ids [...,C], ABSENT if nowhere."""
    same = wanted[..., :, None] == ids[..., None, :]
    return jnp.where(same.any(axis=-1), same.argmax(axis=-1), ABSENT)
