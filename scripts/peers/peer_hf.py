"""Hugging Face transformers as a peer: plain `generate`, or with its DFlash candidate generator."""

import json
from pathlib import Path

import torch
from passes import Passes
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from worker import Answer, Job

# Names of DFlash's tensors in transformers, where they are not z-lab's.
RENAMED = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
SECOND = ("candidate_selector.", "_conv.")  # DFlash 2's
SAME = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "rms_norm_eps", "max_position_embeddings", "layer_types"),
)


def load(job: Job) -> Answer:
    torch.set_num_threads(job.threads)
    dtype = getattr(torch, job.dtype)
    target = AutoModelForCausalLM.from_pretrained(job.target, dtype=dtype).eval()
    passes = Passes(target)
    options = {"max_new_tokens": job.max_new_tokens, "do_sample": False}
    options |= {"eos_token_id": job.stop_ids or None, "pad_token_id": 0}
    if job.method == "dflash":
        drafter = assistant(Path(job.draft), job.drafter).to(dtype)
        options |= {"assistant_model": drafter, "speculation_type": "dflash"}

    def answer(prompt_ids: list[int]) -> tuple[list[int], int]:
        ids, before = torch.tensor([prompt_ids]), passes.count
        with torch.inference_mode():
            out = target.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return out[0, len(prompt_ids) :].tolist(), passes.count - before - 1

    return answer


def assistant(folder: Path, drafter: dict) -> MuseGlimmerAssistantModel:
    """A drafter in z-lab's layout as the only class of transformers with DFlash's layers. Of a DFlash 2 drafter the
    selector is left out, which it does not have; it has no convolutions either."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # A bidirectional window counts its edge in; without a window the number has no meaning.
    window = raw["sliding_window"] - 1 if raw.get("use_sliding_window") else 1
    rope = {"rope_type": "default", "rope_theta": raw["rope_theta"], **(raw.get("rope_scaling") or {})}
    config = MuseGlimmerAssistantConfig(
        **{name: raw[name] for name in SAME}, **drafter, sliding_window=window, rope_parameters=rope
    )
    model = MuseGlimmerAssistantModel(config).eval()
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if "_conv." in name:
            assert (tensor == name.endswith("base_kernel")).all(), "transformers has no convolutions"
    first = {name: tensor for name, tensor in weights.items() if not any(part in name for part in SECOND)}
    model.load_state_dict({RENAMED.get(name, name): tensor for name, tensor in first.items()})
    return model
