"""What must hold between two dispatches. Checked by the tests, and by every engine when TORCH_DFLASH_DEBUG is 1."""

from typing import TYPE_CHECKING

import jax

from torch_dflash.state import DecodeState

if TYPE_CHECKING:
    from torch_dflash.engine import Engine
    from torch_dflash.requests import Run


def check_invariants(engine: "Engine") -> None:
    """Compare host and device. Reads the whole state, so it is slow. Raises AssertionError."""
    state = jax.device_get(engine.device.state)
    engine.pages.check_integrity()
    for pool in [state.pool] if state.draft is None else [state.pool, state.draft.pool]:
        assert not pool[:: engine.capacity.num_pages].any(), "a NULL page was written"
    for row, run in enumerate(engine.rows):
        if run is not None and run.decoding:
            _check_row(state, row, run)
            block_end = run.committed_len + engine.pace.proposers[0].num_drafts + 1
            held = (engine.pages.table([row]) != 0).sum() * engine.capacity.page_size
            limit = engine.pair.target.config.context_limit
            assert min(block_end, limit) <= held, f"row {row}: the block does not fit"


def _check_row(state: DecodeState, row: int, run: "Run") -> None:
    assert state.budget[row] == run.request.max_new_tokens - len(run.token_ids), f"row {row}: budget"
    assert state.committed_len[row] == run.committed_len, f"row {row}: committed_len is not the anchor's position"
    assert state.anchor[row] == run.token_ids[-1], f"row {row}: anchor"
    known = [*run.request.prompt_ids, *run.token_ids]
    assert state.history[row, : len(known)].tolist() == known, f"row {row}: history"
    if state.draft is not None:
        pending = state.committed_len[row] - state.draft.draft_len[row]
        assert 0 <= pending <= state.draft.context.features.shape[1], f"row {row}: the context buffer is off"
