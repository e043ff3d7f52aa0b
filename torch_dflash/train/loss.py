"""DFlash's training loss: randomly anchored blocks, many of them packed behind one text.

Letters: R rows, T padded length, A anchors, B block_size, X feature width, E hidden size, H query heads, K key/value
heads, G = H / K, d head_dim.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bridge.jnp_attention import HIDDEN
from bridge.positions import block_positions
from bridge.views import Params, take_rows
from torch_dflash import block
from torch_dflash.block import DrafterFunctions
from torch_dflash.config import DrafterConfig
from torch_dflash.errors import InputError
from torch_dflash.models.drafter import Drafter
from torch_dflash.train.batches import Batch
from torch_dflash.train.objective import Candidates, Frozen, Measures, Objective, Teacher, guess_loss


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
    noise = take_rows(embedding, noise_ids.reshape(rows, -1)).astype(features.dtype)
    positions = block_positions(anchors.reshape(-1), size).reshape(rows, -1)

    def attend(layer: int, q: Array, k: Array, v: Array, _: Any) -> tuple[Array, Any]:
        return packed_attention(q, k, v, keys[layer], values[layer], anchors), None

    hidden = drafter.forward(params, noise, positions, attend, None)
    return hidden.reshape(*anchors.shape, size, -1)


def block_loss(
    drafter: DrafterFunctions,
    objective: Objective,
    params: Params,
    frozen: Frozen,
    features: Array,
    batch: Batch,
    candidates: Candidates | None,
    teacher: Teacher | None = None,
) -> tuple[Array, Measures]:
    """The objective over all blocks of a batch. Every label must be among the candidates."""
    assert frozen.head is not None
    hidden = block_hidden(drafter, params, frozen.embedding, features, batch.token_ids, batch.anchors)[:, :, 1:]
    head = frozen.head if candidates is None else take_rows(frozen.head, candidates.ids)
    logits = jnp.einsum("rabe,ce->rabc", hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)
    return guess_loss(objective, logits, batch, candidates, teacher)
