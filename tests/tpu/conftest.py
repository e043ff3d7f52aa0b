"""Fixtures are those of tests/conftest.py; this adds the option for every program there is."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix", action="store_true", help="compile all chips, pairs, programs, rows and widths")
