"""Parameter counts against torch's modules; bytes, operations and times against examples worked out by hand."""

from dataclasses import replace

import pytest
import torch

from torch_dflash.config import BlockConfig, Convolution, DefaultRope, DrafterConfig, DraftLayer, Selector, TargetConfig
from torch_dflash.config_reader import read_drafter_config, read_target_config
from torch_dflash.models.drafter import Drafter
from torch_dflash.models.target import Target
from torch_dflash.tpu.chips import Chip, chip_named
from torch_dflash.tpu.roofline import (
    dflash_step,
    draft_pass,
    drafter_parameters,
    k_flat,
    knee,
    kv_bytes,
    target_parameters,
    target_pass,
    time_of,
)
from torch_dflash.tpu.shapes import TARGETS, drafter_folder, drafter_of, target_folder

BLOCK = BlockConfig(
    hidden_size=8,
    intermediate_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    rms_norm_eps=1e-6,
    attention_bias=False,
    mlp_bias=False,
    qk_norm=True,
)
ROPE = DefaultRope(10000.0)
TARGET = TargetConfig("qwen3", BLOCK, 3, 10, ROPE, 64, True, ())
DRAFTER = DrafterConfig(BLOCK, (DraftLayer(False, None),) * 2, ROPE, 4, 9, (0, 2), 3, 10, 64)
# One layer: q and o 8 x 512, k and v 8 x 256, three of 8 x 16.
MATRICES = 2 * 8 * 512 + 2 * 8 * 256 + 3 * 8 * 16
LAYER = MATRICES + 2 * 8 + 2 * 128  # two norms of the hidden size, two of the head
POSITION = 2 * 2 * 128 * 2  # bytes of K and V, 2 heads of 128, in one layer
CHIP = Chip("toy", 1e6, 1e3, 1e6, 1e9, 0.0, ((1, "toy"),))


def elements(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", [*TARGETS, "bytes"])
def test_parameters_are_those_of_the_modules(name: str) -> None:
    target, draft = read_target_config(target_folder(name)), read_drafter_config(drafter_folder(drafter_of(name) or ""))
    with torch.device("meta"):
        assert target_parameters(target).total == elements(Target(target))
        assert drafter_parameters(draft).total == elements(Drafter(draft))


def test_a_dflash_2_drafter_is_counted_whole() -> None:
    draft = replace(DRAFTER, convolution=Convolution(3, 4), selector=Selector(6, 4), vocab_size=40)
    with torch.device("meta"):
        assert drafter_parameters(draft).total == elements(Drafter(draft))


def test_what_dflash_2_adds_is_held_by_every_chip_and_read_in_each_draft() -> None:
    """Kernels are multiplied with; of the codebooks only the candidates' rows are read, two for each."""
    hidden, size, layers = DRAFTER.block.hidden_size, DRAFTER.block_size, len(DRAFTER.layers)
    second = replace(DRAFTER, convolution=Convolution(3, 4), selector=Selector(6, 4), vocab_size=40)
    kernels = layers * 2 * 2 * 3 * (hidden + hidden * hidden // 4) + 6 * hidden
    one, two = drafter_parameters(DRAFTER), drafter_parameters(second)
    assert two.bytes_of(2) == one.bytes_of(1) / 2 + 2 * (kernels + 2 * 40 * 6)
    before, behind = (draft_pass(TARGET, draft, 2, 10) for draft in (DRAFTER, second))
    places = 2 * (size - 1)
    assert behind.weights - before.weights == 2 * kernels
    assert behind.rows_read - before.rows_read == 2 * places * 2 * 4 * 6
    assert behind.flops - before.flops == 2 * 2 * size * kernels + 2 * places * 4 * 4 * 6
    assert (behind.kv_read, behind.written) == (before.kv_read, before.written)


@pytest.mark.parametrize("biases", [(True, False), (False, True), (True, True)])
def test_biases_and_a_head_of_its_own_are_counted(biases: tuple[bool, bool]) -> None:
    block = replace(BLOCK, attention_bias=biases[0], mlp_bias=biases[1], qk_norm=False)
    target = replace(TARGET, block=block, tie_word_embeddings=False)
    draft = replace(DRAFTER, block=block, draft_vocab_size=5)
    with torch.device("meta"):
        assert target_parameters(target).total == elements(Target(target))
        assert drafter_parameters(draft).total == elements(Drafter(draft))


def test_a_tied_embedding_is_one_matrix() -> None:
    parts = target_parameters(TARGET)
    assert (parts.layers, parts.embedding, parts.head, parts.rest) == (3 * LAYER, 80, 0, 8)
    assert target_parameters(replace(TARGET, tie_word_embeddings=False)).head == 80
    assert parts.bytes_of(1) == 2 * (3 * LAYER + 88)


def test_kv_heads_are_padded_as_tpus_want_them() -> None:
    assert kv_bytes(BLOCK, 3) == 3 * POSITION
    assert kv_bytes(replace(BLOCK, head_dim=64), 3) == 3 * POSITION
    assert kv_bytes(replace(BLOCK, head_dim=192), 3) == 6 * POSITION
    three = replace(BLOCK, num_heads=6, num_kv_heads=3)
    assert kv_bytes(three, 3) == 2 * 3 * POSITION  # 4 heads on one chip
    assert kv_bytes(three, 3, tp=3) == 3 * 3 * POSITION // 2  # one on each of three


def test_a_plain_step_by_hand() -> None:
    work = target_pass(TARGET, rows=2, tokens=1, context=10)
    assert work.weights == 2 * (3 * LAYER + 8 + 80)
    assert work.kv_read == 2 * 11 * 3 * POSITION
    assert work.rows_read == 2 * 8 * 2
    assert work.written == 2 * 3 * POSITION
    attention = 4 * 11 * 4 * 128 * 3  # scores and values, 11 visible keys, 4 heads of 128, 3 layers
    assert work.flops == 2 * (2 * (3 * MATRICES + 80) + attention)
    assert work.hbm_bytes == work.weights + work.kv_read + work.rows_read + work.written


def test_an_untied_head_is_read_and_the_embedding_is_not() -> None:
    untied = replace(TARGET, tie_word_embeddings=False)
    assert target_pass(untied, 1, 1, 10) == target_pass(TARGET, 1, 1, 10)


def test_a_verification_by_hand() -> None:
    work = target_pass(TARGET, rows=1, tokens=4, context=10, features=32)
    assert work.kv_read == 14 * 3 * POSITION
    assert work.written == 4 * (3 * POSITION + 32)
    pairs = 11 + 12 + 13 + 14
    assert work.flops == 2 * 4 * (3 * MATRICES + 80) + 4 * pairs * 4 * 128 * 3


def test_a_draft_by_hand() -> None:
    work = draft_pass(TARGET, DRAFTER, rows=1, context=10)
    fc = 2 * 8 * 8
    assert work.weights == 2 * (2 * LAYER + fc + 2 * 8 + 80)
    assert work.kv_read == 10 * 2 * POSITION
    assert work.rows_read == 4 * (8 * 2 + 2 * 8 * 2)
    assert work.written == 4 * 2 * POSITION
    context_projections = 2 * 2 * 8 * 256  # two layers, K and V
    dense = 2 * 4 * (2 * MATRICES + fc + context_projections)
    assert work.flops == dense + 2 * 3 * 80 + 4 * (4 * 14) * 4 * 128 * 2


def test_a_drafters_own_head_is_the_one_read() -> None:
    own = draft_pass(TARGET, replace(DRAFTER, draft_vocab_size=5), 1, 10)
    assert draft_pass(TARGET, DRAFTER, 1, 10).weights - own.weights == 2 * (80 - 40)


@pytest.mark.parametrize(
    ("layer", "pairs", "read"),
    [
        (DraftLayer(True, None), 11 + 12 + 13 + 14, 10),
        (DraftLayer(False, 3), 5 + 5 + 4 + 3, 2),  # query 0: two before it, itself, two behind it
        (DraftLayer(True, 3), 3 + 3 + 3 + 3, 2),
        (DraftLayer(False, 100), 4 * 14, 10),
    ],
)
def test_causal_and_windowed_draft_layers_see_less(layer: DraftLayer, pairs: int, read: int) -> None:
    one = draft_pass(TARGET, replace(DRAFTER, layers=(layer,)), 1, 10)
    none = draft_pass(TARGET, replace(DRAFTER, layers=()), 1, 10)
    assert one.kv_read == read * POSITION
    dense = 2 * 4 * (MATRICES + 2 * 8 * 256)
    assert one.flops - none.flops == dense + 4 * pairs * 4 * 128


def test_the_fused_step_is_draft_and_verification_with_features() -> None:
    fused = dflash_step(TARGET, DRAFTER, 2, 10)
    parts = draft_pass(TARGET, DRAFTER, 2, 10), target_pass(TARGET, 2, 4, 10, 2 * 8 * 2)
    assert fused == parts[0] + parts[1]
    assert fused.hbm_bytes == parts[0].hbm_bytes + parts[1].hbm_bytes


def test_time_is_the_longer_of_the_two_and_shared_out() -> None:
    work = target_pass(TARGET, 1, 1, 10)
    one, four = time_of(work, CHIP), time_of(work, CHIP, tp=4)
    assert one.memory == work.hbm_bytes / 1e3 and one.compute == work.flops / 1e6
    assert one.seconds == one.memory > one.compute
    assert (four.memory, four.compute) == (one.memory / 4, one.compute / 4)
    fast = replace(CHIP, hbm_bytes_per_second=1e12)
    assert time_of(work, fast).seconds == work.flops / 1e6


def test_k_flat_of_qwen3_4b_on_v5p_against_a_second_calculation() -> None:
    """Milliseconds of memory and compute, from an independent worksheet (TOOLCHAIN, section 3)."""
    expected = {1: (2.94, 0.02), 16: (2.94, 0.29), 64: (2.94, 1.17), 128: (2.95, 2.34), 256: (2.96, 4.70)}
    expected[1024] = (3.05, 19.3)
    points = k_flat(read_target_config(target_folder("Qwen3-4B")), chip_named("v5p"), 512, expected)
    for point in points:
        memory, compute = expected[point.tokens]
        assert point.time.memory * 1e3 == pytest.approx(memory, abs=0.006)
        assert point.time.compute * 1e3 == pytest.approx(compute, abs=0.006 if point.tokens < 1024 else 0.06)


@pytest.mark.parametrize(("chip", "tokens"), [("v5p", 162), ("v6e", 546), ("v5e", 235)])
def test_the_knee_is_where_compute_overtakes_memory(chip: str, tokens: int) -> None:
    config = read_target_config(target_folder("Qwen3-4B"))
    assert knee(config, chip_named(chip), 512) == tokens
    before, at = k_flat(config, chip_named(chip), 512, (tokens - 1, tokens))
    assert before.time.compute <= before.time.memory and at.time.compute > at.time.memory


def test_more_rows_and_fewer_tokens_meet_the_knee_together() -> None:
    config = read_target_config(target_folder("Qwen3-4B"))
    assert knee(config, chip_named("v5p"), 512, rows=8) == pytest.approx(162 / 8, abs=2)


def test_a_memory_that_is_never_overtaken_and_one_that_always_is() -> None:
    assert knee(TARGET, replace(CHIP, flops_per_second=1e30), 10) is None
    assert knee(TARGET, replace(CHIP, hbm_bytes_per_second=1e30), 10) == 1
