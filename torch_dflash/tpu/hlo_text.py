"""Reads the text of a compiled program (HLO, as `compiled.as_text()` prints it). Knows its grammar, not its meaning."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

_OPEN, _CLOSE = "([{", ")]}"
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=\s]*)\](\{[^{}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_BITS = re.compile(r"(?:[suf]|bf|c)(\d+)")
_CALLED = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True)
class Array:
    """An array's type. space: 0 is HBM; others are on the chip or the host."""

    dtype: str
    shape: tuple[int, ...]
    space: int

    @property
    def bytes(self) -> int:
        """Without the padding of its layout."""
        return math.ceil(math.prod(self.shape) * _bits(self.dtype) / 8)

    @property
    def hbm_bytes(self) -> int:
        return self.bytes if self.space == 0 else 0


@dataclass(frozen=True)
class Instruction:
    """One line. outputs: its arrays, several for a tuple. operands: names. attributes: the text behind them."""

    name: str
    opcode: str
    outputs: tuple[Array, ...]
    operands: tuple[str, ...]
    literal: str
    attributes: str
    is_root: bool

    def called(self, attribute: str) -> tuple[str, ...]:
        """Computations that an attribute names: `body=%x` or `branch_computations={%x, %y}`."""
        found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%[\w.\-]+)", self.attributes)
        return () if found is None else tuple(_CALLED.findall(found.group(1)))

    def number(self, key: str) -> int | None:
        """An integer of the backend's configuration: "key":"12" or "key":12."""
        found = re.search(rf'"{key}":"?(\d+)', self.attributes)
        return None if found is None else int(found.group(1))

    @cached_property
    def target(self) -> str:
        """Of a custom call: what it calls."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return "" if found is None else found.group(1)


@dataclass(frozen=True)
class Computation:
    """Instructions in the order of the text."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @property
    def root(self) -> Instruction:
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])


@dataclass(frozen=True)
class Module:
    """A program: its computations by name, and which one it begins with."""

    computations: dict[str, Computation]
    entry: str


def parse(text: str) -> Module:
    """Raises ValueError if there is no entry computation, as in text that is not HLO."""
    computations: dict[str, Computation] = {}
    entry, name, body = "", "", list[Instruction]()
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head is not None:
            name, body = head.group(2), []
            entry = name if head.group(1) else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, tuple(body))
        else:
            body.extend(_instruction(line))
    if entry not in computations:
        raise ValueError("this is no HLO text: it has no ENTRY computation")
    return Module(computations, entry)


def _instruction(line: str) -> Iterator[Instruction]:
    """None from a line that is something else."""
    found = _NAME.match(line)
    if found is None:
        return
    start = found.end()
    end = _end_of_group(line, start) if line[start] == "(" else line.index(" ", start)
    opens = line.index("(", end)
    closes = _end_of_group(line, opens)
    inside = line[opens + 1 : closes - 1]
    yield Instruction(
        name=found.group(2),
        opcode=line[end:opens].strip(),
        outputs=tuple(_arrays(line[start:end])),
        operands=tuple(_CALLED.findall(inside)),
        literal=inside,
        attributes=line[closes:],
        is_root=found.group(1) is not None,
    )


def _end_of_group(text: str, start: int) -> int:
    """Behind the bracket that closes the one at `start`."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] in _OPEN) - (text[at] in _CLOSE)
        if depth == 0:
            return at + 1
    raise ValueError(f"HLO text with an open bracket: {text[:100]}")


def _arrays(text: str) -> Iterator[Array]:
    for dtype, sizes, layout in _ARRAY.findall(text):
        shape = tuple(int(size.strip(" <=")) for size in sizes.split(",") if size.strip(" <="))
        space = _SPACE.search(layout)
        yield Array(dtype, shape, 0 if space is None else int(space.group(1)))


def _bits(dtype: str) -> int:
    """Of one element: 1 byte for pred, nothing for token and opaque."""
    if dtype == "pred":
        return 8
    found = _BITS.match(dtype)
    return 0 if found is None else int(found.group(1))
