"""What is asked for, checked, and what of a chip's memory it takes. The engine's rules (service.py): whole pages of 64
positions, a row for its context and one block more, the NULL page on top."""

import math
from dataclasses import dataclass

from bridge.positions import pages_for, power_of_two
from torch_dflash.config import DrafterConfig, TargetConfig
from torch_dflash.engine import PAGE_SIZE
from torch_dflash.errors import InputError, checked_integer
from torch_dflash.sharding import check_divides
from torch_dflash.tpu.chips import GIGA, Chip
from torch_dflash.tpu.roofline import drafter_parameters, feature_bytes, kv_bytes, target_parameters

MOST_ROWS = 2**16


@dataclass(frozen=True)
class Setup:
    """What the figures are for: `tp` chips, `rows` rows of `context` positions each, `tau` tokens kept from a step."""

    chip: Chip
    target: TargetConfig
    drafter: DrafterConfig
    tp: int
    rows: int
    context: int
    tau: float


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each chip. row: what one row more takes. What running programs need beside it is not counted."""

    target: float
    drafter: float
    pages: float
    draft_pages: float
    features: float
    row: float
    hbm: float

    @property
    def total(self) -> float:
        return self.target + self.drafter + self.pages + self.draft_pages + self.features

    @property
    def left(self) -> float:
        return self.hbm - self.total

    @property
    def more_rows(self) -> int:
        """Rows of the same context that would fit beside those planned."""
        return max(0, math.floor(self.left / self.row))


def check_setup(setup: Setup) -> None:
    """Raises InputError for numbers out of range and for a tp that does not divide the models' sizes. Whether it fits
    in memory: `plan_memory`."""
    checked_integer(setup.rows, "rows", 1, MOST_ROWS)
    limit = setup.target.context_limit
    checked_integer(setup.context, "context", 1, limit, "the target's limit")
    checked_integer(setup.tp, "tp", 1)
    setup.chip.topology(setup.tp)
    size = setup.drafter.block_size
    if not 1 <= setup.tau <= size:
        raise InputError(f"tau is {setup.tau:g}: use a number in 1..{size} (a step keeps at most a block of {size})")
    check_divides(setup.target, setup.drafter, setup.tp)


def plan_memory(setup: Setup) -> MemoryPlan:
    """Weights, K/V, draft context and features: what each chip holds. It shares all but what DFlash 2 adds. Raises
    InputError, with the numbers, if a chip does not hold it."""
    positions = min(setup.context + setup.drafter.block_size - 1, setup.target.context_limit)
    row_positions = pages_for(positions, PAGE_SIZE) * PAGE_SIZE
    slots = setup.rows * row_positions + PAGE_SIZE
    position = kv_bytes(setup.target.block, setup.target.num_layers, setup.tp) / setup.tp
    draft_position = kv_bytes(setup.drafter.block, len(setup.drafter.layers), setup.tp) / setup.tp
    features = power_of_two(setup.drafter.block_size) * feature_bytes(setup.drafter) / setup.tp
    plan = MemoryPlan(
        target=target_parameters(setup.target).bytes_of(setup.tp),
        drafter=drafter_parameters(setup.drafter).bytes_of(setup.tp),
        pages=slots * position,
        draft_pages=slots * draft_position,
        features=setup.rows * features,
        row=row_positions * (position + draft_position) + features,
        hbm=setup.chip.hbm_bytes,
    )
    if plan.left < 0:
        raise InputError(_does_not_fit(setup, plan))
    return plan


def _does_not_fit(setup: Setup, plan: MemoryPlan) -> str:
    weights = plan.target + plan.drafter
    shape = f"context {setup.context} x {setup.rows} row(s)"
    need = f"{plan.total / GIGA:.2f} GB on each of {setup.tp} chip(s)"
    parts = f"weights {weights / GIGA:.2f}, K/V and context {(plan.total - weights) / GIGA:.2f}"
    over = f"{-plan.left / GIGA:.2f} GB more than the {plan.hbm / GIGA:.2f} GB of a {setup.chip.name}"
    remedy = "raise tp or take a smaller model" if weights > plan.hbm else "lower context or rows, or raise tp"
    return f"{shape} need {need} ({parts}): {over}; {remedy}"
