"""What lives on the device between steps: one frozen pytree, donated to every dispatch.

Letters: R rows, L target layers, P pages of one layer, S page_size, K key/value heads, d head_dim, B block_size.
"""

from dataclasses import dataclass

import jax
from jax import Array

from bridge.context import ContextBuffer
from bridge.draft_cache import DraftCache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftState:
    """What the drafter holds of each row.

    draft_len: leading positions whose context K/V is in `cache`; <= committed_len, equal to it right after absorb.
    context: features of positions draft_len..committed_len-1.
    """

    cache: DraftCache
    context: ContextBuffer
    draft_len: Array  # int32[R]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """The whole decoding state.

    committed_len: leading tokens that the target has finally processed. Excludes the anchor. Only prefill and commit
        change it.
    anchor: newest emitted token, not yet processed by the target; its position is committed_len.
    budget: tokens that the row may still emit; 0 means finished or empty, and such a row changes nothing.
    draft: None when decoding plainly.
    """

    pool: Array  # [L*P, S, 2*K, d]
    committed_len: Array  # int32[R]
    anchor: Array  # int32[R]
    budget: Array  # int32[R]
    draft: DraftState | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Round:
    """What one step did, for the host and the trace. In a dispatch's result each field has a leading axis of rounds."""

    start: Array  # int32[R]  position of the anchor
    active: Array  # bool[R]
    draft_ids: Array  # int32[R,B-1], or fewer columns when fewer drafts are used
    target_ids: Array  # int32[R,B]
    num_accepted: Array  # int32[R]


@dataclass(frozen=True)
class Capacity:
    """The shapes of the decoding memory: rows, pages a row may hold, positions a page holds."""

    rows: int
    pages_per_row: int
    page_size: int

    @property
    def num_pages(self) -> int:
        """Pages of one layer, the NULL page included."""
        return 1 + self.rows * self.pages_per_row

    @property
    def slots_per_row(self) -> int:
        """Positions that fit in one row."""
        return self.pages_per_row * self.page_size
