"""The training loss: cross-entropy over randomly anchored blocks, many of them packed behind one text.

Letters: R rows, T padded length, A anchors, B block_size, X feature width, E hidden size, H query heads, K key/value
heads, G = H / K, d head_dim, V vocabulary, C candidates, N teacher's tokens a position.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bridge.jnp_attention import HIDDEN
from bridge.positions import block_positions
from bridge.views import Params, take_rows
from torch_dflash import propose
from torch_dflash.config import DrafterConfig
from torch_dflash.errors import InputError
from torch_dflash.models.drafter import Drafter
from torch_dflash.propose import DrafterFunctions
from torch_dflash.train.batches import Batch

ABSENT = -1
SMOOTHING = 0.5  # alpha of arXiv:2605.18810


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Frozen:
    """What training reads of the target and never changes: embedding and head [V,E]; one array when they are tied."""

    embedding: Array
    head: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Candidates:
    """The part of the vocabulary that the loss runs over: ids int32[C], and index int32[V], the place of each id in
    it, ABSENT for those that are not.

    Every label must be among the ids. `None` in its place means the whole vocabulary.
    """

    ids: Array
    index: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Teacher:
    """The target's own distribution behind each token of the texts: its N likeliest tokens, likeliest first."""

    ids: Array  # int32[R,T,N]; [r,t] are guesses of token t + 1
    log_probs: Array  # float32[R,T,N], of the whole vocabulary: their exponentials add up to less than 1


@dataclass(frozen=True)
class Objective:
    """What is minimised: cross-entropy, weighted over the positions k = 1..B-1 of a block.

    weights: "exponential", exp(-(k-1)/gamma) (arXiv:2602.06036), or "dynamic" (arXiv:2605.18810, see
    `dynamic_weights`). distill: share of the cross-entropy that is taken against the teacher's likeliest tokens instead
    of the hard token; 0 needs no teacher.
    """

    weights: str
    gamma: float
    distill: float = 0.0


def lower_drafter(module: Drafter, config: DrafterConfig) -> DrafterFunctions:
    """Lower a drafter for training. Its layers must see the whole context and, without causality, their own block.

    Raises InputError for one with a head of its own: the loss runs over the target's.
    """
    if config.draft_vocab_size is not None:
        reason = "a drafter with a head of its own cannot be trained"
        raise InputError(f"drafter draft_vocab_size is {config.draft_vocab_size}; {reason}, use one without")
    assert all(layer.window is None and not layer.causal for layer in config.layers), "only full attention is trained"
    return propose.lower_drafter(module, config)


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


def block_labels(batch: Batch, block_size: int) -> tuple[Array, Array]:
    """What positions anchor+1..anchor+B-1 hold: labels int32[R,A,B-1], and which of them are inside the text."""
    at = batch.anchors[:, :, None] + jnp.arange(1, block_size)
    inside = (at < batch.lengths[:, None, None]) & batch.used[:, :, None]
    rows, width = batch.token_ids.shape
    at = jnp.minimum(at, width - 1)
    labels = jnp.take_along_axis(batch.token_ids, at.reshape(rows, -1), axis=1).reshape(at.shape)
    return labels, inside


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Measures:
    """Of one batch, as if each of its anchors were one decoding step.

    tau: tokens that a step would keep. accuracy [B-1]: share of right guesses at k = 1..B-1 inside the texts.
    acceptance [B-1]: share of the steps in which guess k and all before it are right, so it falls with k.
    """

    loss: Array
    tau: Array
    accuracy: Array
    acceptance: Array


def block_teacher(teacher: Teacher, batch: Batch, block_size: int) -> Teacher:
    """The teacher's guesses of positions anchor+1..anchor+B-1: [R,A,B-1,N]. Meaningless outside the text."""
    rows, width = batch.token_ids.shape
    at = jnp.minimum(batch.anchors[:, :, None] + jnp.arange(block_size - 1), width - 1)

    def take(held: Array) -> Array:
        return jnp.take_along_axis(held, at.reshape(rows, -1, 1), axis=1).reshape(*at.shape, -1)

    return Teacher(take(teacher.ids), take(teacher.log_probs))


def dynamic_weights(right: Array, inside: Array) -> Array:
    """D-PACE (arXiv:2605.18810, equations 7 and 8): what a position's log-probability is worth to the accepted length.

    right [...,B-1]: the drafter's probability of the right token at k = 1..B-1; inside: which of them are in the text.
    With q = (1 - alpha) right + alpha, the weight of k is the sum over m = k..B-1 of q_1 ... q_m. Constants: no
    gradient flows through them. Example: right all 1, all inside -> B-1, ..., 2, 1.
    """
    smoothed = (1 - SMOOTHING) * jax.lax.stop_gradient(right) + SMOOTHING
    reached = jnp.cumprod(smoothed, axis=-1) * inside
    return jnp.flip(jnp.cumsum(jnp.flip(reached, -1), axis=-1), -1) * inside


def position_weights(objective: Objective, hard: Array, inside: Array, used: Array) -> tuple[Array, Array]:
    """Weights [R,A,B-1] of the positions, and what the weighted sum is divided by: with exponential weights their sum,
    with dynamic ones the number of blocks, since there the sum has a meaning of its own.

    hard [R,A,B-1]: -log of the drafter's probability of the right token.
    """
    if objective.weights == "dynamic":
        return dynamic_weights(jnp.exp(-hard), inside), jnp.maximum(used.sum(), 1)
    assert objective.weights == "exponential"
    weights = inside * jnp.exp(-jnp.arange(hard.shape[-1]) / objective.gamma)
    return weights, jnp.maximum(weights.sum(), 1e-6)


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
    """The objective over all blocks of a batch. A teacher is needed when it distills."""
    size = drafter.config.block_size
    hidden = block_hidden(drafter, params, frozen.embedding, features, batch.token_ids, batch.anchors)[:, :, 1:]
    labels, inside = block_labels(batch, size)
    head = frozen.head if candidates is None else take_rows(frozen.head, candidates.ids)
    labels = labels if candidates is None else candidates.index[labels]
    logits = jnp.einsum("rabe,ce->rabc", hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)
    total = jax.nn.logsumexp(logits, axis=-1)
    hard = total - jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    loss = hard
    if objective.distill:
        assert teacher is not None, "distillation needs a teacher"
        soft = _soft_loss(logits, hard, total, block_teacher(teacher, batch, size), candidates)
        loss = (1 - objective.distill) * hard + objective.distill * soft
    weights, divisor = position_weights(objective, hard, inside, batch.used)
    mean = (loss * weights).sum() / divisor
    return mean, _measures(mean, logits.argmax(axis=-1) == labels, inside, batch.used)


def _soft_loss(logits: Array, hard: Array, total: Array, teacher: Teacher, candidates: Candidates | None) -> Array:
    """[R,A,B-1]: cross-entropy against the teacher's tokens that are among the candidates, their shares scaled to 1;
    the hard token's where none is."""
    at = teacher.ids if candidates is None else candidates.index[teacher.ids]
    share = jax.nn.softmax(jnp.where(at == ABSENT, HIDDEN, teacher.log_probs), axis=-1)
    expected = (share * jnp.take_along_axis(logits, jnp.maximum(at, 0), axis=-1)).sum(axis=-1)
    return jnp.where((at == ABSENT).all(axis=-1), hard, total - expected)


def _measures(loss: Array, right: Array, inside: Array, used: Array) -> Measures:
    right = right & inside
    accepted = jnp.cumprod(right.astype(jnp.int32), axis=-1) * used[..., None]
    acceptance = accepted.sum(axis=(0, 1)) / jnp.maximum(used.sum(), 1)
    accuracy = right.sum(axis=(0, 1)) / jnp.maximum(inside.sum(axis=(0, 1)), 1)
    return Measures(loss, 1 + acceptance.sum(), accuracy, acceptance)
