"""Facts of a compiled TPU program. Draft."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """Exchanges between chips of one kind. bytes: of their results, on each chip."""

    kind: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Facts:
    """x"""

    mosaic_calls: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    collectives: tuple[Collective, ...]
    large_copies: tuple[str, ...]
    host_transfers: tuple[str, ...]
    cycles: float
    loops_counted_once: int
    flops: float | None
    hbm_bytes: float | None

    def seconds(self, clock_hz: float) -> float:
        """x"""
        return self.cycles / clock_hz
