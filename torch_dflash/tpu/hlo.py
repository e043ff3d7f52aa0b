"""Facts of a compiled TPU program, from its text and the compiler's memory analysis.

Estimates, all of them: cycles are the compiler's own guesses, added up; Mosaic (Pallas) calls carry none and count
nothing. A loop counts as often as it runs where that can be read off: a known trip count, or a counter that is compared
with a constant (jax.lax.scan; it starts at 0 and takes steps of 1). Any other loop counts once, so that of N steps of
decoding one is seen. Of branches the one with most cycles counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch_dflash.tpu.hlo_text import Computation, Instruction, Module, parse
from torch_dflash.tpu.hlo_traffic import is_mosaic, results, traffic_of

LARGE = 2**24
COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
_BRANCHES = ("branch_computations", "true_computation", "false_computation")
_HOST_SPACE = 5
_NO_MOVES = ("parameter", "get-tuple-element", "tuple", "bitcast")
_HOST_OPCODES = ("outfeed", "infeed")
_HOST_CALLS = ("callback", "MoveToHost", "MoveToDevice", "annotate_device_placement")


@dataclass(frozen=True)
class Collective:
    """Exchanges between chips of one kind. count: in the text. runs: how often they run. bytes: of their results on one
    chip, over all runs."""

    kind: str
    count: int
    runs: int
    bytes: int


@dataclass(frozen=True)
class Found:
    """An instruction that should perhaps not be there. bytes: that it moves."""

    name: str
    opcode: str
    bytes: int
    in_loop: bool


@dataclass(frozen=True)
class Facts:
    """Of one program on one chip.

    mosaic_calls: in the text; silent ones do not say how many bytes they move. argument, output, alias and temp bytes:
        the compiler's memory analysis; alias is what donated arguments share with results.
    large_copies: what writes at least a given size of HBM at once: a copy of a pool, in whatever dress.
    host_transfers: whatever goes to the host or comes from it.
    cycles: see above. loops_counted_once: loops of unknown length.
    flops: of matrix products, and of Mosaic calls that state theirs.
    hbm_bytes: see hlo_traffic.py; without the K/V pages that silent Mosaic calls read.
    """

    mosaic_calls: int
    silent_mosaic_calls: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    collectives: tuple[Collective, ...]
    large_copies: tuple[Found, ...]
    host_transfers: tuple[Found, ...]
    cycles: int
    loops_counted_once: int
    flops: int
    hbm_bytes: int

    def seconds(self, clock_hz: float) -> float:
        """The cycles as time: an estimate."""
        return self.cycles / clock_hz


@dataclass(frozen=True)
class Visit:
    """An instruction that runs `times` times when the program runs once."""

    instruction: Instruction
    computation: Computation
    times: int
    in_loop: bool


def facts_of(compiled: Any, large: int = LARGE) -> Facts:
    """Of what `jax.jit(...).lower(...).compile()` gives. large: bytes from which on a write is listed; the size of the
    smallest K/V pool on one chip is a good choice."""
    return facts_from(compiled.as_text(), compiled.memory_analysis(), large)


def facts_from(text: str, memory: Any, large: int = LARGE) -> Facts:
    """The same from the text and the memory analysis. Raises ValueError if the text is not HLO."""
    module = parse(text)
    visits = tuple(walk(module))
    kernels = [visit.instruction for visit in visits if is_mosaic(visit.instruction)]
    loops = [visit.instruction for visit in visits if visit.instruction.opcode == "while"]
    traffic = [(visit, traffic_of(module, visit.computation, visit.instruction)) for visit in visits]
    return Facts(
        mosaic_calls=len(kernels),
        silent_mosaic_calls=sum(kernel.number("bytes_accessed") is None for kernel in kernels),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        collectives=tuple(_collectives(visits)),
        large_copies=tuple(_found(v, part.largest_write) for v, part in traffic if part.largest_write >= large),
        host_transfers=tuple(_found(v, _size(v.instruction)) for v in visits if _is_host_transfer(v.instruction)),
        cycles=sum(visit.times * (visit.instruction.number("estimated_cycles") or 0) for visit in visits),
        loops_counted_once=sum(trips(module, loop) is None for loop in loops),
        flops=sum(visit.times * part.flops for visit, part in traffic),
        hbm_bytes=sum(visit.times * part.hbm_bytes for visit, part in traffic),
    )


def walk(module: Module) -> Iterator[Visit]:
    """Every instruction outside fusions, with how often it runs; those of branches not counted run 0 times."""
    yield from _walk(module, module.entry, 1, False)


def trips(module: Module, loop: Instruction) -> int | None:
    """How often a while loop runs; None if the text does not say."""
    known = _known_trips(loop)
    if known is not None:
        return known
    (condition,) = loop.called("condition")
    last = module.computations[condition].root
    if last.opcode != "compare" or "direction=LT" not in last.attributes:
        return None
    counter, limit = (module.computations[condition].by_name.get(name) for name in last.operands)
    counts = counter is not None and counter.opcode == "get-tuple-element"
    if not counts or limit is None or limit.opcode != "constant" or not limit.literal.isdigit():
        return None
    return int(limit.literal)


def _known_trips(loop: Instruction) -> int | None:
    _, found, rest = loop.attributes.partition('"known_trip_count":{"n":"')
    digits = rest.partition('"')[0]
    return int(digits) if found and digits.isdigit() else None


def _walk(module: Module, name: str, times: int, in_loop: bool) -> Iterator[Visit]:
    computation = module.computations[name]
    for instruction in computation.instructions:
        yield Visit(instruction, computation, times, in_loop)
        loop = instruction.opcode == "while"
        for called, runs in _called(module, instruction):
            yield from _walk(module, called, times * runs, in_loop or loop)


def _called(module: Module, instruction: Instruction) -> Iterator[tuple[str, int]]:
    """Computations that control passes to, and how often."""
    match instruction.opcode:
        case "while":
            runs = trips(module, instruction) or 1
            yield from ((name, runs) for name in instruction.called("condition") + instruction.called("body"))
        case "call":
            yield from ((name, 1) for name in instruction.called("to_apply"))
        case "async-start":
            yield from ((name, 1) for name in instruction.called("calls"))
        case "conditional":
            names = [n for attribute in _BRANCHES for n in instruction.called(attribute)]
            longest = max(names, key=lambda name: _cycles(module, name))
            yield from ((name, int(name == longest)) for name in names)


def _cycles(module: Module, name: str) -> int:
    visits = _walk(module, name, 1, False)
    return sum(visit.times * (visit.instruction.number("estimated_cycles") or 0) for visit in visits)


def _collectives(visits: tuple[Visit, ...]) -> Iterator[Collective]:
    for kind in COLLECTIVES:
        mine = [visit for visit in visits if visit.instruction.opcode in (kind, f"{kind}-start")]
        size = sum(visit.times * sum(array.bytes for array in results(visit.instruction)) for visit in mine)
        if mine:
            yield Collective(kind, len(mine), sum(visit.times for visit in mine), size)


def _is_host_transfer(instruction: Instruction) -> bool:
    if instruction.opcode in _NO_MOVES or instruction.opcode.endswith("-done"):  # the start is counted
        return False
    if instruction.opcode in _HOST_OPCODES or "is_host_transfer=true" in instruction.attributes:
        return True
    moved = any(array.space == _HOST_SPACE for array in instruction.outputs)
    return moved or any(part in instruction.target for part in _HOST_CALLS)


def _size(instruction: Instruction) -> int:
    return sum(array.bytes for array in instruction.outputs[:1])


def _found(visit: Visit, size: int) -> Found:
    return Found(visit.instruction.name, visit.instruction.opcode, size, visit.in_loop)
