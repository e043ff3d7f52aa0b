"""Fixtures are those of tests/conftest.py; this adds the option for every program there is."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix", action="store_true", help="compile all chips, pairs, programs, rows and widths")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The matrix is left out unless it is asked for."""
    if not config.getoption("matrix", False):  # unknown where tests/tpu is not what pytest was started for
        items[:] = [item for item in items if item.path.name != "test_matrix.py"]
