"""What loading a damaged or malicious pair comes to: refused in one line, the same pair, or another valid one."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from torch_dflash import InputError, Pair, load_pair

REFUSED, SAME, OTHER = "refused", "the same pair", "another pair"
_SPARE = 1 << 29  # bytes


@contextmanager
def little_memory() -> Iterator[None]:
    """Allocating half a gigabyte fails in here, as a MemoryError or RuntimeError that no loader may catch."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _SPARE, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def load(folder: Path) -> Pair:
    return load_pair(folder / "target", folder / "draft")


def outcome(folder: Path, base: Pair, *named: str) -> str:
    """What loading gives. A refusal must be one printable line that names the folder's file or one of `named`."""
    try:
        pair = load(folder)
    except InputError as error:
        line = str(error)
        assert line.isprintable() and len(line) < 3000
        assert any(part in line for part in (str(folder), *named)), line
        return REFUSED
    return SAME if equal(pair, base) else OTHER


def equal(pair: Pair, base: Pair) -> bool:
    """Configs, and every weight bit for bit."""
    assert pair.drafter is not None and base.drafter is not None
    configs = pair.target.config == base.target.config and pair.drafter.config == base.drafter.config
    return configs and all(jax.tree.leaves(jax.tree.map(np.array_equal, pair.params, base.params)))


def parts(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def put(path: Path, header: Any, data: bytes, length: int | None = None) -> None:
    """`header` is an object, or bytes as they are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
