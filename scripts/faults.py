"""A pytest plugin that plants one fault in the production code, named by TORCH_DFLASH_FAULT. See mutation_check.py.

These are faults that real implementations have had. Each replaces a production function by one that is wrong in one
way; the tests, which know nothing of it, must fail.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

import bridge.attention
from torch_dflash import decode, propose
from torch_dflash.accept import accept
from torch_dflash.engine import PREFILL_CHUNK
from torch_dflash.models.drafter import Drafter
from torch_dflash.propose import DFlash

FAULTS: dict[str, Callable[[], None]] = {}


def fault(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register what plants the fault `name`."""

    def register(plant: Callable[[], None]) -> Callable[[], None]:
        FAULTS[name] = plant
        return plant

    return register


def _committed(change: Callable[[Any, Any], Any]) -> None:
    """committed_len of active rows is change(committed_len, done) after every commit."""
    right = decode.commit

    def commit(proposer: Any, state: Any, done: Any, *rest: Any) -> Any:
        new = right(proposer, state, done, *rest)
        return replace(new, committed_len=jnp.where(done.active, change(new.committed_len, done), new.committed_len))

    decode.commit = commit


@fault("target pages one short")
def _() -> None:
    _committed(lambda length, done: length - 1)


@fault("target pages one too many")
def _() -> None:
    _committed(lambda length, done: length + 1)


@fault("target pages not rolled back")
def _() -> None:
    _committed(lambda length, done: done.start + done.target_ids.shape[1])


@fault("acceptance by count")
def _() -> None:
    def by_count(draft_ids: Any, target_ids: Any, num_new: Any) -> Any:
        count = (draft_ids == target_ids[:, :-1]).sum(axis=1, dtype=jnp.int32)
        return count, jnp.take_along_axis(target_ids, count[:, None], axis=1)[:, 0]

    decode.accept = by_count


@fault("bonus dropped on partial accept")
def _() -> None:
    def without(draft_ids: Any, target_ids: Any, num_new: Any) -> Any:
        count, _ = accept(draft_ids, target_ids, num_new)
        count = jnp.where((count > 0) & (count < draft_ids.shape[1]), count - 1, count)
        return count, jnp.take_along_axis(target_ids, count[:, None], axis=1)[:, 0]

    decode.accept = without


@fault("draft cache not cropped")
def _() -> None:
    """The block's slots stay part of the context."""
    right = propose.draft_attention

    def attend(q: Any, k: Any, v: Any, pool: Any, first: Any, tables: Any, draft_len: Any, *rules: Any) -> Any:
        pool = bridge.attention.write_pages(pool, k, v, first, tables, draft_len, jnp.full_like(draft_len, q.shape[1]))
        return right(q, k, v, pool, first, tables, draft_len + q.shape[1], *rules)

    propose.draft_attention = attend


@fault("features one short")
def _() -> None:
    right = propose.append
    propose.append = lambda buffer, features, pending, new: right(buffer, features, pending, jnp.maximum(new - 1, 0))


@fault("rejected features kept")
def _() -> None:
    """One more than was accepted."""
    append, absorb = propose.append, DFlash.absorb

    def append_all(buffer: Any, features: Any, pending: Any, new: Any) -> Any:
        return append(buffer, features, pending, jnp.where(new > 0, features.shape[1], 0))

    def absorb_more(self: Any, params: Any, state: Any, tables: Any) -> Any:
        kept = state.committed_len - state.draft.draft_len
        more = ((kept > 0) & (kept <= self.num_drafts)).astype(jnp.int32)
        return absorb(self, params, replace(state, committed_len=state.committed_len + more), tables)

    propose.append, DFlash.absorb = append_all, absorb_more


def _drafter(change: Callable[[Any], Any]) -> None:
    """The functions of every drafter that is lowered, changed."""
    import torch_dflash.pair as pair

    right = pair.lower_drafter
    pair.lower_drafter = lambda module, config: change(right(module, config))


@fault("context positions restart")
def _() -> None:
    def change(drafter: Any) -> Any:
        return replace(drafter, absorb=lambda p, features, at: drafter.absorb(p, features, at - at[:, :1]))

    _drafter(change)


@fault("noise positions off by one")
def _() -> None:
    def change(drafter: Any) -> Any:
        return replace(drafter, forward=lambda p, noise, at, *rest: drafter.forward(p, noise, at + 1, *rest))

    _drafter(change)


@fault("head slice shifted")
def _() -> None:
    def change(drafter: Any) -> Any:
        return replace(drafter, forward=lambda p, *rest: jnp.roll(drafter.forward(p, *rest), 1, axis=1))

    _drafter(change)


@fault("mask id 0")
def _() -> None:
    _drafter(lambda drafter: replace(drafter, config=replace(drafter.config, mask_token_id=0)))


@fault("tap off by one")
def _() -> None:
    def change(drafter: Any) -> Any:
        depth = drafter.config.num_target_layers
        taps = tuple((tap + 1) % depth for tap in drafter.config.target_layer_ids)
        return replace(drafter, config=replace(drafter.config, target_layer_ids=taps))

    _drafter(change)


@fault("block causal")
def _() -> None:
    right = propose.draft_attention
    propose.draft_attention = lambda *given: right(*given[:-3], True, *given[-2:])


@fault("hidden_norm skipped")
def _() -> None:
    right = Drafter.project

    def project(self: Drafter, features: Any) -> Any:
        lowered = features.device.type == "jax"  # the eager module, which is the oracle, stays right
        return self.fc(features) if lowered else right(self, features)

    Drafter.project = project


@fault("padding visible")
def _() -> None:
    """A mask that is added instead of hiding."""
    bridge.jnp_attention.HIDDEN = 0.0


@fault("only the last prompt chunk as context")
def _() -> None:
    right = DFlash.prefill

    def prefill(self: Any, params: Any, draft: Any, *rest: Any) -> Any:
        new, num_new = right(self, params, draft, *rest), rest[-1]
        more_to_come = (num_new == PREFILL_CHUNK).all()
        return replace(new, pool=jnp.where(more_to_come, draft.pool, new.pool))

    DFlash.prefill = prefill


def pytest_configure() -> None:
    """Plant the fault before any test is imported."""
    FAULTS[os.environ["TORCH_DFLASH_FAULT"]]()
