"""Fixtures that several test files share. Loaded once: loading and compiling cost more than most tests."""

import shutil
from pathlib import Path

import pytest
import torch
from helpers import Loaded, golden, load, write_drafter, write_target
from layout_files import write_pair

from torch_dflash import Pair, load_pair

torch.set_num_threads(1)


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
