"""Fixtures that several test files share. Loaded once: loading and compiling cost more than most tests."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
import torch
from helpers import Loaded, golden, load, second, write_drafter, write_target
from jax.experimental.compilation_cache import compilation_cache
from layout_files import write_pair

from torch_dflash import Pair, load_pair

torch.set_num_threads(1)

MOST_MAPPINGS = 8_000


@pytest.fixture(autouse=True)
def no_lasting_cache() -> Iterator[None]:
    """The commands keep compiled programs on disk; a command that ran in a test must not do so for later tests."""
    yield
    if jax.config.jax_compilation_cache_dir is not None:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()


@pytest.fixture(scope="module", autouse=True)
def room_for_programs() -> Iterator[None]:
    """Each compiled program takes memory mappings, of which a process has 65,530 on Linux. After very many files XLA's
    compiler crashed; that this is why is a guess. What a file has compiled serves the next ones for a while."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_text().count("\n") > MOST_MAPPINGS:
        jax.clear_caches()


@pytest.fixture(scope="session")
def gqa() -> Loaded:
    """The base golden pair: Qwen3 with grouped heads, tied."""
    return load(golden("qwen3-gqa"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Random weights, two layers, so few tokens that drafts are right now and then, room for 512 positions."""
    folder = tmp_path_factory.mktemp("tiny")
    write_target(folder / "target")
    write_drafter(folder / "draft")
    return load(folder)


@pytest.fixture(scope="session")
def tiny2(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """`tiny` with a DFlash 2 drafter."""
    folder = tmp_path_factory.mktemp("dflash2")
    write_target(folder / "target")
    write_drafter(folder / "draft", **second())
    return load(folder)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pair on disk, to be damaged in a `copy`."""
    return write_pair(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def base(pair: Path) -> Pair:
    """What `pair` loads to."""
    return load_pair(pair / "target", pair / "draft")


@pytest.fixture
def copy(pair: Path, tmp_path: Path) -> Path:
    """Of `pair`, for one test."""
    return shutil.copytree(pair, tmp_path / "copy")
