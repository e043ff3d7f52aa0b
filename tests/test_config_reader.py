"""config.json in, dataclasses out: both RoPE forms, the layer rules, and one refusal per field."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from torch_dflash.config import DefaultRope, DraftLayer, Llama3Rope, YarnRope
from torch_dflash.config_reader import (
    check_pair,
    default_target_layer_ids,
    read_drafter_config,
    read_target_config,
)
from torch_dflash.errors import InputError

GOLDEN = Path(__file__).parent / "golden"
ABSENT = object()
FULL, CAUSAL = DraftLayer(causal=False, window=None), DraftLayer(causal=True, window=None)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def golden(pair: str, role: str) -> dict:
    return json.loads((GOLDEN / pair / role / "config.json").read_text())


def write(folder: Path, base: dict, changes: dict, generation: dict | None = None) -> Path:
    """`changes` replaces fields of `base`; ABSENT removes one; a dict for dflash_config is merged into it."""
    config = dict(base)
    for name, value in changes.items():
        if name == "dflash_config" and isinstance(value, dict):
            value = {**base[name], **value}
            value = {k: v for k, v in value.items() if v is not ABSENT}
        config[name] = value
    config = {k: v for k, v in config.items() if v is not ABSENT}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def target(folder: Path, generation: dict | None = None, base: str = "qwen3-gqa", **changes):
    return read_target_config(write(folder, golden(base, "target"), changes, generation))


def drafter(folder: Path, base: str = "qwen3-gqa", **changes):
    return read_drafter_config(write(folder, golden(base, "draft"), changes))


def test_default_layer_ids_match_the_original() -> None:
    for depth, taps, ids in json.loads((GOLDEN / "layer_ids.json").read_text())["rows"]:
        assert default_target_layer_ids(depth, taps) == tuple(ids)
    assert default_target_layer_ids(36, 5) == (1, 9, 17, 25, 33)


def test_golden_qwen3_target() -> None:
    config = read_target_config(GOLDEN / "qwen3-gqa" / "target")
    assert (config.architecture, config.num_layers, config.vocab_size) == ("qwen3", 6, 256)
    assert (config.context_limit, config.tie_word_embeddings, config.eos_token_ids) == (512, True, (0,))
    block = config.block
    assert (block.hidden_size, block.intermediate_size) == (64, 96)
    assert (block.num_heads, block.num_kv_heads, block.head_dim) == (4, 2, 32)
    assert (block.rms_norm_eps, block.attention_bias, block.mlp_bias, block.qk_norm) == (
        1e-6,
        False,
        False,
        True,
    )
    assert config.rope == DefaultRope(10000.0)


def test_golden_llama_target() -> None:
    config = read_target_config(GOLDEN / "llama3-rope" / "target")
    assert (config.architecture, config.block.qk_norm, config.tie_word_embeddings) == ("llama", False, False)
    assert config.rope == Llama3Rope(500000.0, 8.0, 1.0, 4.0, 64)


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
    check_pair(read_target_config(GOLDEN / pair / "target"), config)


@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN])
def test_rope_forms_are_equivalent(tmp_path: Path, scaling: dict | None) -> None:
    old = target(tmp_path, rope_theta=1e6, rope_scaling=scaling)
    parameters = {"rope_type": "default", **(scaling or {}), "rope_theta": 1e6}
    new = target(tmp_path, rope_theta=ABSENT, rope_scaling=ABSENT, rope_parameters=parameters)
    both = target(tmp_path, rope_theta=1e6, rope_scaling=scaling, rope_parameters=parameters)
    assert old == new == both
    if scaling is not None:
        spelled = {("type" if k == "rope_type" else k): v for k, v in scaling.items()}
        assert target(tmp_path, rope_theta=1e6, rope_scaling=spelled) == old
        assert target(tmp_path, rope_theta=ABSENT, rope_scaling={**scaling, "rope_theta": 1e6}) == old


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"attention_factor": 0.8},
        {"mscale": 1.2},
        {"mscale": 1.2, "mscale_all_dim": 0.7},
        {"mscale": 1.2, "mscale_all_dim": 0},
        {"factor": 1.0},
        {"beta_fast": 20, "beta_slow": 2, "truncate": False},
    ],
)
def test_yarn_resolves_as_transformers_does(tmp_path: Path, extra: dict) -> None:
    scaling = {**YARN, **extra}
    rope = target(tmp_path, rope_scaling=scaling).rope
    assert isinstance(rope, YarnRope)
    hf = Qwen3Config(head_dim=32, max_position_embeddings=512, rope_parameters={**scaling, "rope_theta": 10000.0})
    _, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](hf, "cpu")
    assert math.isclose(rope.attention_factor, attention_factor, rel_tol=1e-12)
    assert rope.truncate is extra.get("truncate", True)
    assert (rope.beta_fast, rope.beta_slow) == (extra.get("beta_fast", 32), extra.get("beta_slow", 1))


def test_absent_fields_follow_transformers(tmp_path: Path) -> None:
    names = ["tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act", "pretraining_tp"]
    absent = dict.fromkeys([*names, "num_key_value_heads", "head_dim"], ABSENT)
    config = target(tmp_path, base="llama3-rope", **absent)
    hf = LlamaConfig(hidden_size=64, num_attention_heads=4)
    assert (config.block.num_kv_heads, config.block.head_dim) == (hf.num_key_value_heads, hf.head_dim)
    assert config.tie_word_embeddings is hf.tie_word_embeddings is Qwen3Config().tie_word_embeddings is False
    assert (config.block.attention_bias, config.block.mlp_bias) == (hf.attention_bias, hf.mlp_bias)


def test_explicit_head_dim_need_not_divide(tmp_path: Path) -> None:
    assert target(tmp_path, hidden_size=60, num_attention_heads=8, head_dim=32).block.head_dim == 32


@pytest.mark.parametrize(
    ("own", "generation", "ids"),
    [
        (7, None, (7,)),
        ([7, 8], {"eos_token_id": [8, 9]}, (7, 8, 9)),
        (None, {"eos_token_id": 3}, (3,)),
        (None, {}, ()),
    ],
)
def test_eos_ids_are_the_union(tmp_path: Path, own: object, generation: dict | None, ids: tuple) -> None:
    assert target(tmp_path, generation, eos_token_id=own).eos_token_ids == ids


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "architectures", "MistralForCausalLM"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "architectures", "Qwen3MoeForCausalLM"),
        ({"architectures": ["Qwen3_5ForCausalLM"]}, "architectures", "Qwen3_5ForCausalLM"),
        ({"architectures": ABSENT}, "architectures", "is missing"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures", "list"),
        ({"model_type": "qwen2"}, "model_type", "qwen2"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config", "awq"),
        ({"use_sliding_window": True}, "use_sliding_window", "true"),
        ({"layer_types": ["sliding_attention"] * 6}, "layer_types", "sliding_attention"),
        ({"hidden_act": "gelu"}, "hidden_act", "gelu"),
        ({"hidden_size": "64"}, "hidden_size", '"64"'),
        ({"hidden_size": 64.0}, "hidden_size", "64.0"),
        ({"num_attention_heads": 0}, "num_attention_heads", "0"),
        ({"num_attention_heads": True}, "num_attention_heads", "true"),
        ({"num_hidden_layers": -1}, "num_hidden_layers", "-1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "3"),
        ({"vocab_size": ABSENT}, "vocab_size", "is missing"),
        ({"max_position_embeddings": None}, "max_position_embeddings", "null"),
        ({"rms_norm_eps": ABSENT}, "rms_norm_eps", "is missing"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps", "NaN"),
        ({"rms_norm_eps": 0}, "rms_norm_eps", "0"),
        ({"head_dim": ABSENT}, "head_dim", "is missing"),
        ({"head_dim": 31}, "head_dim", "31"),
        ({"attention_bias": "no"}, "attention_bias", "no"),
        ({"mlp_bias": True}, "mlp_bias", "true"),
        ({"eos_token_id": "</s>"}, "eos_token_id", "</s>"),
        ({"eos_token_id": [1, -1]}, "eos_token_id", "-1"),
        ({"rope_theta": ABSENT}, "rope_theta", "rope_parameters.rope_theta"),
        ({"rope_theta": "1e4"}, "rope_theta", "1e4"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta", "500000.0"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type", "linear"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type", "dynamic"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_type", "is missing"),
        ({"rope_scaling": {**YARN, "type": "linear"}}, "type", "yarn"),
        ({"rope_scaling": {**YARN, "factor": ABSENT}}, "factor", "is missing"),
        ({"rope_scaling": {**YARN, "factor": "4"}}, "factor", '"4"'),
        ({"rope_scaling": {**YARN, "beta_slow": 64}}, "beta_fast", "64"),
        ({"rope_scaling": {**YARN, "truncate": 1}}, "truncate", "1"),
        ({"rope_scaling": {**YARN, "attn_factor": 2}}, "attn_factor", "2"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor", "1.0"),
        ({"rope_scaling": YARN, "rope_parameters": {**LLAMA3}}, "rope_scaling", "yarn"),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 64},
            "original_max_position_embeddings",
            "64",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5"),
    ],
)
def test_target_refusals(tmp_path: Path, changes: dict, field: str, value: str) -> None:
    if isinstance(changes.get("rope_scaling"), dict):
        changes = {
            **changes,
            "rope_scaling": {k: v for k, v in changes["rope_scaling"].items() if v is not ABSENT},
        }
    with pytest.raises(InputError) as error:
        target(tmp_path, **changes)
    assert_line(error.value, str(tmp_path / "config.json"), field, value)


def test_llama_refusals(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="pretraining_tp is 2;"):
        target(tmp_path, base="llama3-rope", pretraining_tp=2)
    with pytest.raises(InputError, match="head_dim is missing; hidden_size 64 / num_attention_heads 6"):
        target(tmp_path, base="llama3-rope", head_dim=ABSENT, num_attention_heads=6)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json: not found"):
        read_target_config(tmp_path)
    for text in ("{", "[1]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InputError, match=r"config\.json: .*JSON"):
            read_drafter_config(tmp_path)


def assert_line(error: InputError, *parts: str) -> None:
    message = str(error)
    assert "\n" not in message
    for part in parts:
        assert part in message


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
        ({"architectures": ["DFlash2DraftModel"]}, "architectures", "DFlash2DraftModel"),
        ({"architectures": ["MuseGlimmerAssistantForCausalLM"]}, "architectures", "MuseGlimmer"),
        ({"speculators_model_type": "dflash", "architectures": ABSENT}, "speculators_model_type", "dflash"),
        ({"quantization_config": {"quant_algo": "FP8"}}, "quantization_config", "FP8"),
        ({"dflash_config": {"projector_type": "domino"}}, "projector_type", "domino"),
        ({"dflash_config": {"selector_rank": 16}}, "selector_rank", "16"),
        ({"dflash_config": {"output_multiplier": 0.5}}, "output_multiplier", "0.5"),
        ({"final_logit_softcapping": 15.0}, "final_logit_softcapping", "15.0"),
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
        check_pair(read_target_config(GOLDEN / "qwen3-gqa" / "target"), replace(base, **changes))
    assert_line(error.value, field, value)


def test_pair_refuses_another_hidden_size() -> None:
    base = read_drafter_config(GOLDEN / "qwen3-gqa" / "draft")
    wide = replace(base, block=replace(base.block, hidden_size=128))
    with pytest.raises(InputError, match="drafter hidden_size is 128, but the target's hidden_size is 64"):
        check_pair(read_target_config(GOLDEN / "qwen3-gqa" / "target"), wide)
