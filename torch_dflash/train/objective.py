"""What is minimised: cross-entropy of guesses behind anchors, weighted by their positions. See `loss.py` and
`eagle_loss.py` for whose guesses they are.

Letters: R rows, T padded length, A anchors, n guesses behind each, V vocabulary, S subset of it, N teacher's tokens a
position, E hidden size, P places.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bridge.jnp_attention import HIDDEN
from bridge.views import Params
from torch_dflash.train.batches import Batch

ABSENT = -1
SMOOTHING = 0.5  # alpha of arXiv:2605.18810


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Frozen:
    """What training reads and never changes. Of the target embedding and head [V,E]; one array when they are tied. The
    head is None where the drafter has its own. drafter: those of its parameters that are not trained."""

    embedding: Array
    head: Array | None
    drafter: Params = field(default_factory=dict)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Subset:
    """The part of the vocabulary that the loss runs over: ids int32[S], and index int32[V], the place of each id in
    it, ABSENT for those that are not.

    A label that is not among the ids is no part of the loss, and counts as a wrong guess in the measures. `None` in
    its place means the whole vocabulary.
    """

    ids: Array
    index: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Teacher:
    """The target's own distribution behind each token of the texts: its N likeliest tokens, likeliest first."""

    ids: Array  # int32[R,T,N]; [r,t] are guesses of token t + 1
    log_probs: Array  # float32[R,T,N], of the whole vocabulary: their exponentials add up to less than 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Measures:
    """Of one batch, as if each of its anchors were one decoding step.

    tau: tokens that a step would keep. accuracy [n]: share of right guesses at k = 1..n inside the texts; of a selector
    with the right token before each, so that it says more than of a drafter without.
    acceptance [n]: share of the steps in which guess k and all before it are right, so it falls with k.
    """

    loss: Array
    tau: Array
    accuracy: Array
    acceptance: Array


# f(params, frozen, features [R,T,X], batch, subset, teacher) -> the loss to be minimised, and what it came to
Loss = Callable[[Any, Frozen, Array, Batch, Subset | None, Teacher | None], tuple[Array, Measures]]


@dataclass(frozen=True)
class Objective:
    """What is minimised: cross-entropy, weighted over the guesses k = 1..n behind an anchor.

    weights: "exponential", exp(-(k-1)/gamma) (arXiv:2602.06036), or "dynamic" (arXiv:2605.18810, see
    `dynamic_weights`). distill: share of the cross-entropy that is taken against the teacher's likeliest tokens instead
    of the hard token; 0 needs no teacher.
    """

    weights: str
    gamma: float
    distill: float = 0.0


def labels_behind(batch: Batch, count: int) -> tuple[Array, Array]:
    """What positions anchor+1..anchor+count hold: labels int32[R,A,count], and which of them are inside the text."""
    at = batch.anchors[:, :, None] + jnp.arange(1, count + 1)
    inside = (at < batch.lengths[:, None, None]) & batch.used[:, :, None]
    rows, width = batch.token_ids.shape
    at = jnp.minimum(at, width - 1)
    labels = jnp.take_along_axis(batch.token_ids, at.reshape(rows, -1), axis=1).reshape(at.shape)
    return labels, inside


def teacher_behind(teacher: Teacher, batch: Batch, count: int) -> Teacher:
    """The teacher's guesses of positions anchor+1..anchor+count: [R,A,count,N]. Meaningless outside the text."""
    rows, width = batch.token_ids.shape
    at = jnp.minimum(batch.anchors[:, :, None] + jnp.arange(count), width - 1)

    def take(held: Array) -> Array:
        return jnp.take_along_axis(held, at.reshape(rows, -1, 1), axis=1).reshape(*at.shape, -1)

    return Teacher(take(teacher.ids), take(teacher.log_probs))


def dynamic_weights(right: Array, inside: Array) -> Array:
    """D-PACE (arXiv:2605.18810, equations 7 and 8): what a position's log-probability is worth to the accepted length.

    right [...,n]: the drafter's probability of the right token at k = 1..n; inside: which of them are in the text.
    With q = (1 - alpha) right + alpha, the weight of k is the sum over m = k..n of q_1 ... q_m. Constants: no
    gradient flows through them. Example: right all 1, all inside -> n, ..., 2, 1.
    """
    smoothed = (1 - SMOOTHING) * jax.lax.stop_gradient(right) + SMOOTHING
    reached = jnp.cumprod(smoothed, axis=-1) * inside
    return jnp.flip(jnp.cumsum(jnp.flip(reached, -1), axis=-1), -1) * inside


def position_weights(objective: Objective, right: Array, counted: Array, used: Array) -> tuple[Array, Array]:
    """Weights [R,A,n] of the positions, and what the weighted sum is divided by: with exponential weights their sum,
    with dynamic ones the number of anchors, since there the sum has a meaning of its own.

    right [R,A,n]: the drafter's probability of the right token. counted: which positions have a label.
    """
    if objective.weights == "dynamic":
        return dynamic_weights(right, counted), jnp.maximum(used.sum(), 1)
    assert objective.weights == "exponential"
    weights = counted * jnp.exp(-jnp.arange(right.shape[-1]) / objective.gamma)
    return weights, jnp.maximum(weights.sum(), 1e-6)


def guess_loss(
    objective: Objective, logits: Array, batch: Batch, subset: Subset | None, teacher: Teacher | None
) -> tuple[Array, Measures]:
    """The objective for float32 logits [R,A,n,S] of the tokens behind the anchors. A teacher is needed when it
    distills."""
    labels, inside = labels_behind(batch, logits.shape[2])

    def place(ids: Array) -> Array:
        return ids if subset is None else subset.index[ids]

    behind = taught(objective, teacher, batch, logits.shape[2])
    placed = None if behind is None else replace(behind, ids=place(behind.ids))
    return placed_loss(objective, logits, place(labels), inside, batch.used, placed)


def taught(objective: Objective, teacher: Teacher | None, batch: Batch, count: int) -> Teacher | None:
    """`teacher_behind` where the objective distills, else None."""
    if not objective.distill:
        return None
    assert teacher is not None, "distillation needs a teacher"
    return teacher_behind(teacher, batch, count)


def placed_loss(
    objective: Objective, logits: Array, places: Array, inside: Array, used: Array, teacher: Teacher | None
) -> tuple[Array, Measures]:
    """The objective for float32 logits [R,A,n,P], of which places int32[R,A,n] are right, ABSENT where none is. inside
    bool[R,A,n], used bool[R,A]: which count. teacher: [R,A,n,N], places too."""
    known = places != ABSENT
    total = jax.nn.logsumexp(logits, axis=-1)
    hard = total - jnp.take_along_axis(logits, jnp.maximum(places, 0)[..., None], axis=-1)[..., 0]
    loss = hard
    if teacher is not None:
        loss = (1 - objective.distill) * hard + objective.distill * _soft_loss(logits, hard, total, teacher)
    weights, divisor = position_weights(objective, jnp.exp(-hard) * known, inside & known, used)
    mean = (loss * weights).sum() / divisor
    return mean, _measures(mean, logits.argmax(axis=-1) == places, inside, used)


def _soft_loss(logits: Array, hard: Array, total: Array, teacher: Teacher) -> Array:
    """[R,A,n]: cross-entropy against the teacher's tokens that have a place, their shares scaled to 1; the hard
    token's where none has."""
    at = teacher.ids
    share = jax.nn.softmax(jnp.where(at == ABSENT, HIDDEN, teacher.log_probs), axis=-1)
    expected = (share * jnp.take_along_axis(logits, jnp.maximum(at, 0), axis=-1)).sum(axis=-1)
    return jnp.where((at == ABSENT).all(axis=-1), hard, total - expected)


def _measures(loss: Array, right: Array, inside: Array, used: Array) -> Measures:
    right = right & inside
    accepted = jnp.cumprod(right.astype(jnp.int32), axis=-1) * used[..., None]
    acceptance = accepted.sum(axis=(0, 1)) / jnp.maximum(used.sum(), 1)
    accuracy = right.sum(axis=(0, 1)) / jnp.maximum(inside.sum(axis=(0, 1)), 1)
    return Measures(loss, 1 + acceptance.sum(), accuracy, acceptance)
