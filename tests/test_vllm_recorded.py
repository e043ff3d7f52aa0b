"""What vLLM 0.26's runner handed over in a real run, and what was proposed there, played again.

Recorded by tests/vllm_engine/drive.py (`steps.json`): five requests for the bytes pair, 15 drafts, prompts in parts,
rejected drafts in the lengths, rows that end and are taken over by another request, stale rows and pages.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers import GOLDEN, golden, load
from vllm_runner import Metadata, Runner

from torch_dflash.reference import target_pass

STEPS = json.loads((GOLDEN / "vllm" / "steps-0.26.json").read_text())
PER_ROW = ("last_sampled_token_id", "next_prompt_token_id", "is_in_prefill", "num_rejected_tokens", "num_reqs_dp")


def test_the_recording_has_what_the_contract_is_about() -> None:
    """Else the next test says less than it seems to."""
    assert any(sum(step["num_rejected_tokens"]) for step in STEPS)
    assert any(sum(step["is_in_prefill"]) for step in STEPS)
    assert all(len(step["requests"]) < len(step["seq_lens"]) for step in STEPS)
    rows = {(row, name) for step in STEPS for row, name in enumerate(step["requests"])}
    assert len(rows) > len({row for row, _ in rows}), "no row was taken over"


def test_recorded_steps_give_the_recorded_proposals() -> None:
    """The taps come from the eager target; those of padding are garbage."""
    loaded = load(golden("trained-bytes"))
    runner = Runner(loaded, max_rows=len(STEPS[0]["seq_lens"]), max_tokens=0, devices=jax.devices()[:1])
    histories: dict[str, list[int]] = {}
    for step in STEPS:
        taps = features_of(step, histories, loaded)
        arrays = {name: jnp.array(step[name], jnp.int32) for name in step if name not in ("requests", "drafts")}
        runner.tables = np.array(step["block_tables"], np.int32).reshape(runner.max_rows, -1)
        fields = {name: arrays[name] for name in Metadata.__dataclass_fields__}
        metadata = Metadata(**(fields | {"block_tables": jnp.zeros_like(arrays["block_tables"])}))
        rest = (arrays[name] for name in PER_ROW)
        context, ids, last, metadata = runner.proposer.prepare_inputs(metadata, arrays["input_ids"], taps, *rest)
        runner.kv_caches, drafts = runner.proposer.propose(runner.kv_caches, ids, metadata, last, context)
        rows = len(step["requests"])
        assert np.asarray(drafts)[:rows].tolist() == step["drafts"][:rows]


def features_of(step: dict[str, Any], histories: dict[str, list[int]], loaded: Any) -> list[jax.Array]:
    """One array [T,D] for each tap, by ascending layer; `histories` gets the committed tokens of each request."""
    layers, size = sorted(loaded.config.target_layer_ids), loaded.config.block.hidden_size
    features = np.full((len(step["input_ids"]), len(layers) * size), 77, np.float32)
    borders = step["query_start_loc"]
    for row, name in enumerate(step["requests"]):
        begin, end = borders[row], borders[row + 1]
        before = histories.setdefault(name, [])
        assert step["input_positions"][begin] == len(before)
        ids = [*before, *step["input_ids"][begin:end]]
        features[begin:end] = target_pass(loaded.target, ids, tuple(layers))[1][len(before) :]
        histories[name] = ids[: len(ids) - step["num_rejected_tokens"][row]]
    return [jnp.array(part) for part in np.split(features, len(layers), axis=1)]
