"""What is asked of the engine, and what has become of it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch_dflash.metrics import TraceEntry
from torch_dflash.options import Choice, Sampling
from torch_dflash.tokenizer import TextPieces


@dataclass(frozen=True)
class Request:
    """One prompt, how its tokens are chosen, and where to stop.

    max_new_tokens >= 1; stop_ids end the text and belong to it; stop_strings end it and are cut off, while the token
    that completes one is the last of the ids. `index` is the caller's name for it.
    """

    index: int
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    stop_strings: tuple[str, ...] = ()


@dataclass
class Run:
    """What has become of a request so far. Times are perf_counter seconds.

    choice: the request's, with the seed that is used. prefilled: prompt tokens that are in the pages. drafted: of each
    token, whether it came from an accepted draft. finish_reason: None while it waits or runs, then "stop", "length" or
    "cancelled".
    """

    request: Request
    choice: Choice
    pieces: TextPieces | None  # looks for stop strings
    begin: float = 0.0
    prefilled: int = 0
    token_ids: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    trace: list[TraceEntry] = field(default_factory=list)
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    finish_reason: str | None = None

    @property
    def decoding(self) -> bool:
        """The prompt is in the pages, and more tokens are wanted."""
        return self.finish_reason is None and self.prefilled == len(self.request.prompt_ids)

    @property
    def committed_len(self) -> int:
        """Positions the target has processed, as the device counts them while the request decodes: all but the
        anchor."""
        return len(self.request.prompt_ids) + len(self.token_ids) - 1

    def take(self, ids: Sequence[int], logprobs: Sequence[float]) -> list[int]:
        """Append what a step emitted, accepted drafts and one token of the target's own, up to the first stop or the
        budget. Returns what was kept."""
        kept: list[int] = []
        while self.finish_reason is None and len(kept) < len(ids):
            kept.append(ids[len(kept)])
            self.finish_reason = self._reason(kept)
        self.token_ids += kept
        self.logprobs += logprobs[: len(kept)]
        self.drafted += [i < len(ids) - 1 for i in range(len(kept))]
        self.last_token_at = time.perf_counter()
        self.first_token_at = self.first_token_at or self.last_token_at
        return kept

    def _reason(self, kept: list[int]) -> str | None:
        """Why the newest token is the last one, if it is."""
        if self.pieces is not None:
            self.pieces.feed(kept[-1:])
        if kept[-1] in self.request.stop_ids or (self.pieces is not None and self.pieces.stopped):
            return "stop"
        return "length" if len(self.token_ids) + len(kept) == self.request.max_new_tokens else None


def positions_needed(request: Request, num_drafts: int, context_limit: int) -> int:
    """Positions that a request may write: the last round's anchor is the last token but one, its drafts lie behind, and
    nothing lies behind the context limit."""
    return min(len(request.prompt_ids) + request.max_new_tokens + num_drafts, context_limit)
