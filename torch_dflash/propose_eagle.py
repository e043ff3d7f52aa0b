"""The EAGLE-3 baseline: drafts one token after another, each in a pass of its own.

Letters: R rows, T tokens, K number of drafts, F tapped layers, D target hidden size, M pages per row.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bridge.attention import paged_attention
from bridge.context import append, make_context
from bridge.positions import block_positions
from bridge.views import lower
from torch_dflash.block import Guess
from torch_dflash.config import Eagle3Config
from torch_dflash.likeliest import greedy
from torch_dflash.models.eagle3 import Eagle3
from torch_dflash.propose import AllParams
from torch_dflash.state import Capacity, DecodeState, Eagle3State, empty_pool
from torch_dflash.verify import TargetFunctions


@dataclass(frozen=True)
class Eagle3Functions:
    """The head's methods as pure JAX functions f(params, ...)."""

    config: Eagle3Config
    fuse: Callable[..., Array]
    forward: Callable[..., tuple[Array, Array]]
    logits: Callable[..., Array]
    target_ids: Callable[..., Array]


def lower_eagle3(module: Eagle3, config: Eagle3Config) -> Eagle3Functions:
    """Lower a head; its parameters are arguments of the results."""
    return Eagle3Functions(config, *(lower(module, name) for name in ("fuse", "forward", "logits", "target_ids")))


@dataclass(frozen=True)
class Eagle3Drafts:
    """K autoregressive passes over paged K/V. The K/V of drafts lie behind the context, hidden by its length, and are
    overwritten by the next absorb. Drafts are the head's likeliest tokens at any temperature (see `DFlash`)."""

    head: Eagle3Functions
    target: TargetFunctions
    num_drafts: int
    lookahead: int = 1  # a position's K/V holds the token behind it

    @property
    def taps(self) -> tuple[int, ...]:
        return self.head.config.target_layer_ids

    def make_state(self, capacity: Capacity, dtype: Any) -> Eagle3State:
        block, rows = self.head.config.block, capacity.rows
        pool = empty_pool(block, 1, capacity, dtype, self.target.platform)
        context = make_context(rows, self.num_drafts + 1, len(self.taps) * block.hidden_size, dtype)
        return Eagle3State(pool, context, jnp.zeros(rows, jnp.int32), jnp.zeros((rows, block.hidden_size), dtype))

    def prefill(
        self,
        params: AllParams,
        draft: Eagle3State,
        tables: Array,
        features: Array,
        next_ids: Array,
        start: Array,
        num_new: Array,
    ) -> Eagle3State:
        hidden = self.head.fuse(params["drafter"], features)
        out, pool = self._pass(params, next_ids, hidden, draft.pool, tables, start, num_new)
        column = jnp.clip(num_new - 1, 0, out.shape[1] - 1)
        last = jnp.take_along_axis(out, column[:, None, None], axis=1)[:, 0]
        last = jnp.where(num_new[:, None] > 0, last, draft.last)
        return replace(draft, pool=pool, draft_len=start + num_new, last=last)

    def resume(self, params: AllParams, state: DecodeState, tables: Array) -> Any:
        return state.draft

    @jax.named_scope("absorb")
    def absorb(self, params: AllParams, state: DecodeState, tables: Array) -> Eagle3State:
        draft: Any = state.draft
        features, start = draft.context.features[:, : self.num_drafts + 1], draft.draft_len
        behind = block_positions(start + 1, features.shape[1])
        next_ids = jnp.take_along_axis(state.history, jnp.minimum(behind, state.history.shape[1] - 1), axis=1)
        return self.prefill(params, draft, tables, features, next_ids, start, state.committed_len - start)

    @jax.named_scope("draft")
    def draft(self, params: AllParams, state: DecodeState, tables: Array, guess: Guess) -> tuple[Array, Eagle3State]:
        draft: Any = state.draft
        active, hidden, pool = (state.budget > 0).astype(jnp.int32), draft.last, draft.pool
        ids = [self._best(params, hidden)]
        for behind in range(self.num_drafts - 1):
            start = draft.draft_len + behind
            out, pool = self._pass(params, ids[-1][:, None], hidden[:, None], pool, tables, start, active)
            hidden = out[:, 0]
            ids.append(self._best(params, hidden))
        return jnp.stack(ids, axis=1), replace(draft, pool=pool)

    def commit(self, draft: Eagle3State, features: Array, num_new: Array) -> Eagle3State:
        nothing = jnp.zeros_like(num_new)  # absorb has just emptied the buffer
        return replace(draft, context=append(draft.context, features, nothing, num_new))

    def _pass(
        self, params: AllParams, ids: Array, hidden: Array, pool: Array, tables: Array, start: Array, num_new: Array
    ) -> tuple[Array, Array]:
        """ids int32[R,T] and hidden [R,T,D] of positions start.. -> outputs [R,T,D], and the pool with their K/V."""

        def attend(layer: int, q: Array, k: Array, v: Array, pool: Array) -> tuple[Array, Array]:
            return paged_attention(q, k, v, pool, 0, tables, start, num_new, self.target.platform)

        embeds = self.target.embed(params["target"], ids)
        positions = block_positions(start, ids.shape[1])
        return self.head.forward(params["drafter"], embeds, hidden, positions, attend, pool)

    def _best(self, params: AllParams, hidden: Array) -> Array:
        """Outputs [R,D] -> the target's ids int32[R]."""
        best = greedy(self.head.logits(params["drafter"], hidden))
        return self.head.target_ids(params["drafter"], best)
