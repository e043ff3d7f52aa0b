"""One run of vLLM's real engine: options and prompts in, tokens, proposals and metrics out, as JSON files.

Usage: python drive.py SPEC.json RESULT.json. SPEC: {"engine": options of vllm.LLM, "draft": speculative_config or null,
"fault": name or null, "batches": [[{"ids": [...], "new_tokens": N}, ...], ...]}; batches come one after the other.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

LOG: list[dict[str, Any]] = []  # what was proposed
STEPS: list[dict[str, Any]] = []  # what the runner handed over, and what was proposed


def record(fault: str | None) -> None:
    """Let every proposal of an engine in this process be noted, with a fault planted in it or not."""
    import torch_dflash.vllm.proposer as production

    make = production.make_proposer

    def make_recording(upstream: type) -> type:
        class Recording(make(upstream)):  # type: ignore[misc]
            def prepare_inputs(self, *args: Any) -> Any:
                (hidden, start, positions), *rest = super().prepare_inputs(*args)
                md, ids, _, sampled, next_prompt, in_prefill, rejected, num_rows = args
                STEPS.append(
                    {
                        "requests": list(self.runner.input_batch.req_ids),
                        "input_positions": md.input_positions,
                        "seq_lens": md.seq_lens,
                        "query_start_loc": md.query_start_loc,
                        "request_distribution": md.request_distribution,
                        "input_ids": ids,
                        "last_sampled_token_id": sampled,
                        "next_prompt_token_id": next_prompt,
                        "is_in_prefill": in_prefill,
                        "num_rejected_tokens": rejected,
                        "num_reqs_dp": num_rows,
                        "block_tables": rest[-1].block_tables,
                    }
                )
                if fault == "context zeroed":
                    hidden = jnp.zeros_like(hidden)
                if fault == "positions + 1":
                    positions = jnp.where(positions < 0, -1, positions + 1)
                return (hidden, start, positions), *rest

            def propose(self, kv_caches: Any, input_ids: Any, attn_metadata: Any, *rest: Any, **named: Any) -> Any:
                caches, ids = super().propose(kv_caches, input_ids, attn_metadata, *rest, **named)
                if STEPS:
                    STEPS[-1]["drafts"] = ids
                length = np.asarray(attn_metadata.seq_lens)
                anchors = np.asarray(input_ids).reshape(len(length), -1)[:, 0]
                for r, name in enumerate(self.runner.input_batch.req_ids):
                    row = {"context": int(length[r]), "anchor": int(anchors[r]), "drafts": np.asarray(ids)[r].tolist()}
                    LOG.append({"request": name, **row})
                return caches, ids

        return Recording

    production.make_proposer = make_recording


def main() -> None:
    """See the module's docstring."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":  # else they are made in another process
        record(spec["fault"])
    from vllm import LLM, SamplingParams

    options = spec["engine"]
    if spec["draft"] is not None:
        options["speculative_config"] = spec["draft"]
    engine = LLM(
        skip_tokenizer_init=True,
        compilation_config={"mode": 0},
        disable_log_stats=False,
        num_gpu_blocks_override=96,
        **options,
    )
    answers = []
    for batch in spec["batches"]:
        sampling = [
            SamplingParams(temperature=0, max_tokens=one["new_tokens"], ignore_eos=True, detokenize=False)
            for one in batch
        ]
        outputs = engine.generate([{"prompt_token_ids": one["ids"]} for one in batch], sampling, use_tqdm=False)
        answers += [
            {"request": out.request_id, "prompt": list(out.prompt_token_ids), "new": list(out.outputs[0].token_ids)}
            for out in outputs
        ]
    figures = {
        metric.name: metric.values if hasattr(metric, "values") else metric.value
        for metric in engine.get_metrics()
        if "spec_decode" in metric.name or "prefix_cache" in metric.name
    }
    Path(sys.argv[2]).write_text(json.dumps({"answers": answers, "proposals": LOG, "metrics": figures}))
    plain = [{name: np.asarray(value).tolist() for name, value in step.items()} for step in STEPS]
    Path(sys.argv[2]).with_name("steps.json").write_text(json.dumps(plain))


if __name__ == "__main__":
    main()
