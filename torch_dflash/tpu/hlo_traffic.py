"""What one instruction of a compiled program moves from and to HBM, and its matrix products. An estimate.

An operand is read once, a result written once, without padding. Less is counted where only a part is touched: slices
and gathers read what they take, updates and scatters write what they put (they are in place: where they are not, the
compiler has put a copy before them). Arrays in memory on the chip count nothing. A Mosaic call counts what its author
says; one that says nothing counts its results and operands without the largest, the K/V pages, of which it reads the
live part only.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch_dflash.tpu.hlo_text import Array, Computation, Instruction, Module

MOSAIC = "tpu_custom_call"
_FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "async-start", "async-update", "async-done"),
)
_TAKES = ("dynamic-slice", "slice", "gather")
_PUTS = ("dynamic-update-slice", "scatter")
_RENAMES = ("bitcast", "reshape")
_DIMENSIONS = re.compile(r"dim_labels=\w+_(\w+)->")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")


@dataclass(frozen=True)
class Traffic:
    """Of one run of an instruction. largest_write: bytes of HBM that it writes of one result."""

    hbm_bytes: int
    flops: int
    largest_write: int = 0


def is_mosaic(instruction: Instruction) -> bool:
    """Is it a Pallas kernel?"""
    return instruction.opcode == "custom-call" and instruction.target == MOSAIC


def results(instruction: Instruction) -> Sequence[Array]:
    """What it makes. The start of an asynchronous operation also names its operands and a handle: these are left
    out."""
    outputs, given = instruction.outputs, len(instruction.operands)
    if instruction.opcode == "copy-start":
        return outputs[:1]
    if instruction.opcode.endswith("-start") and len(outputs) > given:
        return outputs[given : 2 * given]
    return outputs


def traffic_of(module: Module, computation: Computation, instruction: Instruction) -> Traffic:
    """Of an instruction of `computation`; nothing for what only passes control or names on."""
    if instruction.opcode in _FREE or instruction.opcode.endswith("-done") or instruction.target == "AllocateBuffer":
        return Traffic(0, 0)
    operands = [_array(computation, name) for name in instruction.operands]
    if is_mosaic(instruction):
        return _kernel(instruction, operands)
    read = sum(
        _read(module, computation, instruction, at) for at, array in enumerate(operands) if array and array.space == 0
    )
    sizes = zip(results(instruction), _written(module, computation, instruction), strict=True)
    written = [size for array, size in sizes if array.space == 0]
    return Traffic(read + sum(written), _flops(module, computation, instruction), max(written, default=0))


def _kernel(instruction: Instruction, operands: Sequence[Array | None]) -> Traffic:
    flops, stated = instruction.number("flops") or 0, instruction.number("bytes_accessed")
    made = [array.hbm_bytes for array in results(instruction)]
    largest = 0 if "output_to_operand_aliasing" in instruction.attributes else max(made, default=0)
    if stated is not None:
        return Traffic(stated, flops, largest)
    sizes = sorted(array.hbm_bytes for array in operands if array is not None)
    return Traffic(sum(sizes[:-1]) + sum(made), flops, largest)


def _array(computation: Computation, name: str) -> Array | None:
    """What is called `name`; None for a tuple or a name from elsewhere."""
    instruction = computation.by_name.get(name)
    return None if instruction is None or len(instruction.outputs) != 1 else instruction.outputs[0]


def _fused(module: Module, fusion: Instruction) -> Computation:
    (name,) = fusion.called("calls")
    return module.computations[name]


def _read(module: Module, computation: Computation, user: Instruction, at: int) -> int:
    """Bytes of its operand number `at` that an instruction reads."""
    array = _array(computation, user.operands[at])
    whole = 0 if array is None else array.bytes
    if user.opcode in _TAKES and at == 0:
        return sum(part.bytes for part in results(user))
    if user.opcode in _PUTS and at == 0:
        return 0
    if user.opcode == "fusion":
        inner = _fused(module, user)
        return min(whole, sum(_read_by_users(module, inner, name) for name in _parameters(inner, at)))
    if user.opcode in _RENAMES:
        return min(whole, _read_by_users(module, computation, user.name))
    return whole


def _parameters(computation: Computation, number: int) -> list[str]:
    """Its parameter of that number; none where it has fewer."""
    instructions = computation.instructions
    return [i.name for i in instructions if i.opcode == "parameter" and i.literal == str(number)]


def _read_by_users(module: Module, computation: Computation, name: str) -> int:
    """Bytes that are read of an array within a fusion. Given on as a result, it is read whole."""
    array, total = _array(computation, name), 0
    for user in computation.instructions:
        total += sum(_read(module, computation, user, at) for at, used in enumerate(user.operands) if used == name)
    made = computation.root.name == name and array is not None
    return total + (array.bytes if made and array is not None else 0)


def _written(module: Module, computation: Computation, instruction: Instruction) -> list[int]:
    """Bytes that are written of each result."""
    made = results(instruction)
    if instruction.opcode == "fusion":
        inner = _fused(module, instruction)
        root = inner.root
        parts = [inner.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
        if len(parts) == len(made):
            return [_put(module, inner, part) for part in parts]
    if len(made) == 1:
        return [_put(module, computation, instruction)]
    return [array.bytes for array in made]


def _put(module: Module, computation: Computation, part: Instruction) -> int:
    """Bytes that are written by the instruction that makes a result."""
    if part.opcode in _PUTS:
        update = _array(computation, part.operands[1 if part.opcode == "dynamic-update-slice" else 2])
        return 0 if update is None else update.bytes
    source = computation.by_name.get(part.operands[0]) if part.opcode in _RENAMES else None
    if source is not None and source.opcode != "parameter":
        return _put(module, computation, source)
    if part.opcode == "fusion":
        return sum(_written(module, computation, part))
    return sum(array.bytes for array in results(part))


def _flops(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Of matrix products: 2 for each result element and each pair that it is summed from."""
    if instruction.opcode == "fusion":
        inner = _fused(module, instruction)
        return sum(_flops(module, inner, part) for part in inner.instructions)
    if instruction.opcode not in ("dot", "convolution"):
        return 0
    left, right = (_array(computation, name) for name in instruction.operands[:2])
    if left is None or right is None:
        return 0
    terms = _dot_terms(instruction, left) if instruction.opcode == "dot" else _convolution_terms(instruction, right)
    return 2 * terms * math.prod(instruction.outputs[0].shape)


def _dot_terms(instruction: Instruction, left: Array) -> int:
    found = _CONTRACTED.search(instruction.attributes)
    axes = [] if found is None else [int(axis) for axis in found.group(1).split(",") if axis]
    return math.prod(left.shape[axis] for axis in axes)


def _convolution_terms(instruction: Instruction, kernel: Array) -> int:
    """The kernel's input features times its window; a window that is spread out stands for a batch axis, and one of its
    places meets the input."""
    found = _DIMENSIONS.search(instruction.attributes)
    labels = "" if found is None else found.group(1)
    batch = "lhs_dilate" in instruction.attributes
    counted = [size for label, size in zip(labels, kernel.shape, strict=False) if label == "i" or not batch]
    outputs = 1 if batch else kernel.shape[labels.index("o")] if "o" in labels else 1
    return math.prod(counted) // outputs
