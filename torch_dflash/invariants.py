"""What must hold between two dispatches. Checked by the tests, and by every engine when TORCH_DFLASH_DEBUG is 1."""

from typing import TYPE_CHECKING

import jax

if TYPE_CHECKING:
    from torch_dflash.engine import Engine


def check_invariants(engine: "Engine") -> None:
    """Compare host and device. Reads the whole state, so it is slow. Raises AssertionError."""
    state = jax.device_get(engine.state)
    engine.pages.check_integrity()
    assert not state.pool[:: engine.capacity.num_pages].any(), "a NULL page was written"
    if state.draft is not None:
        pending = state.committed_len - state.draft.draft_len
        assert ((pending >= 0) & (pending <= state.draft.context.features.shape[1])).all(), "the context buffer is off"
    for row, run in enumerate(engine.rows):
        left = 0 if run is None else run.request.max_new_tokens - len(run.token_ids)
        assert state.budget[row] == left, f"row {row}: budget"
        if run is not None:
            assert state.committed_len[row] == run.committed_len, (
                f"row {row}: committed_len is not the anchor's position"
            )
            assert state.anchor[row] == run.token_ids[-1], f"row {row}: anchor"
            block_end = run.committed_len + engine.proposer.num_drafts + 1
            assert block_end <= engine.capacity.slots_per_row, f"row {row}: the block does not fit"
