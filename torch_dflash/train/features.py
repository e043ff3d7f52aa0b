"""The target's features of whole texts, computed once and stored one text behind the other.

On disk: `features.npy`, a memory-mapped [tokens, X] array of bf16 bits (X = taps * hidden size; SmolLM2 with 4 taps:
4.6 KB a token, so 3,000 texts of 300 tokens are 4.2 GB), and `features.json`, which says how far it is. On an
accelerator with room for them the same rows live in its memory instead, and nothing is written.
"""

import json
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

from bridge.attention import HIDDEN
from bridge.positions import block_positions
from bridge.views import Params
from torch_dflash.errors import InputError
from torch_dflash.train.batches import Data, padded_length
from torch_dflash.train.checkpoint import write_atomically
from torch_dflash.train.loss import product_dtype
from torch_dflash.verify import TargetFunctions

BATCH_TOKENS = 4096


class FeatureStore(Protocol):
    """Where the features of all texts lie."""

    def gather(self, offsets: np.ndarray, width: int) -> Any:
        """[R,width,X] bf16: the rows offsets[r].. of each text. Rows behind a text's end are never looked at."""


@dataclass(frozen=True)
class MappedStore:
    """Features in a memory-mapped file."""

    rows: np.ndarray  # bf16 [tokens, X]

    def gather(self, offsets: np.ndarray, width: int) -> np.ndarray:
        at = np.minimum(offsets[:, None] + np.arange(width), len(self.rows) - 1)
        return self.rows[at]


@dataclass(frozen=True)
class DeviceStore:
    """Features in the accelerator's memory."""

    rows: Array  # bf16 [tokens, X]

    def gather(self, offsets: np.ndarray, width: int) -> Array:
        return _take(self.rows, jnp.asarray(offsets, jnp.int32), width)


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


def feature_function(target: TargetFunctions, taps: tuple[int, ...]) -> Callable[[Params, Array], Array]:
    """f(params, token_ids int32[R,T]) -> features [R,T,X]; what lies behind a text's end is meaningless."""

    def features(params: Params, token_ids: Array) -> Array:
        positions = block_positions(jnp.zeros(token_ids.shape[0], jnp.int32), token_ids.shape[1])
        return target.forward(params, token_ids, positions, taps, causal_attention, None)[1]

    return jax.jit(features)


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
    data: Data, batch_tokens: int, compute: Callable[[Array], Array], done: int
) -> Iterator[tuple[np.ndarray, Array]]:
    """(texts, their features [R,T,X]) for all texts from number `done` on; R and T are padded to few shapes."""
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
    """What `features.json` holds. A cache of other texts or taps is refused, not used."""

    taps: tuple[int, ...]
    num_texts: int
    num_tokens: int
    checksum: int
    texts_done: int


def cache_features(
    target: TargetFunctions, params: Params, taps: tuple[int, ...], data: Data, folder: Path
) -> MappedStore:
    """Compute what the folder does not hold yet. May be killed at any moment. InputError for another run's folder."""
    size = len(taps) * target.config.block.hidden_size
    wanted = Progress(taps, len(data.lengths), data.num_tokens, int(data.token_ids.sum(dtype=np.int64)), 0)
    path, done = folder / "features.npy", _texts_done(folder / "features.json", wanted)
    mode = "r+" if done and path.exists() else "w+"
    stored = np.lib.format.open_memmap(path, mode, np.uint16, (data.num_tokens, size))
    function = feature_function(target, taps)
    for rows, block in _computed(data, BATCH_TOKENS, lambda ids: function(params, ids), done if mode == "r+" else 0):
        bits = np.asarray(lax.bitcast_convert_type(block.astype(jnp.bfloat16), jnp.uint16))
        for at, row in enumerate(rows):
            stored[data.offsets[row] :][: data.lengths[row]] = bits[at, : data.lengths[row]]
        stored.flush()
        progress = asdict(wanted) | {"texts_done": int(rows[-1]) + 1}
        write_atomically(folder / "features.json", json.dumps(progress).encode())
    return MappedStore(np.load(path, mmap_mode="r").view(ml_dtypes.bfloat16))


def _texts_done(path: Path, wanted: Progress) -> int:
    if not path.exists():
        return 0
    held = json.loads(path.read_text())
    done = int(held.pop("texts_done"))
    if held != {name: value for name, value in json.loads(json.dumps(asdict(wanted))).items() if name != "texts_done"}:
        raise InputError(f"{path}: holds features of other texts or taps; use a new folder")
    return done


def device_features(target: TargetFunctions, params: Params, taps: tuple[int, ...], data: Data) -> DeviceStore:
    """The same, into the memory of the accelerator."""
    function = feature_function(target, taps)
    size = len(taps) * target.config.block.hidden_size
    stored = jnp.zeros((data.num_tokens + BATCH_TOKENS * 8, size), jnp.bfloat16)
    for rows, block in _computed(data, BATCH_TOKENS * 8, lambda ids: function(params, ids), 0):
        at = np.full(block.shape[0], stored.shape[0] - block.shape[1], np.int32)
        at[: len(rows)] = data.offsets[rows]
        stored = _put(stored, block.astype(jnp.bfloat16), at)
    return DeviceStore(stored)


@jax.jit(donate_argnums=0)
def _put(stored: Array, block: Array, offsets: Array) -> Array:
    """Write texts one after the other: what one writes behind its end, the next overwrites."""

    def one(row: Any, stored: Array) -> Array:
        return lax.dynamic_update_slice(stored, block[row], (offsets[row], 0))

    return lax.fori_loop(0, block.shape[0], one, stored)
