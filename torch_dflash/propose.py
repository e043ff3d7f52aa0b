"""Proposers: what stands between two verifications. `DFlash` drafts a block; `Plain` drafts nothing (the baseline).

Letters: R rows, T tokens, B block_size, K number of drafts used (<= B-1), F tapped layers, D target hidden size, M
pages per row.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from bridge.attention import draft_attention
from bridge.context import append, make_context
from bridge.draft_cache import write_context
from bridge.positions import block_positions
from bridge.views import Params
from torch_dflash.block import DrafterFunctions, Guess, draft_block
from torch_dflash.config import DrafterConfig
from torch_dflash.state import Capacity, DecodeState, DraftState, empty_pool
from torch_dflash.verify import TargetFunctions

AllParams = dict[str, Params]  # {"target": ..., "drafter": ...}


class Proposer(Protocol):
    """The seam between the step and a drafter."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs this proposer wants."""

    @property
    def num_drafts(self) -> int:
        """Drafts per step; a verification has num_drafts + 1 tokens."""

    @property
    def lookahead(self) -> int:
        """Tokens behind a position that its draft context depends on."""

    def make_state(self, capacity: Capacity, dtype: Any) -> DraftState | None:
        """Empty draft state for all rows and pages."""

    def prefill(
        self,
        params: AllParams,
        draft: Any,
        tables: Array,
        features: Array,
        next_ids: Array,
        start: Array,
        num_new: Array,
    ) -> Any:
        """Take the features [R,T,F*D] of a prompt chunk, and the token behind each of its positions int32[R,T]; block
        tables int32[R,M]."""

    def resume(self, params: AllParams, state: DecodeState, tables: Array) -> Any:
        """Draft state at the start of a dispatch: what a proposer with more drafts has left behind is taken up."""

    def absorb(self, params: AllParams, state: DecodeState, tables: Array) -> Any:
        """Draft state in which draft_len equals committed_len, after at most num_drafts + 1 new positions."""

    def draft(self, params: AllParams, state: DecodeState, tables: Array, guess: Guess) -> tuple[Array, Any]:
        """draft_ids int32[R,K], draft_ids[:, j] for position committed_len + j + 1; and the draft state."""

    def commit(self, draft: Any, features: Array, num_new: Array) -> Any:
        """Keep the features of the num_new[r] positions that verification has just committed."""


@dataclass(frozen=True)
class Plain:
    """No drafts: a step is one token of plain decoding, on the same target function, pages and sampler."""

    taps: tuple[int, ...] = ()
    num_drafts: int = 0
    lookahead: int = 0

    def make_state(self, capacity: Capacity, dtype: Any) -> None:
        return None

    def prefill(
        self,
        params: AllParams,
        draft: None,
        tables: Array,
        features: Array,
        next_ids: Array,
        start: Array,
        num_new: Array,
    ) -> None:
        return None

    def resume(self, params: AllParams, state: DecodeState, tables: Array) -> None:
        return None

    def absorb(self, params: AllParams, state: DecodeState, tables: Array) -> None:
        return None

    def draft(self, params: AllParams, state: DecodeState, tables: Array, guess: Guess) -> tuple[Array, None]:
        return jnp.zeros((state.anchor.shape[0], 0), jnp.int32), None

    def commit(self, draft: None, features: Array, num_new: Array) -> None:
        return None


@dataclass(frozen=True)
class DFlash:
    """Block diffusion: one non-causal pass over [anchor, mask, ...] proposes the whole block (arXiv:2602.06036).

    num_drafts: how many of its B-1 drafts are used. Proposers that differ in nothing else share one draft state.
    """

    drafter: DrafterFunctions
    target: TargetFunctions
    num_drafts: int
    lookahead: int = 0

    @property
    def config(self) -> DrafterConfig:
        """The drafter's."""
        return self.drafter.config

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    def make_state(self, capacity: Capacity, dtype: Any) -> DraftState:
        block, rows = self.config.block, capacity.rows
        pool = empty_pool(block, len(self.config.layers), capacity, dtype, self.target.platform)
        context = make_context(rows, self.config.block_size, len(self.taps) * block.hidden_size, dtype)
        return DraftState(pool, context, jnp.zeros(rows, jnp.int32))

    def prefill(
        self,
        params: AllParams,
        draft: DraftState,
        tables: Array,
        features: Array,
        next_ids: Array,
        start: Array,
        num_new: Array,
    ) -> DraftState:
        return self._take(params, draft, tables, features, start, num_new)

    def _take(
        self, params: AllParams, draft: DraftState, tables: Array, features: Array, start: Array, num_new: Array
    ) -> DraftState:
        """Context of num_new[r] positions from start[r] on into the draft cache."""
        keys, values = self.drafter.absorb(params["drafter"], features, block_positions(start, features.shape[1]))
        pool = write_context(draft.pool, keys, values, tables, start, num_new, self.target.platform)
        return replace(draft, pool=pool, draft_len=start + num_new)

    def resume(self, params: AllParams, state: DecodeState, tables: Array) -> DraftState:
        assert state.draft is not None
        most = self.config.block_size  # that a step can leave pending
        return state.draft if most <= self.num_drafts + 1 else self._absorb(params, state, tables, most)

    @jax.named_scope("absorb")
    def absorb(self, params: AllParams, state: DecodeState, tables: Array) -> DraftState:
        """Everything pending goes into the draft cache: nothing twice, nothing lost."""
        return self._absorb(params, state, tables, self.num_drafts + 1)

    def _absorb(self, params: AllParams, state: DecodeState, tables: Array, width: int) -> DraftState:
        """With at most `width` positions pending."""
        draft = state.draft
        assert draft is not None
        pending = state.committed_len - draft.draft_len
        return self._take(params, draft, tables, draft.context.features[:, :width], draft.draft_len, pending)

    @jax.named_scope("draft")
    def draft(self, params: AllParams, state: DecodeState, tables: Array, guess: Guess) -> tuple[Array, DraftState]:
        draft = state.draft
        assert draft is not None
        if self.num_drafts == 0:  # the context is kept up all the same, so that drafting can be taken up again
            return jnp.zeros((state.anchor.shape[0], 0), jnp.int32), draft
        own, target, attend = params["drafter"], params["target"], self._attend(draft, tables)
        start, num_drafts = draft.draft_len, self.num_drafts
        ids = draft_block(self.drafter, own, self.target, target, state.anchor, start, num_drafts, attend, guess)
        return ids, draft

    def _attend(self, draft: DraftState, tables: Array) -> Callable[..., Any]:
        platform = self.target.platform
        pages_per_layer = draft.pool.shape[0] // (platform.data * len(self.config.layers))

        def attend(layer: int, q: Array, k: Array, v: Array, _: Any) -> tuple[Array, Any]:
            sees, first, lengths = self.config.layers[layer], layer * pages_per_layer, draft.draft_len
            out = draft_attention(q, k, v, draft.pool, first, tables, lengths, sees.causal, sees.window, platform)
            return out, None

        return attend

    def commit(self, draft: DraftState, features: Array, num_new: Array) -> DraftState:
        nothing = jnp.zeros_like(num_new)  # absorb has just emptied the buffer
        return replace(draft, context=append(draft.context, features, nothing, num_new))
