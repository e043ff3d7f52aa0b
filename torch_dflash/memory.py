"""What the engine's set-up takes of the device's memory, computed before it is allocated."""

import math
import os
from dataclasses import dataclass
from typing import Any

import jax

from torch_dflash.errors import InputError
from torch_dflash.state import Capacity, DecodeState

GB = 1e9


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device. weights: target and drafter. pages: the target's K/V. draft: the drafter's context K/V and
    features. other: lengths and histories. available: what the device has in all. What a running program needs
    beside them (activations, logits) is not counted."""

    weights: int
    pages: int
    draft: int
    other: int
    available: int

    @property
    def total(self) -> int:
        return self.weights + self.pages + self.draft + self.other


def plan_memory(params: Any, state: DecodeState) -> MemoryPlan:
    """Of parameters and a state, arrays or their shapes; nothing is allocated."""
    pages, draft, everything = _bytes(state.pool), _bytes(state.draft), _bytes(state)
    return MemoryPlan(_bytes(params), pages, draft, everything - pages - draft, device_memory())


def check_fits(plan: MemoryPlan, capacity: Capacity) -> str:
    """One line for the user. Raises InputError, with the numbers, if the device does not hold it."""
    parts = [("weights", plan.weights), ("target K/V", plan.pages), ("draft context", plan.draft)]
    listed = ", ".join(f"{name} {size / GB:.2f} GB" for name, size in parts if size)
    shape = f"{capacity.rows} row(s) of {capacity.slots_per_row} positions, {capacity.num_pages} pages"
    if plan.total > plan.available:
        has = f"the device has {plan.available / GB:.2f} GB"
        raise InputError(f"{shape} need {plan.total / GB:.2f} GB ({listed}), {has}: lower rows, pages or context")
    return f"memory for {shape}: {listed}"


def device_memory() -> int:
    """Bytes of the first device's memory; of the host's where JAX runs on the CPU."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _bytes(tree: Any) -> int:
    """On one device."""
    return sum(math.prod(part.sharding.shard_shape(part.shape)) * part.dtype.itemsize for part in jax.tree.leaves(tree))
