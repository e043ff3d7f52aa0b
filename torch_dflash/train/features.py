"""The target's features of whole texts, computed once and stored one text behind the other.

On disk: `features.npy`, a memory-mapped [tokens, X] array of bf16 bits (X = taps * hidden size; SmolLM2 with 4 taps:
4.6 KB a token, so 3,000 texts of 300 tokens are 4.2 GB), and `features.json`, which says how far it is. For
distillation `teacher_ids.npy` and `teacher_log_probs.npy` lie beside them, the target's N likeliest next tokens (64
bytes a token for N = 8). On an accelerator with room for them the same rows live in its memory instead, and nothing is
written.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array, lax
from tqdm import tqdm

from bridge.jnp_attention import HIDDEN
from bridge.positions import block_positions
from bridge.views import Params
from torch_dflash.errors import InputError
from torch_dflash.train.batches import Data, padded_length
from torch_dflash.train.checkpoint import write_atomically
from torch_dflash.train.loss import product_dtype
from torch_dflash.train.objective import Teacher
from torch_dflash.verify import TargetFunctions

BATCH_TOKENS = 4096


class FeatureStore(Protocol):
    """Where the features of all texts lie."""

    def gather(self, offsets: np.ndarray, width: int) -> Any:
        """[R,width,X] bf16: the rows offsets[r].. of each text. Rows behind a text's end are never looked at."""

    def teacher(self, offsets: np.ndarray, width: int) -> Teacher:
        """The same rows of the target's likeliest tokens, which must have been stored."""


@dataclass(frozen=True)
class MappedStore:
    """Features in a memory-mapped file."""

    rows: np.ndarray  # bf16 [tokens, X]
    likeliest: Teacher | None = None  # [tokens, N]

    def gather(self, offsets: np.ndarray, width: int) -> np.ndarray:
        at = np.minimum(offsets[:, None] + np.arange(width), len(self.rows) - 1)
        return self.rows[at]

    def teacher(self, offsets: np.ndarray, width: int) -> Teacher:
        at = np.minimum(offsets[:, None] + np.arange(width), len(self.rows) - 1)
        return jax.tree.map(lambda held: held[at], self.likeliest)


@dataclass(frozen=True)
class DeviceStore:
    """Features in the accelerator's memory."""

    rows: Array  # bf16 [tokens, X]
    likeliest: Teacher | None = None  # [tokens, N]

    def gather(self, offsets: np.ndarray, width: int) -> Array:
        return _take(self.rows, jnp.asarray(offsets, jnp.int32), width)

    def teacher(self, offsets: np.ndarray, width: int) -> Teacher:
        at = jnp.asarray(offsets, jnp.int32)
        return jax.tree.map(lambda held: _take(held, at, width), self.likeliest)


@jax.jit(static_argnames="width")
def _take(rows: Array, offsets: Array, width: int) -> Array:
    return rows[jnp.minimum(block_positions(offsets, width), rows.shape[0] - 1)]


def causal_attention(layer: Any, q: Array, key: Array, value: Array, cache: Any) -> tuple[Array, Any]:
    """Ordinary causal attention over right-padded texts, without a cache. q [R,T,H,d], key and value [R,T,K,d]."""
    rows, width, heads, head_dim = q.shape
    kv_heads, dtype = key.shape[2], product_dtype(q.dtype)
    query = q.reshape(rows, width, kv_heads, heads // kv_heads, head_dim).astype(dtype)
    scores = jnp.einsum("rqkgd,rtkd->rkgqt", query, key.astype(dtype), preferred_element_type=jnp.float32)
    scores = jnp.where(jnp.tri(width, dtype=bool), scores * head_dim**-0.5, HIDDEN)
    weights = jax.nn.softmax(scores, axis=-1).astype(dtype)
    out = jnp.einsum("rkgqt,rtkd->rqkgd", weights, value.astype(dtype), preferred_element_type=jnp.float32)
    return out.reshape(q.shape).astype(q.dtype), cache


Signals = tuple[Array, Teacher | None]  # features [...,X] and, where asked for, the target's likeliest tokens [...,N]


def signal_function(
    target: TargetFunctions, taps: tuple[int, ...], teacher_size: int = 0
) -> Callable[[Params, Array], Signals]:
    """f(params, token_ids int32[R,T]) -> features [R,T,X] and, for a teacher_size N > 0, the teacher [R,T,N]. What lies
    behind a text's end is meaningless."""

    def signals(params: Params, token_ids: Array) -> Signals:
        positions = block_positions(jnp.zeros(token_ids.shape[0], jnp.int32), token_ids.shape[1])
        hidden, features, _ = target.forward(params, token_ids, positions, taps, causal_attention, None)
        if not teacher_size:
            return features, None

        def likeliest(hidden: Array) -> Teacher:
            logits = target.logits(params, hidden).astype(jnp.float32)
            values, ids = lax.top_k(logits, teacher_size)
            return Teacher(ids, values - jax.nn.logsumexp(logits, axis=-1, keepdims=True))

        return features, lax.map(likeliest, hidden)  # text by text: all logits at once would not fit

    return jax.jit(signals)


def _batches(data: Data, batch_tokens: int) -> Iterator[np.ndarray]:
    """Consecutive texts, as many as fit in batch_tokens padded tokens at once."""
    rows: list[int] = []
    for row in range(len(data.lengths)):
        width = padded_length(int(data.lengths[[*rows, row]].max()), data.token_ids.shape[1])
        if rows and width * (len(rows) + 1) > batch_tokens:
            yield np.array(rows)
            rows = []
        rows.append(row)
    if rows:
        yield np.array(rows)


def _computed(
    data: Data, batch_tokens: int, compute: Callable[[Array], Signals], done: int
) -> Iterator[tuple[np.ndarray, Signals]]:
    """(texts, their signals [R,T,...]) for all texts from number `done` on; R and T are padded to few shapes."""
    with tqdm(total=data.num_tokens, desc="features", unit="token", unit_scale=True, mininterval=1) as bar:
        for rows in _batches(data, batch_tokens):
            if rows[-1] >= done:
                width = padded_length(int(data.lengths[rows].max()), data.token_ids.shape[1])
                token_ids = np.zeros((batch_tokens // width, width), np.int32)
                token_ids[: len(rows)] = data.token_ids[rows, :width]
                yield rows, compute(jnp.asarray(token_ids))
            bar.update(int(data.lengths[rows].sum()))


@dataclass(frozen=True)
class Progress:
    """What `features.json` holds. A cache of other texts, taps or teacher is refused, not used."""

    taps: tuple[int, ...]
    teacher_size: int
    num_texts: int
    num_tokens: int
    checksum: int
    texts_done: int


def cache_features(
    target: TargetFunctions, params: Params, taps: tuple[int, ...], data: Data, folder: Path, teacher_size: int = 0
) -> MappedStore:
    """Compute what the folder does not hold yet, with the target's `teacher_size` likeliest tokens beside the features.

    May be killed at any moment. Raises InputError for another run's folder.
    """
    size = len(taps) * target.config.block.hidden_size
    checksum = int(data.token_ids.sum(dtype=np.int64))
    wanted = Progress(taps, teacher_size, len(data.lengths), data.num_tokens, checksum, 0)
    done = _texts_done(folder / "features.json", wanted)
    files: dict[str, tuple[Any, int]] = {"features.npy": (np.uint16, size)}
    if teacher_size:
        files |= {"teacher_ids.npy": (np.int32, teacher_size), "teacher_log_probs.npy": (np.float32, teacher_size)}
    if not done or not all((folder / name).exists() for name in files):
        done = 0
        for name, (dtype, columns) in files.items():
            _reserve(folder / name, dtype, (data.num_tokens, columns))
    stored = [np.load(folder / name, mmap_mode="r+") for name in files]
    function = signal_function(target, taps, teacher_size)
    for rows, (features, teacher) in _computed(data, BATCH_TOKENS, lambda ids: function(params, ids), done):
        bits = lax.bitcast_convert_type(features.astype(jnp.bfloat16), jnp.uint16)
        for held, block in zip(stored, jax.tree.leaves((bits, teacher)), strict=True):
            _store(held, np.asarray(block), data, rows)
        progress = asdict(wanted) | {"texts_done": int(rows[-1]) + 1}
        write_atomically(folder / "features.json", json.dumps(progress).encode())
    return MappedStore(stored[0].view(ml_dtypes.bfloat16), Teacher(*stored[1:]) if teacher_size else None)


def _reserve(path: Path, dtype: Any, shape: tuple[int, int]) -> None:
    """An empty array on disk, whose blocks are taken at once where the system can: a full disk is an error here, not
    the end of the process when a page is written."""
    np.lib.format.open_memmap(path, "w+", dtype, shape).flush()
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _store(held: np.memmap, block: np.ndarray, data: Data, rows: np.ndarray) -> None:
    for at, row in enumerate(rows):
        held[data.offsets[row] :][: data.lengths[row]] = block[at, : data.lengths[row]]
    held.flush()


def _texts_done(path: Path, wanted: Progress) -> int:
    if not path.exists():
        return 0
    held = json.loads(path.read_text())
    done = int(held.pop("texts_done"))
    if held != {name: value for name, value in json.loads(json.dumps(asdict(wanted))).items() if name != "texts_done"}:
        raise InputError(f"{path}: holds features of other texts, taps or teacher; use a new folder")
    return done


def device_features(
    target: TargetFunctions, params: Params, taps: tuple[int, ...], data: Data, teacher_size: int = 0
) -> DeviceStore:
    """The same, into the memory of the accelerator."""
    function = signal_function(target, taps, teacher_size)
    size, tokens = len(taps) * target.config.block.hidden_size, data.num_tokens + BATCH_TOKENS * 8
    rows, likeliest = jnp.zeros((tokens, size), jnp.bfloat16), None
    if teacher_size:
        likeliest = Teacher(jnp.zeros((tokens, teacher_size), jnp.int32), jnp.zeros((tokens, teacher_size)))
    stored: Signals = (rows, likeliest)
    for some, (features, teacher) in _computed(data, BATCH_TOKENS * 8, lambda ids: function(params, ids), 0):
        at = np.full(features.shape[0], tokens - features.shape[1], np.int32)
        at[: len(some)] = data.offsets[some]
        stored = _put(stored, (features.astype(jnp.bfloat16), teacher), at)
    return DeviceStore(*stored)


@jax.jit(donate_argnums=0)
def _put(stored: Signals, block: Signals, offsets: Array) -> Signals:
    """Write texts one after the other: what one writes behind its end, the next overwrites."""

    def one(row: Any, stored: Signals) -> Signals:
        return jax.tree.map(lambda old, new: lax.dynamic_update_slice(old, new[row], (offsets[row], 0)), stored, block)

    return lax.fori_loop(0, offsets.shape[0], one, stored)
