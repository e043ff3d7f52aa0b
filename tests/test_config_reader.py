"""A target's config.json in, dataclass out: both RoPE forms, and one refusal per field."""

import math
from pathlib import Path

import pytest
from config_files import ABSENT, GOLDEN, assert_line, target
from transformers import LlamaConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from torch_dflash.config import DefaultRope, Llama3Rope, YarnRope
from torch_dflash.config_reader import read_drafter_config, read_target_config
from torch_dflash.errors import InputError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


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
