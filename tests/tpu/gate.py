"""What is demanded of a program compiled for TPU, as one function; and the programs of which it is demanded."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax

from bridge.platform import Platform
from torch_dflash.config import Convolution, DrafterConfig, Selector, TargetConfig
from torch_dflash.config_reader import read_drafter_config, read_target_config
from torch_dflash.decode import state_shapes
from torch_dflash.likeliest import group_size
from torch_dflash.pair import Pair
from torch_dflash.propose import DFlash, Proposer
from torch_dflash.tpu.chips import Chip, chip_named
from torch_dflash.tpu.compile import STEPS, platform_of
from torch_dflash.tpu.hlo import Facts, facts_of
from torch_dflash.tpu.programs import Workload, lower_decode, lower_prefill, shapes_only
from torch_dflash.tpu.shapes import drafter_folder, target_folder

PAIRS = {
    "Qwen3-4B": "Qwen3-4B-DFlash-b16",
    "Llama-3.1-8B": "LLaMA3.1-8B-Instruct-DFlash-UltraChat",
    "default": "default",
}
SECOND = "+DFlash2"
CONTEXT = 1024
PAGES = 512  # every pool is larger than a chip's own memory (VMEM): a small one XLA might fetch into it, all of it
MOST_TEMP = 256e6  # bytes; far below the weights, far above what a step's activations take


@dataclass(frozen=True)
class Case:
    """One program. kind: prefill, plain (one step), dflash (one step), loop (a DFlash dispatch of several steps)."""

    chip: str
    pair: str
    kind: str
    rows: int = 1
    tp: int = 1
    dp: int = 1
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"{self.chip}-{self.pair}-{self.kind}-R{self.rows}-tp{self.tp}-dp{self.dp}-{self.dtype}"

    @property
    def workload(self) -> Workload:
        return Workload(self.rows, CONTEXT, self.dp, PAGES * max(1, self.tp // 4))


def configs(pair: str) -> tuple[TargetConfig, DrafterConfig]:
    """Of a pair of `PAIRS`; with SECOND behind its name, what DFlash 2 has is added to its drafter."""
    if pair.endswith(SECOND):
        target, draft = configs(pair.removesuffix(SECOND))
        return target, replace(draft, selector=Selector(256, 16), convolution=Convolution(2, 64))
    return read_target_config(target_folder(pair)), read_drafter_config(drafter_folder(PAIRS[pair]))


def programs_for(case: Case, platform: Platform) -> tuple[Pair, Proposer]:
    pair = shapes_only(*configs(case.pair), case.dtype, platform)
    return pair, pair.proposer("plain" if case.kind == "plain" else "dflash", None)


def lowered(case: Case, pair: Pair, proposer: Proposer) -> Any:
    if case.kind == "prefill":
        return lower_prefill(pair, proposer, case.workload)
    return lower_decode(pair, proposer, case.workload, STEPS if case.kind == "loop" else 1)


def compiled(case: Case, platform: Platform | None = None) -> tuple[Facts, "Demands"]:
    """The facts of a program, and what they are held against."""
    platform = platform_of(chip_named(case.chip), case.dp, case.tp) if platform is None else platform
    pair, proposer = programs_for(case, platform)
    demands = demands_of(case, pair, proposer)
    program = lowered(case, pair, proposer).compile()
    return facts_of(program, large=min(demands.pools)), demands


@dataclass(frozen=True)
class Demands:
    """pools: bytes on one chip of each K/V pool. mosaic_calls: one for the target's layers, which are one traced layer;
    for the drafter one for each layer and each width of its context that may be read. all_reduces: most that run in a
    step; a selector takes the place of an argmax and may do without its two. selected: bytes that it may collect
    beside, the maxima of groups of logits and what it chooses among."""

    chip: Chip
    pools: tuple[int, ...]
    mosaic_calls: int
    all_reduces: int | None  # None: not counted
    selected: int = 0


def demands_of(case: Case, pair: Pair, proposer: Proposer) -> Demands:
    target, draft = configs(case.pair)
    state = state_shapes(pair.target, proposer, case.workload.capacity, pair.dtype)
    pools = [state.pool] if state.draft is None else [state.pool, state.draft.pool]
    drafting = isinstance(proposer, DFlash) and case.kind != "prefill"
    capacity = case.workload.capacity
    widths = pair.target.platform.page_widths(capacity.pages_per_row, capacity.page_size)
    calls = 1 + (len(draft.layers) * len(widths) if drafting else 0)
    # Two sums for each layer, one for an embedding, two for the argmax of each head, one for the drafter's fc.
    reduces = 2 * target.num_layers + 3 + (2 * len(draft.layers) + 4 if drafting else 0)
    counted = None if case.kind == "prefill" or case.dp > 1 else reduces if case.tp > 1 else 0
    selected = 0
    if drafting and draft.selector is not None and case.tp > 1:
        groups = target.vocab_size // group_size(target.vocab_size, case.tp)
        selected = 3 * case.rows * (draft.block_size - 1) * groups * jax.numpy.dtype(case.dtype).itemsize
    return Demands(chip_named(case.chip), tuple(_own_bytes(pool) for pool in pools), calls, counted, selected)


def _own_bytes(shape: jax.ShapeDtypeStruct) -> int:
    """Of the part on one chip."""
    return int(functools.reduce(int.__mul__, shape.sharding.shard_shape(shape.shape), shape.dtype.itemsize))


def check(facts: Facts, demands: Demands) -> None:
    """Raises AssertionError, naming what is wrong."""
    pools = demands.pools
    assert facts.mosaic_calls == demands.mosaic_calls, f"{facts.mosaic_calls} Mosaic calls, not {demands.mosaic_calls}"
    assert facts.alias_bytes >= sum(pools), f"only {facts.alias_bytes} bytes are aliased, the pools are {sum(pools)}"
    copies = [found for found in facts.large_copies if found.bytes in pools]
    assert not copies, f"a pool is copied: {copies}"
    assert facts.temp_bytes <= MOST_TEMP, f"{facts.temp_bytes} bytes of scratch"
    held = facts.argument_bytes + facts.output_bytes - facts.alias_bytes + facts.temp_bytes
    assert held <= demands.chip.hbm_bytes, f"{held} bytes do not fit in HBM"
    assert not facts.host_transfers, f"the host is asked: {facts.host_transfers}"
    if demands.all_reduces is not None:
        runs = {collective.kind: collective.runs for collective in facts.collectives}
        expected = {"all-reduce": demands.all_reduces} if demands.all_reduces else {}
        others = sum(collective.bytes for collective in facts.collectives if collective.kind not in expected)
        assert others <= demands.selected, f"exchanges between chips: {runs}, {others} bytes, not {expected}"
        spared = demands.all_reduces - runs.get("all-reduce", 0)
        assert 0 <= spared <= (2 if demands.selected else 0), f"exchanges between chips: {runs}, not {expected}"
