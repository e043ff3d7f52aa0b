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

from helpers import BYTES_PAIR, write_drafter, write_target

import torch_dflash
from torch_dflash.config import DrafterConfig
from torch_dflash.hub import resolve_draft, resolve_target
from torch_dflash.models.drafter import Drafter
from torch_dflash.models.target import Target
from torch_dflash.pair import load_drafter, load_target
from torch_dflash.reference import draft_hidden, draft_logits, draft_scores, target_pass
from torch_dflash.tokenizer import as_chat, encode_prompt, load_tokenizer

DRIVE = Path(__file__).with_name("drive.py")
ENGINE = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,  # of which vLLM keeps max_num_seqs * (drafts - 1) for drafts
    "block_size": 16,
    "enable_prefix_caching": False,
    "async_scheduling": False,
}
LEAST = 0.98  # of the proposals equal; the rest are near ties, which are printed
PROSE = (
    b"def total(prices):\n    return sum(price for price in prices)\n\nclass Account:\n    def __init__(self, owner):\n"
)
ARITHMETIC = Path(torch_dflash.__file__).parent / "data" / "prompts" / "arithmetic.jsonl"
TINY = {  # a random pair: vocabulary so small that drafts are right now and then
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "vocab_size": 16,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
    "eos_token_id": 15,
}
DRAFT = {
    "num_target_layers": 3,
    "num_hidden_layers": 2,
    "block_size": 5,
    "dflash_config": {"mask_token_id": 14, "target_layer_ids": [1, 0]},
}


@dataclass(frozen=True)
class Outcome:
    """What drive.py wrote."""

    answers: list[dict[str, Any]]
    proposals: list[dict[str, Any]]
    metrics: dict[str, Any]

    @property
    def texts(self) -> list[list[int]]:
        return [answer["new"] for answer in self.answers]


@dataclass(frozen=True)
class Eager:
    """A pair as eager modules."""

    target: Target
    drafter: Drafter
    config: DrafterConfig


@dataclass(frozen=True)
class Folders:
    """A pair on disk; drafts: its block_size - 1; vocabulary: ids that prompts may have."""

    target: Path
    draft: Path
    drafts: int
    vocabulary: int


BYTES = Folders(BYTES_PAIR / "target", BYTES_PAIR / "draft", 15, 256)


def random_pair(folder: Path, **changes: Any) -> Folders:
    """`changes`: to the drafter's config."""
    write_target(folder / "target", **TINY)
    write_drafter(folder / "draft", **(TINY | DRAFT | changes))
    return Folders(folder / "target", folder / "draft", 4, 14)


def prompts(folders: Folders, lengths: list[int], shared: int = 0) -> list[dict[str, Any]]:
    """Code for the pair that knows bytes, else noise; the first `shared` ids are the same in all."""
    source, new = random.Random(7), [24, 40, 9, 33, 60, 17]
    text = list(PROSE * 3) if folders is BYTES else [source.randrange(folders.vocabulary) for _ in range(400)]
    starts = [source.randrange(60) for _ in lengths]
    return [
        {"ids": text[:shared] + text[start : start + length], "new_tokens": new[i % len(new)]}
        for i, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]


def run(
    folders: Folders,
    batches: list[list[dict[str, Any]]],
    tmp: Path,
    speculative: bool = True,
    fault: str | None = None,
    environment: dict[str, str] | None = None,
    **engine: Any,
) -> Outcome:
    """One engine, with speculation or without. `environment` is the process's, `engine` are options of vllm.LLM."""
    draft = None
    if speculative:
        draft = {"method": "dflash", "model": str(folders.draft), "num_speculative_tokens": folders.drafts}
    options = ENGINE | {"model": str(folders.target)} | engine
    tmp = tmp / f"run{sum(1 for _ in tmp.glob('run*'))}"
    tmp.mkdir()
    spec, result = tmp / "spec.json", tmp / "result.json"
    spec.write_text(json.dumps({"engine": options, "draft": draft, "fault": fault, "batches": batches}))
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "SKIP_JAX_PRECOMPILE": "1"} | (environment or {})
    command = [sys.executable, str(DRIVE), str(spec), str(result)]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=False)
    log = [line for line in (done.stdout + done.stderr).splitlines() if "leaked" not in line]
    (tmp / "log").write_text("\n".join(log))
    assert done.returncode == 0, "\n".join(log[-60:])
    return Outcome(**json.loads(result.read_text()))


def agreement(folders: Folders, outcome: Outcome) -> float:
    """Share of single drafts that equal the full recompute's, in float32; the others' gaps in logits are printed."""
    loaded = load_pair_eagerly(folders)
    sequences = {answer["request"]: answer["prompt"] + answer["new"] for answer in outcome.answers}
    gaps = list[float]()
    for row in outcome.proposals:
        ids, context = sequences[row["request"].split("-")[0]], row["context"]
        if context >= len(ids):  # behind the last token that was asked for
            continue
        assert ids[context] == row["anchor"], f"the text has {ids[context]} at {context}"
        _, features = target_pass(loaded.target, ids[:context], loaded.config.target_layer_ids)
        hidden = draft_hidden(loaded.target, loaded.drafter, loaded.config, features, row["anchor"])
        logits, drafts = draft_logits(loaded.target, loaded.drafter, loaded.config, hidden), row["drafts"]
        before = torch.tensor([row["anchor"], *drafts[:-1]])
        places = hidden[: len(drafts)], logits[: len(drafts)]
        scores = draft_scores(loaded.drafter, loaded.config, *places, before)
        gaps += (scores.max(-1).values - scores[range(len(drafts)), drafts]).tolist()
    assert len(gaps) > 100
    wrong = sorted(gap for gap in gaps if gap > 0)
    print(f"{len(gaps)} drafts, {len(wrong)} others than the full recompute's, largest gaps in logits {wrong[-3:]}")
    return 1 - len(wrong) / len(gaps)


@functools.cache
def load_pair_eagerly(folders: Folders) -> Eager:
    config, drafter = load_drafter(folders.draft, torch.float32)
    return Eager(load_target(folders.target, torch.float32)[1], drafter, config)


def check(folders: Folders, batches: list[list[dict[str, Any]]], tmp: Path, **options: Any) -> Outcome:
    """Against the same engine without speculation, and against the full recompute."""
    outcome = run(folders, batches, tmp, **options)
    assert outcome.texts == run(folders, batches, tmp, speculative=False, **options).texts
    assert agreement(folders, outcome) >= LEAST
    return outcome


MIXED = [150, 3, 40, 170, 1, 90]  # prompts longer than a step, more of them than rows


def test_several_requests_in_chunks(tmp_path: Path) -> None:
    """Tied and padded head, head_dim that is not hidden_size / heads; acceptance by position in vLLM's metrics."""
    outcome = check(BYTES, [prompts(BYTES, MIXED)], tmp_path)
    per_position = outcome.metrics["vllm:spec_decode_num_accepted_tokens_per_pos"]
    drafted = outcome.metrics["vllm:spec_decode_num_drafts"]
    print(f"acceptance by position {[round(accepted / drafted, 2) for accepted in per_position]}")
    assert len(per_position) == BYTES.drafts and sorted(per_position, reverse=True) == per_position
    assert sum(per_position) > drafted, "this drafter has more than one draft accepted a step"


def test_async_scheduling(tmp_path: Path) -> None:
    check(BYTES, [prompts(BYTES, MIXED)], tmp_path, async_scheduling=True)


def test_prefix_caching_with_hits(tmp_path: Path) -> None:
    """The second and third batch find the first one's pages, contexts in them."""
    batches = [prompts(BYTES, [20, 30, 40], shared=100)] * 2 + [prompts(BYTES, [5, 50], shared=70)]
    outcome = check(BYTES, batches, tmp_path, enable_prefix_caching=True)
    assert outcome.metrics["vllm:prefix_cache_hits"] > 300


def test_two_devices(tmp_path: Path) -> None:
    """Heads spread over the model axis."""
    check(BYTES, [prompts(BYTES, MIXED)], tmp_path, tensor_parallel_size=2)


@pytest.mark.parametrize("devices", [1, 2])
def test_compiled_ahead_and_never_again(devices: int, tmp_path: Path) -> None:
    """Upstream compiles everything at start, for bf16; afterwards a compilation would be an error."""
    environment = {"SKIP_JAX_PRECOMPILE": "0", "VLLM_XLA_CHECK_RECOMPILATION": "1"}
    options = {"environment": environment, "dtype": "bfloat16", "tensor_parallel_size": devices}
    outcome = run(BYTES, [prompts(BYTES, MIXED)], tmp_path, **options)
    assert agreement(BYTES, outcome) >= LEAST


def test_engine_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The plugin is found by its entry point there. What was accepted says that the drafts are the same."""
    here = run(BYTES, [prompts(BYTES, MIXED)], tmp_path)
    there = run(BYTES, [prompts(BYTES, MIXED)], tmp_path, environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    assert there.texts == here.texts and not there.proposals
    assert there.metrics["vllm:spec_decode_num_accepted_tokens"] == here.metrics["vllm:spec_decode_num_accepted_tokens"]


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, "sliding_window": 24},
        {"is_causal": True},
    ],
    ids=["window and full", "causal"],
)
def test_other_drafters_and_an_untied_head(changes: dict[str, Any], tmp_path: Path) -> None:
    """And taps that the drafter wants in another order than the target's."""
    pair = random_pair(tmp_path, **changes)
    check(pair, [prompts(pair, [40, 3, 17, 60, 1, 33])], tmp_path)


@pytest.mark.parametrize("fault", ["positions + 1", "context zeroed"])
def test_planted_faults_are_caught(fault: str, tmp_path: Path) -> None:
    """By the proposals: the text stays right."""
    outcome = run(BYTES, [prompts(BYTES, [40, 60, 80])], tmp_path, fault=fault)
    assert agreement(BYTES, outcome) < LEAST


@pytest.mark.parametrize(("dtype", "least"), [("float32", LEAST), ("bfloat16", 0.95)])
def test_the_shipped_pair(dtype: str, least: float, tmp_path: Path) -> None:
    """SmolLM2: heads of 64 numbers, a Llama target of 30 layers. In bf16 near ties fall either way."""
    shipped = Folders(resolve_target("default"), resolve_draft("default"), 7, 0)
    tokenizer, lines = load_tokenizer(shipped.target), ARITHMETIC.read_text().splitlines()[:4]
    asked = [as_chat(json.loads(line)["turns"][0], tokenizer) for line in lines]
    ask = [{"ids": encode_prompt(prompt, tokenizer, 49152), "new_tokens": 64} for prompt in asked]
    outcome = run(shipped, [ask], tmp_path, dtype=dtype)
    per_position = outcome.metrics["vllm:spec_decode_num_accepted_tokens_per_pos"]
    print(f"tau {1 + sum(per_position) / outcome.metrics['vllm:spec_decode_num_drafts']:.2f}")
    assert agreement(shipped, outcome) >= least


def test_other_methods_are_as_before(tmp_path: Path) -> None:
    """n-gram drafts with the plugin installed."""
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
    ask = [prompts(BYTES, [100, 120])]
    outcome = run(BYTES, ask, tmp_path, speculative=False, speculative_config=ngram)
    assert outcome.metrics["vllm:spec_decode_num_drafts"] > 0 and not outcome.proposals
    assert outcome.texts == run(BYTES, ask, tmp_path, speculative=False).texts


def test_vllm_check_finds_everything() -> None:
    command = [sys.executable, "-m", "torch_dflash.cli", "vllm-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0 and "MISSING" not in done.stdout and "(tested)" in done.stdout


REFUSED = {
    "num_speculative_tokens is 16: use an integer in 1..15": {"num_speculative_tokens": 16},
    "was made for another target": {"model": None},
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_does_not_fit_is_refused_at_start(line: str, tmp_path: Path) -> None:
    """In one line, before weights move."""
    other = random_pair(tmp_path).draft
    speculative = {"method": "dflash", "model": str(BYTES.draft), "num_speculative_tokens": 4} | REFUSED[line]
    speculative["model"] = speculative["model"] or str(other)
    with pytest.raises(AssertionError):
        run(BYTES, [prompts(BYTES, [3])], tmp_path, speculative=False, speculative_config=speculative)
    log = (tmp_path / "run0" / "log").read_text()
    assert line in log and "Total time to load model weights" not in log
