"""A drafter's config.json in z-lab's layout in, dataclass out: taps, layer rules, one refusal per field."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from config_files import ABSENT, GOLDEN, assert_line, drafter
from transformers import Qwen3Config

from torch_dflash.config import DraftLayer
from torch_dflash.config_draft import default_target_layer_ids
from torch_dflash.config_reader import check_pair, read_drafter_config, read_target_config
from torch_dflash.errors import InputError

FULL, CAUSAL = DraftLayer(causal=False, window=None), DraftLayer(causal=True, window=None)


def test_default_layer_ids_match_the_original() -> None:
    for depth, taps, ids in json.loads((GOLDEN / "layer_ids.json").read_text())["rows"]:
        assert default_target_layer_ids(depth, taps) == tuple(ids)
    assert default_target_layer_ids(36, 5) == (1, 9, 17, 25, 33)


@pytest.mark.parametrize(
    ("pair", "block_size", "taps", "layers"),
    [
        ("qwen3-gqa", 8, (1, 3), (FULL,) * 2),
        ("qwen3-untied", 16, (1, 2, 3), (FULL,) * 3),
        ("llama3-rope", 10, (1, 2, 3), (FULL,) * 3),
        ("qwen3-swa", 8, (1, 2, 3), (DraftLayer(True, 16), DraftLayer(True, 16), FULL)),
    ],
)
def test_golden_drafters(pair: str, block_size: int, taps: tuple, layers: tuple) -> None:
    config = read_drafter_config(GOLDEN / pair / "draft")
    assert (config.block_size, config.target_layer_ids, config.layers) == (block_size, taps, layers)
    assert (config.mask_token_id, config.num_target_layers, config.vocab_size) == (255, 6, 256)
    assert config.block.qk_norm
    check_pair(read_target_config(GOLDEN / pair / "target").shape, config)


def test_block_fields_may_stand_on_either_level(tmp_path: Path) -> None:
    expected = drafter(tmp_path)
    moved = {"block_size": 8, "mask_token_id": 255, "target_layer_ids": [1, 3], "num_target_layers": 6}
    nested = drafter(tmp_path, **dict.fromkeys(moved, ABSENT), dflash_config=moved)
    flat = drafter(tmp_path, **moved, dflash_config=None)
    assert expected == nested == flat == drafter(tmp_path, **moved)


def test_taps_keep_their_order(tmp_path: Path) -> None:
    assert drafter(tmp_path, dflash_config={"target_layer_ids": [5, 0, 3]}).target_layer_ids == (5, 0, 3)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"is_causal": False}, (DraftLayer(False, 16), DraftLayer(False, 16), FULL)),
        ({"is_causal": True}, (DraftLayer(True, 16), DraftLayer(True, 16), CAUSAL)),
        ({"dflash_config": {"causal": True}}, (DraftLayer(True, 16), DraftLayer(True, 16), CAUSAL)),
        (
            {"is_causal": False, "dflash_config": {"causal": True}},
            (DraftLayer(False, 16), DraftLayer(False, 16), FULL),
        ),
        ({"is_causal": None}, (DraftLayer(True, 16), DraftLayer(True, 16), FULL)),
        ({"use_sliding_window": False}, (CAUSAL, CAUSAL, FULL)),
        ({"sliding_window": None}, (CAUSAL, CAUSAL, FULL)),
        ({"layer_types": ABSENT}, (FULL, FULL, DraftLayer(True, 16))),
        ({"layer_types": ABSENT, "use_sliding_window": False}, (FULL,) * 3),
    ],
)
def test_causality_and_window(tmp_path: Path, changes: dict, layers: tuple) -> None:
    assert drafter(tmp_path, base="qwen3-swa", **changes).layers == layers


@pytest.mark.parametrize("first", [0, 1, 3])
def test_absent_layer_types_follow_transformers(tmp_path: Path, first: int) -> None:
    config = drafter(tmp_path, base="qwen3-swa", layer_types=ABSENT, max_window_layers=first)
    hf = Qwen3Config(num_hidden_layers=3, use_sliding_window=True, sliding_window=16, max_window_layers=first)
    expected = [16 if kind == "sliding_attention" else None for kind in hf.layer_types]
    assert [layer.window for layer in config.layers] == expected


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "conv_kernel_size", "is missing"),
        ({"architectures": ["MuseGlimmerAssistantForCausalLM"]}, "architectures", "MuseGlimmer"),
        ({"speculators_model_type": "dflash"}, "transformer_layer_config", "is missing"),
        ({"quantization_config": {"quant_algo": "FP8"}}, "quantization_config", "FP8"),
        ({"dflash_config": {"projector_type": "domino"}}, "projector_type", "domino"),
        ({"dflash_config": {"selector_rank": 16}}, "selector_rank", "16"),
        ({"dflash_config": {"output_multiplier": 0}}, "output_multiplier", "0"),
        ({"final_logit_softcapping": -15.0}, "final_logit_softcapping", "-15.0"),
        ({"dflash_config": [1]}, "dflash_config", "[1]"),
        ({"dflash_config": {"mask_token_id": ABSENT}}, "mask_token_id", "is missing"),
        ({"dflash_config": {"mask_token_id": 256}}, "mask_token_id", "256"),
        ({"dflash_config": {"mask_token_id": -1}}, "mask_token_id", "-1"),
        ({"dflash_config": {"mask_token_id": "<mask>"}}, "mask_token_id", "<mask>"),
        ({"mask_token_id": 254}, "mask_token_id", "255"),
        ({"block_size": 1}, "block_size", "1"),
        ({"block_size": ABSENT}, "block_size", "is missing"),
        ({"dflash_config": {"block_size": 16}}, "block_size", "16"),
        ({"dflash_config": {"target_layer_ids": [3, 3]}}, "target_layer_ids", "[3, 3]"),
        ({"dflash_config": {"target_layer_ids": [1, -1]}}, "target_layer_ids", "-1"),
        ({"dflash_config": {"target_layer_ids": [1, 6]}}, "target_layer_ids", "6"),
        ({"dflash_config": {"target_layer_ids": []}}, "target_layer_ids", "[]"),
        ({"dflash_config": {"target_layer_ids": 3}}, "target_layer_ids", "3"),
        ({"dflash_config": {"target_layer_ids": [True, 2]}}, "target_layer_ids", "true"),
        ({"dflash_config": {"target_layer_ids": ABSENT}, "num_target_layers": 2}, "target_layer_ids", "-1"),
        (
            {"dflash_config": {"target_layer_ids": ABSENT}, "num_target_layers": 4},
            "target_layer_ids",
            "[1, 1]",
        ),
        ({"num_target_layers": ABSENT}, "num_target_layers", "is missing"),
        ({"layer_types": ["full_attention"]}, "layer_types", "2"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types", "chunked_attention"),
        ({"is_causal": "yes"}, "is_causal", "yes"),
        (
            {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2, "sliding_window": ABSENT},
            "sliding_window",
            "is missing",
        ),
        ({"rope_theta": ABSENT}, "rope_theta", "is missing"),
    ],
)
def test_drafter_refusals(tmp_path: Path, changes: dict, field: str, value: str) -> None:
    with pytest.raises(InputError) as error:
        drafter(tmp_path, **changes)
    assert_line(error.value, str(tmp_path / "config.json"), field, value)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"num_target_layers": 36}, "num_target_layers", "36"),
        ({"vocab_size": 300}, "vocab_size", "300"),
        ({"mask_token_id": 256}, "mask_token_id", "256"),
        ({"target_layer_ids": (1, 6)}, "target_layer_ids", "6"),
        ({"target_layer_ids": (3, 3)}, "target_layer_ids", "[3, 3]"),
    ],
)
def test_pair_refusals(changes: dict, field: str, value: str) -> None:
    base = read_drafter_config(GOLDEN / "qwen3-gqa" / "draft")
    with pytest.raises(InputError) as error:
        check_pair(read_target_config(GOLDEN / "qwen3-gqa" / "target").shape, replace(base, **changes))
    assert_line(error.value, field, value)


def test_pair_refuses_another_hidden_size() -> None:
    base = read_drafter_config(GOLDEN / "qwen3-gqa" / "draft")
    wide = replace(base, block=replace(base.block, hidden_size=128))
    with pytest.raises(InputError, match="drafter hidden_size is 128, but the target's hidden_size is 64"):
        check_pair(read_target_config(GOLDEN / "qwen3-gqa" / "target").shape, wide)
