"""vLLM's real engine on CPU JAX with the plugin: the text is that of plain greedy decoding, and the proposals are those
of a drafter that recomputes its whole context in eager torch. Run by scripts/test-vllm, which makes the environment."""

import functools
import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.engine", reason="vLLM is not in this environment: run scripts/test-vllm")
sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers import load, write_drafter, write_target

from torch_dflash.reference import draft_logits, target_pass

DRIVE = Path(__file__).with_name("drive.py")
PLAIN = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "vocab_size": 16,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
    "eos_token_id": 15,
}
DRAFT = PLAIN | {"num_target_layers": 3, "num_hidden_layers": 2, "block_size": 5}
DRAFT["dflash_config"] = {"mask_token_id": 14, "target_layer_ids": [1, 0]}
ENGINE = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 16,
    "enable_prefix_caching": False,
    "async_scheduling": False,
}
LEAST = 0.98  # of the proposals equal; the rest are near ties, which are printed


@dataclass(frozen=True)
class Outcome:
    """What drive.py wrote."""

    answers: list[dict[str, Any]]
    proposals: list[dict[str, Any]]
    metrics: dict[str, Any]

    @property
    def texts(self) -> list[list[int]]:
        return [answer["new"] for answer in self.answers]


@functools.cache
def pair(changes: str) -> Path:
    """Folders of a random pair; `changes`: JSON for both configs, "draft" for the drafter's alone."""
    import tempfile

    folder, both = Path(tempfile.mkdtemp()), json.loads(changes)
    own = both.pop("draft", {})
    write_target(folder / "target", **(PLAIN | both))
    write_drafter(folder / "draft", **(DRAFT | both | own))
    return folder


def prompts(lengths: list[int], seed: int = 0, shared: int = 0) -> list[dict[str, Any]]:
    """Random ones, the first `shared` ids the same in all."""
    source = random.Random(seed)
    head = [source.randrange(14) for _ in range(shared)]
    new = [12, 17, 30, 25, 9, 21]
    return [
        {"ids": head + [source.randrange(14) for _ in range(length)], "new_tokens": new[i % len(new)]}
        for i, length in enumerate(lengths)
    ]


def run(
    folder: Path,
    batches: list[list[dict[str, Any]]],
    tmp: Path,
    drafts: int | None = 4,
    fault: str | None = None,
    environment: dict[str, str] | None = None,
    **engine: Any,
) -> Outcome:
    """One engine; drafts: num_speculative_tokens, None for no speculation."""
    draft = None
    if drafts is not None:
        draft = {"method": "dflash", "model": str(folder / "draft"), "num_speculative_tokens": drafts}
    options = ENGINE | {"model": str(folder / "target")} | engine
    spec, result = tmp / "spec.json", tmp / "result.json"
    spec.write_text(json.dumps({"engine": options, "draft": draft, "fault": fault, "batches": batches}))
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "SKIP_JAX_PRECOMPILE": "1"} | (environment or {})
    command = [sys.executable, str(DRIVE), str(spec), str(result)]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=False)
    log = [line for line in (done.stdout + done.stderr).splitlines() if "leaked" not in line]
    (tmp / "log").write_text("\n".join(log))
    assert done.returncode == 0, "\n".join(log[-60:])
    return Outcome(**json.loads(result.read_text()))


def agreement(folder: Path, outcome: Outcome, dtype: torch.dtype = torch.float32) -> float:
    """Share of single drafts that equal the full recompute's; the others' gaps in logits are printed."""
    loaded = load(folder, dtype="float32")
    sequences = {answer["request"]: answer["prompt"] + answer["new"] for answer in outcome.answers}
    equal, gaps = 0, list[float]()
    for row in outcome.proposals:
        name = next(name for name in sequences if row["request"].split("-")[0] == name)
        ids, context = sequences[name], row["context"]
        if context >= len(ids) or ids[context] != row["anchor"]:  # behind the last token that was asked for
            assert context >= len(ids), f"anchor {row['anchor']} at {context} is not the text's {ids[context]}"
            continue
        _, features = target_pass(loaded.target, ids[:context], loaded.config.target_layer_ids)
        logits = draft_logits(loaded.target, loaded.drafter, loaded.config, features, row["anchor"])
        for position, draft in enumerate(row["drafts"]):
            best = logits[position].max()
            gap = float(best - logits[position, draft])
            equal += gap == 0
            gaps += [gap] if gap else []
    if gaps:
        print(f"{len(gaps)} of {equal + len(gaps)} drafts differ, gaps in logits {sorted(gaps)[-5:]}")
    assert equal + len(gaps) > 50
    return equal / (equal + len(gaps))


def check(folder: Path, batches: list[list[dict[str, Any]]], tmp: Path, **options: Any) -> Outcome:
    """Against the same engine without speculation, and against the full recompute."""
    outcome = run(folder, batches, tmp, **options)
    options.pop("drafts", None)
    assert outcome.texts == run(folder, batches, tmp, drafts=None, **options).texts
    assert agreement(folder, outcome) >= LEAST
    return outcome


def test_several_requests_in_chunks(tmp_path: Path) -> None:
    """Six requests for four rows, prompts longer than a step."""
    outcome = check(pair("{}"), [prompts([40, 3, 17, 60, 1, 33])], tmp_path)
    print(outcome.metrics)
    per_position = outcome.metrics["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert len(per_position) == 4 and per_position[0] > 0
    assert sorted(per_position, reverse=True) == per_position
