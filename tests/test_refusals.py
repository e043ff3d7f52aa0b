"""What is not supported is refused by name: the line says which field gave it away, and what it is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from config_files import assert_line, drafter, target
from layout_files import muse_config, speculators_config, tensors_of, write_pair, write_speculators
from safetensors.torch import save_file

from torch_dflash import InputError, load_pair
from torch_dflash.config_reader import read_drafter_config, read_target_config

RECURRENT, EXPERTS, QUANTISED = "hybrid and recurrent targets", "mixture-of-experts targets", "quantised weights"


@pytest.mark.parametrize(
    ("changes", "field", "reason"),
    [
        ({"architectures": ["Qwen3NextForCausalLM"]}, "architectures", RECURRENT),
        ({"architectures": ["Qwen3_5ForConditionalGeneration"]}, "architectures", RECURRENT),
        ({"architectures": ["Qwen3_5MoeForCausalLM"]}, "architectures", RECURRENT),
        ({"architectures": ["MambaForCausalLM"]}, "architectures", RECURRENT),
        ({"architectures": ["Mamba2ForCausalLM"]}, "architectures", RECURRENT),
        ({"architectures": ["JambaForCausalLM"]}, "architectures", RECURRENT),
        ({"architectures": ["NemotronHForCausalLM"]}, "architectures", RECURRENT),
        ({"architectures": ["FalconH1ForCausalLM"]}, "architectures", RECURRENT),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "architectures", EXPERTS),
        ({"architectures": ["MixtralForCausalLM"]}, "architectures", EXPERTS),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "architectures", EXPERTS),
        ({"architectures": ["GptOssForCausalLM"]}, "architectures", EXPERTS),
        ({"architectures": ["Gemma3ForCausalLM"]}, "architectures", "the target must be one of LlamaForCausalLM"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "architectures", "the target must be one of LlamaForCausalLM"),
        ({"architectures": ["DFlashDraftModel"]}, "architectures", "the target must be one of LlamaForCausalLM"),
        ({"layer_types": ["linear_attention"] * 6}, "layer_types", RECURRENT),
        ({"layer_types": ["full_attention"] * 5 + ["mamba"]}, "layer_types", RECURRENT),
        ({"rope_theta": 1.0}, "rope_theta", "it must be above 1"),
        ({"num_hidden_layers": 1025}, "num_hidden_layers", "1..1024"),
        ({"vocab_size": 2**24 + 1}, "vocab_size", "1..16777216"),
        ({"hidden_size": 2**31 - 1, "intermediate_size": 2**31 - 1}, "hidden_size", "1..16777216"),
        ({"num_experts": 128}, "num_experts", EXPERTS),
        ({"num_local_experts": 8}, "num_local_experts", EXPERTS),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config", QUANTISED),
        ({"compression_config": {"format": "int-quantized"}}, "compression_config", QUANTISED),
        ({"quantization": {"group_size": 64, "bits": 4}}, "quantization", QUANTISED),
    ],
)
def test_targets(changes: dict[str, Any], field: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        target(tmp_path, **changes)
    assert_line(error.value, str(tmp_path / "config.json"), f"{field} is", reason)


V1 = "the drafter must be a DFlash drafter"


@pytest.mark.parametrize(
    ("changes", "field", "reason"),
    [
        ({"dflash_config": {"selector_rank": 256}}, "selector_rank", "it belongs to DFlash2DraftModel"),
        ({"dflash_config": {"conv_kernel_size": 2}}, "conv_kernel_size", "it belongs to DFlash2DraftModel"),
        ({"selector_top_k": 16}, "selector_top_k", "it belongs to DFlash2DraftModel"),
        ({"conv_group_size": 64}, "conv_group_size", "it belongs to DFlash2DraftModel"),
        ({"output_multiplier": -0.5}, "output_multiplier", "> 0"),
        ({"dflash_config": {"input_embedding_scale": "2"}}, "input_embedding_scale", "> 0"),
        ({"dflash_config": {"final_logit_softcapping": -30.0}}, "final_logit_softcapping", ">= 0"),
        ({"dflash_config": {"projector_type": "dspark"}}, "projector_type", "not part of DFlash v1"),
        ({"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias", "not part of DFlash v1"),
        ({"markov_rank": 64}, "markov_rank", "not part of DFlash v1"),
        ({"dflash_config": {"use_swa": True}}, "swa_window_size", "is missing"),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 7}}, "swa_window_size", "below block_size"),
        ({"dflash_config": {"swa_window_size": 64}}, "swa_window_size", "without use_swa"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "architectures", "this is an EAGLE head"),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, "architectures", "this is an EAGLE head"),
        ({"architectures": ["DSparkDraftModel"]}, "architectures", "this is a DSpark drafter"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures", V1),
        ({"architectures": ["MuseGlimmerForCausalLM"]}, "architectures", V1),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, "quantization_config", QUANTISED),
    ],
)
def test_drafters(changes: dict[str, Any], field: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        drafter(tmp_path, **changes)
    assert_line(error.value, str(tmp_path / "config.json"), field, reason)


@pytest.mark.parametrize(
    ("changes", "field", "reason"),
    [
        ({"speculators_model_type": "eagle3"}, "speculators_model_type", "this is an EAGLE head"),
        ({"speculators_model_type": "dspark"}, "speculators_model_type", "this is a DSpark drafter"),
        ({"speculators_model_type": 3}, "speculators_model_type", V1),
        ({"architectures": ["DFlash2Speculator"]}, "architectures", "a DFlash 2 drafter in another layout"),
        ({"sample_from_anchor": True}, "sample_from_anchor", "at the mask positions only"),
        ({"transformer_layer_config": None}, "transformer_layer_config", "describes the drafter's layers"),
        ({"aux_hidden_state_layer_ids": [0, 1]}, "aux_hidden_state_layer_ids", "0 is the embedding"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids", "list of layer numbers"),
        ({"aux_hidden_state_layer_ids": [2, 2]}, "target_layer_ids", "distinct"),
        ({"draft_vocab_size": 13}, "draft_vocab_size", "1..12"),
        ({"draft_vocab_size": None}, "draft_vocab_size", "1..12"),
        ({"mask_token_id": None}, "mask_token_id", "is null"),
        ({"block_size": None}, "block_size", "is null"),
        ({"target_hidden_size": 64}, "target_hidden_size", "the drafter's own hidden_size"),
        ({"hidden_size": 64}, "hidden_size", "differs from transformer_layer_config.hidden_size"),
        ({"quantization_config": {}}, "quantization_config", QUANTISED),
        ({"selector_rank": 256}, "selector_rank", "not part of DFlash v1"),
        ({"output_multiplier": 0.5}, "output_multiplier", "not part of DFlash v1"),
        ({"markov_rank": 256}, "markov_rank", "not part of DFlash v1"),
    ],
)
def test_speculators(changes: dict[str, Any], field: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(speculators_config() | changes))
    with pytest.raises(InputError) as error:
        read_drafter_config(tmp_path)
    assert_line(error.value, str(tmp_path / "config.json"), field, reason)


@pytest.mark.parametrize(
    ("changes", "field", "reason"),
    [
        ({"model_type": "qwen3"}, "model_type", "muse_glimmer_assistant"),
        ({"target_layer_ids": None}, "target_layer_ids", "must name it"),
        ({"layer_types": None}, "layer_types", "must name it"),
        ({"rope_parameters": None}, "rope_theta", "is missing"),
        ({"block_size": None}, "block_size", "is null"),
        ({"mask_token_id": -1}, "mask_token_id", "-1"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": None}, "sliding_window", "is null"),
        ({"dflash_config": {"selector_rank": 4}}, "selector_rank", "not part of DFlash v1"),
    ],
)
def test_muse(changes: dict[str, Any], field: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(muse_config(**changes)))
    with pytest.raises(InputError) as error:
        read_drafter_config(tmp_path)
    assert_line(error.value, str(tmp_path / "config.json"), field, reason)


def test_what_only_the_pair_can_tell(tmp_path: Path) -> None:
    """The raw output of the last layer, a mask beyond the vocabulary, a layer too deep."""
    pair = write_pair(tmp_path)
    for changes, part in (
        ({"aux_hidden_state_layer_ids": [1, 3]}, r"aux_hidden_state_layer_ids name 3, the last layer's output"),
        ({"aux_hidden_state_layer_ids": [1, 4]}, r"target_layer_ids are \[0, 3\]"),
    ):
        with pytest.raises(InputError, match=part):
            load_pair(pair / "target", write_speculators(pair, tmp_path / "spec", **changes))
    (tmp_path / "muse").mkdir()
    (tmp_path / "muse" / "config.json").write_text(json.dumps(muse_config(mask_token_id=12)))
    with pytest.raises(InputError, match="mask_token_id is 12, but the target's vocab_size is 12"):
        load_pair(pair / "target", tmp_path / "muse")


@pytest.mark.parametrize("role", ["target", "draft"])
def test_quantised_files(role: str, tmp_path: Path) -> None:
    """Without a word in config.json: Model-Optimizer's own file, and tensors of 8 bits."""
    pair = write_pair(tmp_path)
    tensors = tensors_of(pair / role)
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    save_file(tensors | {name: torch.zeros(tensors[name].shape, dtype=torch.int8)}, pair / role / "model.safetensors")
    with pytest.raises(InputError, match=f"tensor {name} has dtype I8; .* use the unquantised checkpoint"):
        load_pair(pair / "target", pair / "draft")
    (pair / role / "hf_quant_config.json").write_text("{}")
    with pytest.raises(InputError, match=r"hf_quant_config\.json: quantised weights are not supported"):
        (read_target_config if role == "target" else read_drafter_config)(pair / role)
