"""Which answers and which anchors a training step sees: a pure function of (seed, step), so that runs resume.

Letters: R rows, T padded length, A anchors of one row.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax import Array

from torch_dflash.train.records import Answer

LENGTH_STEP = 128  # lengths are padded to multiples of it: one compilation each


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """One step's data without the features."""

    token_ids: Array  # int32[R,T], zeros behind the end
    lengths: Array  # int32[R]
    anchors: Array  # int32[R,A] positions of the anchors
    used: Array  # bool[R,A]; False: the row has fewer anchors, this one is padding


@dataclass(frozen=True)
class BatchPlan:
    """rows: answers a step. anchors: blocks drawn from each. max_tokens: longer texts are cut."""

    rows: int = 16
    anchors: int = 16
    max_tokens: int = 512
    seed: int = 0


@dataclass(frozen=True)
class Data:
    """Answers as arrays. offsets: where each text's features begin in the store; both in the order of the answers."""

    token_ids: np.ndarray  # int32[N, max_tokens]
    lengths: np.ndarray  # int32[N]
    first_anchor: np.ndarray  # int32[N]
    offsets: np.ndarray  # int64[N]

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())


def make_data(answers: Sequence[Answer], max_tokens: int) -> Data:
    """Texts cut to max_tokens; those that leave no token to predict behind an anchor are dropped."""
    kept = [a for a in answers if a.first_anchor + 1 < min(len(a.token_ids), max_tokens)]
    token_ids = np.zeros((len(kept), max_tokens), np.int32)
    lengths = np.array([min(len(a.token_ids), max_tokens) for a in kept], np.int32)
    for row, answer in enumerate(kept):
        token_ids[row, : lengths[row]] = answer.token_ids[:max_tokens]
    offsets = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)]) if kept else np.zeros(0, np.int64)
    return Data(token_ids, lengths, np.array([a.first_anchor for a in kept], np.int32), offsets)


def padded_length(length: int, max_tokens: int) -> int:
    """Example: (130, 512) -> 256."""
    return min(-(-length // LENGTH_STEP) * LENGTH_STEP, max_tokens)


def generator(*words: int) -> np.random.Generator:
    """A random stream of its own for each tuple of integers."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))


class Order:
    """The batches of every epoch: similar lengths together, shuffled. What an epoch leaves over differs each time."""

    def __init__(self, data: Data, plan: BatchPlan) -> None:
        assert len(data.lengths) >= plan.rows, "fewer answers than rows of a batch"
        self.data = data
        self.plan = plan
        self.steps_per_epoch = len(data.lengths) // plan.rows
        self._epoch = functools.lru_cache(maxsize=2)(self._make_epoch)

    def rows_of(self, step: int) -> np.ndarray:
        """int[R]: which texts step `step` takes."""
        epoch, at = divmod(step, self.steps_per_epoch)
        return self._epoch(epoch)[at]

    def width_of(self, step: int) -> int:
        """T of a step."""
        return padded_length(int(self.data.lengths[self.rows_of(step)].max()), self.plan.max_tokens)

    def _make_epoch(self, epoch: int) -> np.ndarray:
        rng = generator(self.plan.seed, 1, epoch)
        shuffled = rng.permutation(len(self.data.lengths))
        shuffled = shuffled[: self.steps_per_epoch * self.plan.rows]
        buckets = -(-self.data.lengths[shuffled] // LENGTH_STEP)
        batches = shuffled[np.argsort(buckets, kind="stable")].reshape(-1, self.plan.rows)
        return batches[rng.permutation(len(batches))]

    def batch(self, step: int) -> tuple[Batch, np.ndarray]:
        """The step's batch and the feature offsets int64[R] of its texts."""
        rows = self.rows_of(step)
        lengths = self.data.lengths[rows]
        width = self.width_of(step)
        anchors, used = draw_anchors(
            self.data.first_anchor[rows], lengths, self.plan.anchors, generator(self.plan.seed, 2, step)
        )
        token_ids = self.data.token_ids[rows, :width]
        return Batch(token_ids, lengths, anchors, used), self.data.offsets[rows]


def draw_anchors(
    first: np.ndarray, lengths: np.ndarray, count: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """`count` different positions of first[r]..lengths[r]-2 for each row, ascending. Rows with fewer get padding.

    Returns anchors int32[R,A] and used bool[R,A].
    """
    width = max(int(lengths.max()), count)
    at = np.arange(width)
    allowed = (at >= first[:, None]) & (at <= lengths[:, None] - 2)
    keys = np.where(allowed, rng.random(allowed.shape), 2.0)
    anchors = np.sort(np.argsort(keys, axis=1)[:, :count], axis=1)
    return anchors.astype(np.int32), np.take_along_axis(allowed, anchors, axis=1)
