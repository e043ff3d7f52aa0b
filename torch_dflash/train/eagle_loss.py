"""EAGLE-3's training loss (arXiv:2503.01840, "training-time test"): the head is unrolled over its own outputs, as it
drafts, many anchors behind one text at a time.

Of the chain of an anchor, pass 0 is the head's pass over the text up to the anchor. Pass k reads, at position
anchor - 1 + k, the embedding of the token at anchor + k beside the output of pass k - 1, sees the text before the
anchor and the chain so far, and guesses the token at anchor + k + 1.

Letters: R rows, T padded length, A anchors, n passes, X feature width, D hidden size, H query heads, K key/value heads,
d head_dim, V vocabulary, V' rows of the head.
"""

import math

import jax.numpy as jnp
from jax import Array

from bridge.views import Params, take_rows
from torch_dflash.propose_eagle import Eagle3Functions
from torch_dflash.train.batches import Batch
from torch_dflash.train.features import causal_attention
from torch_dflash.train.loss import packed_attention
from torch_dflash.train.objective import (
    ABSENT,
    Frozen,
    Measures,
    Objective,
    Subset,
    Teacher,
    guess_loss,
    labels_behind,
)

GAMMA = 1 / math.log(1 / 0.8)  # the weights 0.8^i of EAGLE's public training code (github.com/SafeAILab/EAGLE)

Chain = tuple[Array, Array]  # keys and values [R,A,m,K,d] of passes 1..m


def chain_hidden(
    head: Eagle3Functions, params: Params, embedding: Array, features: Array, batch: Batch, num_passes: int
) -> Array:
    """Outputs [R,A,n,D] of the passes behind each anchor, whose texts are teacher-forced."""
    anchors, (rows, width) = batch.anchors, batch.token_ids.shape

    def embed(ids: Array) -> Array:
        return take_rows(embedding, ids).astype(features.dtype)

    def attend_text(layer: int, q: Array, k: Array, v: Array, _: None) -> tuple[Array, Chain]:
        return causal_attention(layer, q, k, v, None)[0], (k, v)

    def attend_chain(layer: int, q: Array, k: Array, v: Array, chain: Chain) -> tuple[Array, Chain]:
        new = (x[:, :, None] for x in (k, v))
        chain = tuple(jnp.concatenate([old, x], axis=2) for old, x in zip(chain, new, strict=True))
        keys, values = (x.reshape(rows, -1, *x.shape[3:]) for x in chain)
        return packed_attention(q, keys, values, text_keys, text_values, anchors), chain

    next_ids = jnp.roll(batch.token_ids, -1, axis=1)  # the last column's lies behind every anchor
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))
    fused = head.fuse(params, features)
    out, (text_keys, text_values) = head.forward(params, embed(next_ids), fused, positions, attend_text, None)
    before = jnp.maximum(anchors - 1, 0)
    hidden = [jnp.take_along_axis(out, before[:, :, None], axis=1)]
    drafted, _ = labels_behind(batch, num_passes)
    nothing = jnp.zeros((rows, anchors.shape[1], 0, *text_keys.shape[2:]), text_keys.dtype)
    chain = (nothing, nothing)
    for k in range(1, num_passes):
        at = (anchors - 1 + k).astype(jnp.int32)
        out, chain = head.forward(params, embed(drafted[:, :, k - 1]), hidden[-1], at, attend_chain, chain)
        hidden.append(out)
    return jnp.stack(hidden, axis=2)


def chain_loss(
    head: Eagle3Functions,
    objective: Objective,
    num_passes: int,
    params: Params,
    frozen: Frozen,
    features: Array,
    batch: Batch,
    subset: Subset | None,
    teacher: Teacher | None = None,
) -> tuple[Array, Measures]:
    """The objective over the chains of all anchors. Labels without a row in the head are left out.

    subset: None; the head has its own, in d2t.
    """
    assert subset is None, "the head's rows are the subset"
    hidden = chain_hidden(head, params, frozen.embedding, features, batch, num_passes)
    logits = head.logits(params, hidden).astype(jnp.float32)
    rows = rows_of_head(params["d2t"], frozen.embedding.shape[0])
    return guess_loss(objective, logits, batch, rows, teacher)


def rows_of_head(d2t: Array, vocab_size: int) -> Subset:
    """What the rows of a head stand for, d2t int32[V']."""
    rows = jnp.arange(len(d2t), dtype=jnp.int32)
    return Subset(rows + d2t, jnp.full(vocab_size, ABSENT, jnp.int32).at[rows + d2t].set(rows))
