"""The doctor, mostly on the trained bytes pair: only training makes one configuration better than another."""

import copy
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import BYTES_PAIR, Loaded, changed_draft, load, prompt_of, write_drafter, write_target
from safetensors.torch import load_file, save_file

from bridge.views import take_params
from torch_dflash import reference
from torch_dflash.cli import main
from torch_dflash.config import DefaultRope, DrafterConfig, DraftLayer, Selector, YarnRope
from torch_dflash.doctor.measure import Outcome, Run, anchors_of, check_texts, compare, measure, verdict
from torch_dflash.doctor.propose import accepted_drafts, tap
from torch_dflash.doctor.report import describe_layers
from torch_dflash.doctor.texts import Text, builtin_prompts, greedy_rows, write_texts
from torch_dflash.doctor.variants import Inputs, configured, plausible_mistakes
from torch_dflash.doctor.weights import check_weights
from torch_dflash.hub import resolve_draft, resolve_target
from torch_dflash.pair import load_drafter, load_target
from torch_dflash.tokenizer import load_tokenizer
from torch_dflash.train.export import export
from torch_dflash.train.selector import with_selector
from torch_dflash.train.warm_start import widened

NEW = 96


@pytest.fixture(scope="module")
def trained() -> Loaded:
    return load(BYTES_PAIR)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(BYTES_PAIR / "target")


@pytest.fixture(scope="module")
def texts(trained: Loaded, tokenizer: Any) -> list[Text]:
    config = trained.pair.target.config
    return write_texts(trained.target, config, tokenizer, builtin_prompts(config, tokenizer)[:3], NEW)


def tried(trained: Loaded, config: DrafterConfig, tokenizer: Any, texts: list[Text]) -> Run:
    mistakes = plausible_mistakes(trained.pair.target.config, config, tokenizer, None)
    return measure(trained.target, trained.drafter, config, mistakes, texts)


def test_the_shipped_pair_is_healthy_and_text_equals_json(capsys: pytest.CaptureFixture) -> None:
    assert main(["doctor", "bytes", "bytes", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert main(["doctor", "bytes", "bytes"]) == 0
    out, err = capsys.readouterr()
    assert document["verdict"] == {"kind": "healthy", "reason": ""} and "verdict    healthy" in out
    assert max(map(len, out.splitlines())) <= 100 and "load target bytes" in err
    for part in (
        "taps 1 3",
        "mask id 257",
        "block_size 16",
        "RoPE theta 10000",
        "2 x bidirectional",
        "head the target",
    ):
        assert part in out
    run = document["run"]
    assert f"tau {run['own']['tau']:.2f} over {run['anchors']} anchors" in out
    assert " ".join(f"{share * 100:.0f}" for share in run["own"]["acceptance"]) in " ".join(out.split())
    for mistake in run["mistakes"]:
        words = f"{mistake['name']} {mistake['tau']:.2f} {mistake['gain']:+.2f} ({mistake['error']:.2f})"
        assert words in " ".join(out.split())
        assert mistake["finding"] == ("within noise" if mistake["name"] in ("258", r"0 '\x00'") else "worse")


@pytest.mark.parametrize(
    ("planted", "remedy"),
    [
        ({"target_layer_ids": (2, 4)}, "set target_layer_ids to [1, 3]"),
        ({"rope": DefaultRope(5e5)}, "set rope_theta to 10000"),
        ({"layers": (DraftLayer(True, None),) * 2}, "set is_causal to false"),
        ({"layers": (DraftLayer(False, 24),) * 2}, "set use_sliding_window to false"),
        ({"mask_token_id": 32}, "set mask_token_id to 257"),
        ({"block_size": 8}, "set block_size to 16"),
        ({"block_size": 32}, "set block_size to 16"),
    ],
)
def test_a_planted_mistake_is_found_and_its_remedy_is_the_truth(
    planted: dict[str, Any], remedy: str, trained: Loaded, tokenizer: Any, texts: list[Text]
) -> None:
    run = tried(trained, replace(trained.config, **planted), tokenizer, texts)
    found = verdict([], run)
    assert found.kind == "suspicious" and remedy in found.reason and f"instead of {run.own.tau:.2f}" in found.reason
    assert [o.variant.config for o in run.mistakes if o.variant.remedy in found.reason] == [trained.config]


def test_the_command_says_so_with_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    draft = changed_draft("trained-bytes", {"rope_theta": 1e6}, tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"import {name}\n"]}) + "\n" for name in ("os", "re", "json")))
    options = ["--prompts", str(prompts), "--max-new-tokens", "80", "--dtype", "bfloat16"]
    assert main(["doctor", "bytes", str(draft), *options]) == 1
    out = capsys.readouterr().out
    assert "3 texts, " in out and " bfloat16" in out and "theta 1000000, not the target's" in out
    assert "BETTER" in out and "suspicious: RoPE theta 10000" in out
    assert "set rope_theta to 10000 in the drafter's config.json" in " ".join(out.split())


def test_the_command_takes_a_selector_in_bfloat16(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config, first = load_drafter(BYTES_PAIR / "draft", torch.float32)
    wider = with_selector(config, Selector(6, 4))
    rng = np.random.default_rng(0)
    selector = {
        name: jnp.asarray(rng.standard_normal(value.shape) * 0.1)
        for name, value in take_params(widened(first, wider)).items()
        if name.startswith("candidate_selector.")
    }
    export(wider, take_params(widened(first, wider)) | selector, tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"import {name}\n"]}) + "\n" for name in ("os", "re", "json")))
    options = ["--prompts", str(prompts), "--max-new-tokens", "80", "--dtype", "bfloat16", "--json"]
    assert main(["doctor", "bytes", str(tmp_path), *options]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [check["level"] for check in document["checks"]] == ["ok"] * 4
    assert document["verdict"]["kind"] == "healthy" and document["run"]["own"]["tau"] > 2


def test_the_default_pairs_weights_are_sound() -> None:
    _, target = load_target(resolve_target("default"), torch.bfloat16)
    config, drafter = load_drafter(resolve_draft("default"), torch.bfloat16)
    assert [check.level for check in check_weights(target, drafter, config)] == ["ok"] * 4


def test_kernels_that_change_nothing_are_no_fault_and_others_are(tiny2: Loaded) -> None:
    drafter = copy.deepcopy(tiny2.drafter)
    state = drafter.state_dict()
    state["layers.0.mlp_conv.base_kernel"].fill_(1.0)
    state["layers.0.mlp_conv.kernel_projection.weight"].zero_()
    assert {c.level for c in check_weights(tiny2.target, drafter, tiny2.config)} == {"ok"}
    state["layers.0.mlp_conv.base_kernel"].fill_(0.5)
    state["candidate_selector.successor_codebook"].zero_()
    broken = [c.text for c in check_weights(tiny2.target, drafter, tiny2.config) if c.level == "broken"]
    assert broken == [
        "drafter: constant: layers.0.mlp_conv.base_kernel",
        "drafter: all zero: candidate_selector.successor_codebook",
    ]


def test_a_random_drafter_is_suspicious(trained: Loaded, tokenizer: Any, texts: list[Text]) -> None:
    random = load(BYTES_PAIR).drafter
    generator = torch.Generator().manual_seed(0)
    for weight in random.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1 + (weight.ndim == 1))
    run = tried(replace(trained, drafter=random), trained.config, tokenizer, texts)
    assert run.own.tau < 1.1
    assert verdict([], run).kind == "suspicious" and "tau is 1.0" in verdict([], run).reason


def test_a_drafter_without_use_for_its_context_is_suspicious(tiny: Loaded) -> None:
    own = Outcome(configured(tiny.config), tau=2.5, acceptance=(0.9, 0.5, 0.1), gain=0.0, error=0.0, p_value=1.0)
    blind = replace(
        own, variant=replace(own.variant, inputs=Inputs(hidden_context=None)), tau=2.4, gain=-0.1, error=0.1
    )
    run = Run(texts=1, tokens=90, anchors=80, decoding_tau=2.0, own=own, mistakes=(blind,))
    assert verdict([], run).kind == "suspicious" and "the features are of no use" in verdict([], run).reason
    assert verdict([], replace(run, mistakes=(replace(blind, p_value=0.001),))).kind == "healthy"


def test_nan_weights_are_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = BYTES_PAIR / "draft"
    weights = load_file(folder / "model.safetensors")
    weights["layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert main(["doctor", "bytes", str(tmp_path), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["run"] is None and document["verdict"]["kind"] == "broken"
    assert document["verdict"]["reason"] == "drafter: not finite: layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "value", "level", "text"),
    [
        ("drafter.fc.weight", 0.0, "broken", "drafter: all zero: fc.weight"),
        ("drafter.norm.weight", 0.0, "broken", "drafter: all zero: norm.weight"),
        ("drafter.norm.weight", 1.0, "ok", "drafter: 25 tensors"),
        ("target.embed_tokens.weight", 0.5, "broken", "target: constant: embed_tokens.weight"),
        (
            "target.layers.2.mlp.up_proj.weight",
            float("inf"),
            "broken",
            "target: not finite: layers.2.mlp.up_proj.weight",
        ),
    ],
)
def test_odd_tensors(name: str, value: float, level: str, text: str) -> None:
    loaded = load(BYTES_PAIR)
    role, _, parameter = name.partition(".")
    getattr(loaded, role).get_parameter(parameter).fill_(value)
    checks = check_weights(loaded.target, loaded.drafter, loaded.config)
    assert [c.text for c in checks if c.level == level and text in c.text]


def test_an_embedding_row_unlike_the_others_is_a_hint() -> None:
    loaded = load(BYTES_PAIR)
    loaded.target.embed_tokens.weight[257] *= 0.01
    assert [c.level for c in check_weights(loaded.target, loaded.drafter, loaded.config)] == ["ok"] * 3 + ["hint"]


LAYERS = (
    DraftLayer(causal=False, window=None),
    DraftLayer(causal=True, window=None),
    DraftLayer(causal=True, window=3),
    DraftLayer(causal=False, window=2),
)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("pair", ["tiny", "tiny2"])
def test_accepted_drafts_are_those_of_the_reference(
    layer: DraftLayer, pair: str, request: pytest.FixtureRequest
) -> None:
    tiny: Loaded = request.getfixturevalue(pair)
    config = replace(tiny.config, layers=(layer,) * len(tiny.config.layers))
    text = Text(tuple(prompt_of(69)), 9)  # random: the target's own text is the same token over and over
    anchors, variant = anchors_of(text, config.block_size), configured(config)
    assert anchors.tolist() == list(range(9, 66))
    expected = []
    for anchor in anchors.tolist():
        _, features = reference.target_pass(tiny.target, text.token_ids[:anchor], config.target_layer_ids)
        drafts = reference.draft_ids(tiny.target, tiny.drafter, config, features, text.token_ids[anchor])
        expected.append(reference.matching_prefix(drafts, text.token_ids[anchor + 1 :]))
    tapped = tap(tiny.target, text, (0, 1))
    assert accepted_drafts(tiny.target, tiny.drafter, variant, tapped, text, anchors).tolist() == expected
    assert len(set(expected)) >= 2


def test_decoding_tau_is_that_of_decoding(tiny: Loaded) -> None:
    prompt = prompt_of(9)
    ids, trace = reference.dflash(tiny.target, tiny.drafter, tiny.config, prompt, 180)
    text = Text((*prompt, *ids), len(prompt))
    run = measure(tiny.target, tiny.drafter, tiny.config, [], [text])
    last = anchors_of(text, tiny.config.block_size)[-1]
    kept = [entry.accepted + 1 for entry in trace if entry.start <= last]
    assert run.decoding_tau == sum(kept) / len(kept) and len(set(kept)) >= 2


def test_rows_are_written_as_one_by_one(tiny: Loaded) -> None:
    prompts = [prompt_of(n) for n in (1, 7, 30)]
    rows = greedy_rows(tiny.target, tiny.pair.target.config, prompts, 20)
    assert rows == [reference.greedy(tiny.target, prompt, 20) for prompt in prompts]


def test_the_last_layer_is_tapped_on_either_side_of_the_final_norm(tiny: Loaded) -> None:
    text = Text(tuple(prompt_of(9)), 9)
    tapped, variant = tap(tiny.target, text, (0, 1)), configured(tiny.config)
    _, features = reference.target_pass(tiny.target, text.token_ids, (1, 0))
    assert torch.equal(tapped.features(variant), features)
    last, first = tapped.features(replace(variant, inputs=Inputs(final_norm=False))).chunk(2, -1)
    assert torch.equal(tiny.target.norm(last), features.chunk(2, -1)[0]) and not torch.equal(last, features[:, :32])
    assert torch.equal(first, features.chunk(2, -1)[1])


def test_texts_end_at_the_stop_id(trained: Loaded, tiny: Loaded) -> None:
    config = replace(tiny.pair.target.config, eos_token_ids=(3,))
    texts = write_texts(tiny.target, config, None, builtin_prompts(config, None), 60)
    answers = [text.token_ids[text.prompt_length :] for text in texts]
    assert all(3 not in answer[:-1] and (answer[-1] == 3 or len(answer) == 60) for answer in answers)
    assert any(answer[-1] == 3 for answer in answers)


def test_mistakes_of_a_windowed_scaled_drafter(tiny: Loaded) -> None:
    """Each once, none the configuration itself, each one with a remedy."""
    rope = YarnRope(1e6, 4.0, 4096, 32.0, 1.0, 1.0, True)
    drafter = replace(tiny.config, rope=rope, layers=(DraftLayer(True, 64), DraftLayer(True, None)))
    mistakes = plausible_mistakes(tiny.pair.target.config, drafter, None, 64)
    names = [f"{mistake.field} {mistake.name}" for mistake in mistakes]
    for name in (
        "taps 0 1 (reversed)",
        "taps layer 1 before the final norm",
        "RoPE theta 10000, as the target",
        "RoPE without scaling",
        "RoPE theta 100000000, yarn scaling",
        "attention window dropped",
        "attention all layers bidirectional",
        "attention windowed layers causal",
    ):
        assert name in names
    assert "attention all layers causal in the block" not in names
    assert len({(m.config, m.inputs) for m in mistakes} - {(drafter, Inputs())}) == len(mistakes)
    assert all(mistake.remedy for mistake in mistakes)
    idle = plausible_mistakes(tiny.pair.target.config, tiny.config, None, 64)
    assert {f"window 64 in all layers, {how}" for how in ("bidirectional", "causal")} <= {m.name for m in idle}
    assert describe_layers(drafter.layers) == "1 x causal in the block, window 64; 1 x causal in the block, no window"


def test_what_the_texts_cannot_tell_is_a_hint(tiny: Loaded) -> None:
    text = Text((1, 2, 3, 11, 4), 2)
    windowed = replace(tiny.config, layers=(DraftLayer(False, 5), DraftLayer(False, None)))
    assert "at most 5 tokens" in check_texts(windowed, [text])[0].text
    assert "mask id 11 occurs" in check_texts(windowed, [text])[1].text
    inside = replace(windowed, layers=(DraftLayer(False, 4),) * 2, mask_token_id=5)
    assert check_texts(inside, [text]) == []


def test_a_gain_within_noise_is_no_better(tiny: Loaded) -> None:
    """Twelve stretches of two anchors: the error is the textbook's, of their means."""
    own, stretch = torch.ones(24, dtype=torch.int64), torch.arange(24) // 2

    def outcome(gains: list[int]) -> Outcome:
        return compare(configured(tiny.config), own + torch.tensor(gains).repeat_interleave(2), own, stretch)

    gains = [2, 0, 0, 1, 0, -1, 0, 1, 0, 0, 0, 0]
    mixed, means = outcome(gains), torch.tensor(gains).double()
    assert mixed.gain == pytest.approx(0.25) and mixed.tau == pytest.approx(2.25)
    assert mixed.error == pytest.approx((means.std() / 12**0.5).item()) and mixed.finding == "within noise"
    assert mixed.acceptance == pytest.approx((11 / 12, 3 / 12, 1 / 12))
    # All of a sign: 2 of the 4096 ways to sign them are as far from 0.
    uneven = outcome([1, 1, 2, 1, 1, 2, 1, 1, 1, 1, 2, 2])
    assert uneven.finding == "better" and uneven.p_value == pytest.approx(2 / 4096, abs=5e-4)
    assert outcome([-1] * 12).finding == "worse"
    assert outcome([0] * 12).finding == "within noise" and outcome([0] * 12).p_value == 1


def test_a_target_without_tokenizer_is_examined_on_random_ids(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_target(tmp_path / "target", eos_token_id=None)
    write_drafter(tmp_path / "draft")
    code = main(["doctor", str(tmp_path / "target"), str(tmp_path / "draft"), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["run"]["tokens"] == 4 * NEW and code == int(document["verdict"]["kind"] != "healthy")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["bytes", "no/such/folder"], "no/such/folder"),
        (["/nowhere", "bytes"], "/nowhere"),
        (["bytes", "bytes", "--dtype", "int4"], "--dtype"),
        (["bytes"], "DRAFT"),
        (["bytes", "bytes", "--max-new-tokens", "0"], "max_new_tokens is 0"),
        (
            ["bytes", "bytes", "--max-new-tokens", "40"],
            "in 8 stretches of 16 tokens, a verdict needs 12; raise --max-new-tokens",
        ),
        (["bytes", "bytes", "--prompts", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["bytes", "{tiny}/draft"], "num_target_layers is 2"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], named: str, tiny: Loaded, capsys: pytest.CaptureFixture
) -> None:
    assert main(["doctor", *(argument.format(tiny=tiny.folder) for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("torch-dflash: ")]
    assert out == "" and len(lines) == 1 and err.endswith(f"{lines[0]}\n") and named in lines[0]


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; from torch_dflash.cli import main\ntry: main(['doctor', '--help'])\nexcept SystemExit: pass\n"
    code += "assert not {'jax', 'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
