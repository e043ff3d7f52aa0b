"""What lives on the device between steps: one frozen pytree, donated to every dispatch.

Letters: R rows, r rows of one dispatch, L target layers, P pages of one layer, S page_size, M pages per row, N = M*S
positions of a row, K key/value heads, d head_dim, B block_size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec as Spec

from bridge.attention import make_pool
from bridge.context import ContextBuffer
from bridge.platform import HEADS, POOL, ROWS, Platform
from torch_dflash.config import BlockConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftState:
    """What the drafter holds of each row.

    pool: context K/V in pages, addressed by the target's block tables; see bridge/draft_cache.py.
    draft_len: leading positions whose context K/V is in `pool`; <= committed_len, equal to it right after absorb.
    context: features of positions draft_len..committed_len-1.
    """

    pool: Array  # [drafter layers * P, S, 2*K, d]
    context: ContextBuffer
    draft_len: Array  # int32[R]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Eagle3State(DraftState):
    """What an EAGLE-3 head holds of each row: the same, and its output at position draft_len - 1, which knows the
    anchor."""

    last: Array  # [R,D]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """The whole decoding state. Pools belong to all rows, everything else has a row per row.

    committed_len: leading tokens that the target has finally processed. Excludes the anchor. Only prefill and commit
        change it.
    anchor: newest emitted token, not yet processed by the target; its position is committed_len.
    budget: tokens that the row may still emit; 0 means finished or empty, and such a row changes nothing.
    history: the row's token at each position up to the anchor's; what lies behind has no meaning.
    draft: None when decoding plainly.
    """

    pool: Array  # [L*P, S, 2*K, d]
    committed_len: Array  # int32[R]
    anchor: Array  # int32[R]
    budget: Array  # int32[R]
    history: Array  # int32[R,N]
    draft: DraftState | None


def place(shapes: DecodeState, platform: Platform) -> DecodeState:
    """A state of shapes, with where each array lives: pools by heads and rows' pages, everything else by rows, features
    also by their width, as the drafter's fc takes them."""

    def at(shape: Any, axes: Spec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=platform.sharding(*axes))

    placed = jax.tree.map(lambda shape: at(shape, ROWS), shapes)
    placed = replace(placed, pool=at(shapes.pool, POOL))
    if shapes.draft is None:
        return placed
    context = replace(placed.draft.context, features=at(shapes.draft.context.features, HEADS))
    return replace(placed, draft=replace(placed.draft, pool=at(shapes.draft.pool, POOL), context=context))


def take_rows(state: DecodeState, rows: Array) -> DecodeState:
    """The state of the rows `rows` int32[r], pools whole. A row number >= R gives an empty row."""
    return _map_rows(lambda part: part.at[rows].get(mode="fill", fill_value=0), state)


def put_rows(state: DecodeState, rows: Array, part: DecodeState) -> DecodeState:
    """`state` with the rows `rows` int32[r], and the pools, as they are in `part`. Row numbers >= R are dropped."""
    return _map_rows(lambda new, old: old.at[rows].set(new, mode="drop"), part, state)


def _map_rows(change: Any, first: DecodeState, *others: DecodeState) -> DecodeState:
    """`change` on every array but the pools; those are the first state's."""
    changed = jax.tree.map(change, *(_without_pools(state) for state in (first, *others)))
    if first.draft is None:
        return replace(changed, pool=first.pool)
    return replace(changed, pool=first.pool, draft=replace(changed.draft, pool=first.draft.pool))


def _without_pools(state: DecodeState) -> DecodeState:
    draft = None if state.draft is None else replace(state.draft, pool=None)
    return replace(state, pool=None, draft=draft)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chunk:
    """A piece of prompt on its way to the device.

    ids: the first num_new[i] of each row are real. budget: what the row may emit behind the token that follows the
    chunk; 0 before the last chunk.
    """

    ids: Array  # int32[r,T]
    num_new: Array  # int32[r]
    budget: Array  # int32[r]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Round:
    """What one step did, for the host and the trace. In a dispatch's result each field has a leading axis of rounds."""

    start: Array  # int32[r]  position of the anchor
    active: Array  # bool[r]
    draft_ids: Array  # int32[r,B-1], or fewer columns when fewer drafts are used
    target_ids: Array  # int32[r,B]
    logprobs: Array  # f32[r,B]  of target_ids under the target itself; zeros where no row asks for them
    num_accepted: Array  # int32[r]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Until:
    """When a dispatch ends: after `steps` rounds, or as soon as fewer than `active` rows still have a budget."""

    steps: int | Array
    active: int | Array


@dataclass(frozen=True)
class Capacity:
    """The shapes of the decoding memory.

    rows: requests at a time. pages_per_row: pages that one row may hold. page_size: positions that a page holds.
    num_pages: pages of one layer, the NULL page included, that all rows of a group share; fewer than `whole` makes
    requests wait. finer_by: see `buckets`. groups: of rows, as many as there are data-parallel devices.
    """

    rows: int
    pages_per_row: int
    page_size: int
    num_pages: int
    finer_by: int = 2
    groups: int = 1

    @classmethod
    def whole(cls, rows: int, pages_per_row: int, page_size: int, finer_by: int = 2, groups: int = 1) -> "Capacity":
        """Pages enough for every row at its longest; rows is rounded up to a multiple of groups."""
        size = -(-rows // groups)
        return cls(groups * size, pages_per_row, page_size, 1 + size * pages_per_row, finer_by, groups)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Numbers of rows that a dispatch may have: the powers of `finer_by` below `rows`, and `rows`, each group's
        number the same. More of them mean less padding when few rows are active, and each is a program to compile.
        Example: 6 -> (1, 2, 4, 6); 6 in two groups -> (2, 4, 6)."""
        powers = (self.groups * self.finer_by**n for n in range(self.rows.bit_length()))
        return (*(power for power in powers if power < self.rows), self.rows)

    def group_of(self, row: int) -> int:
        """Of the row R, which stands for none, the last."""
        return min(row * self.groups // self.rows, self.groups - 1)

    def columns(self, active: Sequence[int]) -> list[int]:
        """The rows of a dispatch for these active ones: a group's side by side, filled up to a bucket with R, which
        stands for none.  Example: rows 0, 3, 5 of 6 -> [0, 3, 5, 6]; in two groups -> [0, 6, 3, 5]."""
        members = [[row for row in active if self.group_of(row) == group] for group in range(self.groups)]
        least = self.groups * max(len(rows) for rows in members)
        width = next(rows for rows in self.buckets if rows >= least) // self.groups
        return [row for rows in members for row in (*rows, *[self.rows] * (width - len(rows)))]

    @property
    def slots_per_row(self) -> int:
        """Positions that fit in one row."""
        return self.pages_per_row * self.page_size


def empty_pool(block: BlockConfig, num_layers: int, capacity: Capacity, dtype: Any, platform: Platform) -> Array:
    """A K/V pool for so many layers of this shape."""
    pages = capacity.num_pages, capacity.page_size
    return make_pool(num_layers, *pages, block.num_kv_heads, block.head_dim, dtype, platform)
