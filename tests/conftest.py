"""Fixtures that several test files share. Loaded once: loading and compiling cost more than most tests."""

import pytest
import torch
from helpers import Loaded, golden, load, write_drafter, write_target

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
