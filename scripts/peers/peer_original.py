"""z-lab's original as a peer: PyPI dflash 0.1.0. Its command asks for a GPU; its functions run on a CPU too."""

import json
from pathlib import Path

import dflash.model
import torch
from passes import Passes
from transformers import AutoModelForCausalLM
from worker import Answer, Job


def load(job: Job) -> Answer:
    torch.set_num_threads(job.threads)
    dtype = getattr(torch, job.dtype)
    (name,) = json.loads((Path(job.draft) / "config.json").read_text())["architectures"]
    drafter = getattr(dflash.model, name).from_pretrained(job.draft, dtype=dtype).eval()
    target = AutoModelForCausalLM.from_pretrained(job.target, dtype=dtype).eval()
    passes = Passes(target)

    def answer(prompt_ids: list[int]) -> tuple[list[int], int]:
        before = passes.count
        with torch.inference_mode():
            out = dflash.model.dflash_generate(
                drafter, target, torch.tensor([prompt_ids]), job.max_new_tokens, job.stop_ids
            )
        return out[0, len(prompt_ids) :].tolist(), passes.count - before - 1

    return answer
