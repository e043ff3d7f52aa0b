"""What scripts/sweep.py compares and how it shows it; the training itself is that of the command."""

import importlib.util
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from helpers import golden_pair

SCRIPT = Path(__file__).parents[1] / "scripts" / "sweep.py"


@pytest.fixture(scope="module")
def sweep():
    spec = importlib.util.spec_from_file_location("sweep", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sweep"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["sweep"]


def test_variants_differ_from_the_base_in_one_thing(sweep):
    base = sweep.Variant(layers=4, taps=3)
    every = sweep.variants(base)
    assert every[0] == base
    changes = [{n: v for n, v in asdict(e).items() if n != "name" and v != asdict(base)[n]} for e in every[1:]]
    assert all(len(change) == 1 for change in changes)
    tried = {(name, value) for change in changes for name, value in change.items()}
    assert {("seed", 1), ("weights", "dynamic"), ("distill", 0.5), ("layers", 5), ("taps", 5)} <= tried
    assert ("layers", 4) not in tried
    assert len({variant.name for variant in every}) == len(every)


def test_a_tap_set_is_cut_out_of_all(sweep):
    pair = golden_pair("trained-bytes")  # 6 layers
    every = [sweep.Variant(taps=1), sweep.Variant(taps=2)]
    taps = sweep.every_tap(pair, every)
    assert taps == (1, 3)
    size = pair.target.config.block.hidden_size
    rows = np.repeat(np.array(taps), size)[None].repeat(5, axis=0)  # each feature says which layer it is of
    two = sweep.selected(pair, sweep.MappedStore(rows), every, every[1]).gather(np.array([1]), 3)
    one = sweep.selected(pair, sweep.MappedStore(rows), every, every[0]).gather(np.array([1]), 3)
    assert two.shape == (1, 3, 2 * size) and sorted(set(two.flat)) == [1, 3]
    assert one.shape == (1, 3, size) and set(one.flat) == {3}


def test_the_table_and_the_picture(sweep, tmp_path: Path):
    result = asdict(sweep.Variant()) | {
        "parameters": 11_900_000,
        "cpu_seconds_per_step": 0.654,
        "foresight": {"loss": 3.214, "tau": 1.25},
        "held_out": {"gsm8k": {"tau": 1.5}, "mbpp": {"tau": 2.0}},
    }
    other = result | {"name": "other", "held_out": {"gsm8k": {"tau": 1.0}, "mbpp": {"tau": 1.0}}}
    lines = sweep.table([result, other]).splitlines()
    assert lines[0] == "| variant | M parameters | CPU s a step | loss | tau, forced | tau, gsm8k | tau, mbpp | mean |"
    assert lines[2] == "| base | 11.9 | 0.65 | 3.214 | 1.250 | 1.50 | 2.00 | 1.75 |"
    assert lines[3].endswith("| 1.00 | 1.00 | 1.00 |")
    sweep.picture([result, other], tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
