"""Every program of the gate's matrix: three chips, three pairs, one row and eight, one chip and several. About half an
hour, so it runs only when asked for: scripts/test-tpu --matrix -k test_matrix"""

from itertools import product

import pytest

pytest.importorskip("libtpu", reason="libtpu is not installed: scripts/test-tpu runs these tests with it")

from gate import PAIRS, Case, check, compiled

SPREAD = {"Qwen3-4B": 4, "Llama-3.1-8B": 4, "default": 3}  # chips; SmolLM2 has three K/V heads
TOO_LARGE = {("v5e", "Llama-3.1-8B", 1)}  # 16 GB of weights, 16 GB of memory
MATRIX = [
    Case(chip, pair, kind, rows, tp)
    for chip, pair, kind in product(("v5p", "v6e", "v5e"), PAIRS, ("prefill", "plain", "dflash", "loop"))
    for rows, tp in product((1, 8), (1, SPREAD[pair]))
    if (kind != "prefill" or rows == 1) and (chip, pair, tp) not in TOO_LARGE
]


@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_a_program_is_what_it_must_be(case: Case) -> None:
    check(*compiled(case))
