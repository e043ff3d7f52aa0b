"""The command as a person meets it: streams, figures, files and one-line errors."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torch_dflash
from torch_dflash.cli import main

PROMPT = "def display_name(self):"
BYTES = ["generate", "--target", "bytes", "--max-new-tokens", "40"]


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's cache is left alone. One folder for all tests here, so that each program is compiled once."""
    monkeypatch.setenv("TORCH_DFLASH_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def expected() -> torch_dflash.Result:
    pair = torch_dflash.load_pair("bytes", "bytes")
    return torch_dflash.generate(pair, [PROMPT], max_new_tokens=40, trace=True)[0]


def test_text_goes_to_stdout_and_figures_to_stderr(
    capsys: pytest.CaptureFixture, expected: torch_dflash.Result
) -> None:
    assert main([*BYTES, PROMPT]) == 0
    out, err = capsys.readouterr()
    assert out == f"{expected.text}\n"
    assert "40 tokens, " in err and f"tau {expected.stats.tau:.2f} ({expected.stats.steps} steps)" in err
    assert "ended by length" in err and "compile decode" in err


def test_json_is_one_document_with_the_settings_in_use(
    capsys: pytest.CaptureFixture, expected: torch_dflash.Result
) -> None:
    assert main([*BYTES, "--json", "--compare", "--num-drafts", "5", "--seed", "7", PROMPT]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["token_ids"] == expected.token_ids and document["text"] == expected.text
    assert document["stats"]["new_tokens"] == 40 and len(document["stats"]["accept_histogram"]) == 6
    assert document["settings"] == {
        "target": "bytes",
        "draft": "bytes",
        "dtype": "float32",
        "method": "dflash",
        "block_size": 16,
        "num_drafts": 5,
        "steps_per_dispatch": 4,
        "temperature": 0.0,
        "seed": 7,
    }
    assert document["compare"]["equal"] and document["compare"]["plain"]["steps"] == 39


def test_block_size_and_dtype_reach_the_pair(capsys: pytest.CaptureFixture) -> None:
    assert main([*BYTES, "--json", "--block-size", "4", "--dtype", "bfloat16", PROMPT]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["settings"]["block_size"] == 4 and len(document["stats"]["accept_histogram"]) == 4


SAMPLED = ["--temperature", "0.9", "--top-p", "0.95", "--top-k", "40", "--seed", "5"]


def test_sampling_options_reach_the_sampler(capsys: pytest.CaptureFixture) -> None:
    """The command's text is the API's under the same options, plain decoding gives the same, and it is not greedy."""
    pair = torch_dflash.load_pair("bytes", "bytes")
    sampling = torch_dflash.Sampling(temperature=0.9, top_p=0.95, top_k=40, seed=5, repetition_penalty=1.1)
    expected = torch_dflash.generate(pair, PROMPT, 40, sampling=sampling, stop=["return"])[0]
    options = [*SAMPLED, "--repetition-penalty", "1.1", "--stop", "return", "--logprobs", "--json", "--compare"]
    assert main([*BYTES, *options, PROMPT]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["token_ids"], document["text"]) == (expected.token_ids, expected.text)
    assert document["compare"]["equal"] and len(document["logprobs"]) == len(expected.token_ids)
    assert document["settings"]["seed"] == 5 and document["settings"]["top_k"] == 40
    assert expected.token_ids != torch_dflash.generate(pair, PROMPT, 40)[0].token_ids


def test_a_seed_that_was_drawn_is_told(capsys: pytest.CaptureFixture) -> None:
    assert main([*BYTES, "--temperature", "1", PROMPT]) == 0
    first = capsys.readouterr()
    seed = re.search(r"seed (\d+)", first.err).group(1)
    assert main([*BYTES, "--temperature", "1", "--seed", seed, PROMPT]) == 0
    assert capsys.readouterr().out == first.out


def write_prompts(folder: Path, *texts: str) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
    return str(path)


def test_batch_answers_every_prompt_as_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    texts = [PROMPT, "import os", "class Stack:\n", PROMPT]
    out = tmp_path / "answers.jsonl"
    options = ["--target", "bytes", "--max-new-tokens", "24", "--rows", "2", "--pages", "4"]
    assert main(["batch", write_prompts(tmp_path, *texts), "--out", str(out), *options]) == 0
    answers = sorted((json.loads(line) for line in out.read_text().splitlines()), key=lambda a: a["index"])
    alone = torch_dflash.generate(torch_dflash.load_pair("bytes", "bytes"), texts, 24, method="plain")
    assert [a["token_ids"] for a in answers] == [result.token_ids for result in alone]
    assert [a["text"] for a in answers] == [result.text for result in alone]
    assert "4 answers, 96 tokens" in capsys.readouterr().err


def test_batch_draws_other_texts_for_equal_prompts(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    options = ["--target", "bytes", "--max-new-tokens", "24", "--rows", "2", "--temperature", "1", "--seed", "3"]
    assert main(["batch", write_prompts(tmp_path, PROMPT, PROMPT), "--out", str(out), *options]) == 0
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert {a["seed"] for a in answers} == {3, 4} and answers[0]["text"] != answers[1]["text"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--rows", "0"], "--rows is 0"),
        (["--pages", "1"], "num_pages is 1"),
        (["--limit", "0"], "--limit is 0"),
        (["--num-drafts", "some"], "--num-drafts is 'some'"),
        (["--top-p", "0.5"], "--top-p 0.5"),
        (["--max-new-tokens", "0"], "nothing to answer"),
        (["--max-new-tokens", "-1"], "line 1: max_new_tokens is -1"),
        (["--stop", ""], "stop is ['']"),
    ],
)
def test_bad_input_of_batch(arguments: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "answers.jsonl"
    command = ["batch", write_prompts(tmp_path, PROMPT), "--out", str(out), "--target", "bytes", *arguments]
    assert main(command) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("torch-dflash: ")]
    assert len(lines) == 1 and named in lines[0] and not out.exists()


def test_batch_does_not_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "answers.jsonl").write_text("precious")
    command = ["batch", write_prompts(tmp_path, PROMPT), "--out", str(tmp_path / "answers.jsonl"), "--target", "bytes"]
    assert main(command) == 2 and "is there already" in capsys.readouterr().err
    assert (tmp_path / "answers.jsonl").read_text() == "precious"


def test_trace_file_has_a_line_for_each_round(
    tmp_path: Path, capsys: pytest.CaptureFixture, expected: torch_dflash.Result
) -> None:
    assert main([*BYTES, "--trace", str(tmp_path / "trace.jsonl"), PROMPT]) == 0
    rounds = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [r["proposed"] for r in rounds] == [entry.proposed for entry in expected.trace]
    assert [token for r in rounds for token in r["emitted"]] == expected.token_ids[1:]


def test_color_shows_accepted_drafts(capsys: pytest.CaptureFixture, expected: torch_dflash.Result) -> None:
    assert main([*BYTES, "--color", PROMPT]) == 0
    out = capsys.readouterr().out
    assert re.sub(r"\x1b\[[0-9;]*m", "", out) == f"{expected.text}\n"
    green = "".join(re.findall(r"\x1b\[32m(.*?)\x1b\[0m", out, re.DOTALL))
    num_accepted = sum(entry.accepted for entry in expected.trace[:-1])
    assert num_accepted <= len(green) <= num_accepted + expected.trace[-1].accepted


def test_compare_in_words_and_plain_method(capsys: pytest.CaptureFixture) -> None:
    assert main([*BYTES, "--compare", PROMPT]) == 0
    assert "The outputs are equal" in capsys.readouterr().err
    assert main([*BYTES, "--method", "plain", PROMPT]) == 0
    assert "tau" not in capsys.readouterr().err


def test_prompt_from_file_and_from_stdin(tmp_path: Path, expected: torch_dflash.Result) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    command = [sys.executable, "-m", "torch_dflash.cli", *BYTES]
    from_file = subprocess.run([*command, "--file", str(tmp_path / "prompt.txt")], capture_output=True, text=True)
    from_stdin = subprocess.run([*command, "-"], input=PROMPT, capture_output=True, text=True)
    assert from_file.stdout == from_stdin.stdout == f"{expected.text}\n"


def test_help_and_bad_arguments_do_not_wait_for_jax() -> None:
    code = "import sys; from torch_dflash.cli import main\ntry: main(['generate', '--help'])\nexcept SystemExit: pass\n"
    code += "assert main(['generate', '--dtype', 'int4']) == 2\nassert not {'jax', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--num-drafts", "16", PROMPT], "num_drafts is 16"),
        (["--method", "plain", "--num-drafts", "3", PROMPT], "plain decoding drafts nothing"),
        (["--draft", "none", "--block-size", "4", PROMPT], "--block-size"),
        (["--method", "plain", "--compare", PROMPT], "--compare"),
        (["--json", "--color", PROMPT], "--color"),
        (["\udcff"], "not valid Unicode"),
        (["--num-drafts", "many", PROMPT], "--num-drafts"),
        (["--block-size", "17", PROMPT], "block_size is 17"),
        (["--max-new-tokens", "-1", PROMPT], "max_new_tokens is -1"),
        (["--steps-per-dispatch", "0", PROMPT], "steps_per_dispatch is 0"),
        (["--dtype", "float8", PROMPT], "--dtype"),
        (["--method", "eagle", PROMPT], "--method"),
        (["--unknown", PROMPT], "--unknown"),
        (["--temperature", "-1", PROMPT], "temperature is -1"),
        (["--temperature", "nan", PROMPT], "temperature is nan"),
        (["--top-k", "5", PROMPT], "--top-k 5"),
        (["--temperature", "1", "--top-p", "0", PROMPT], "top_p is 0"),
        (["--temperature", "1", "--min-p", "1.5", PROMPT], "min_p is 1.5"),
        (["--seed", "-3", PROMPT], "seed is -3"),
        (["--stop-token-id", "999", PROMPT], "stop_token_ids is 999"),
        ([""], "prompt is empty"),
        (["--file", "/nowhere/prompt.txt"], "/nowhere/prompt.txt"),
        (["--file", "/nowhere/prompt.txt", PROMPT], "PROMPT and --file"),
        (["--trace", "/nowhere/trace.jsonl", PROMPT], "/nowhere/trace.jsonl"),
        (["--draft", "none", "--method", "dflash", PROMPT], "needs a drafter"),
        (["--draft", "no/such/folder", PROMPT], "no/such/folder"),
        (["--target", "/nowhere", "--draft", "bytes", PROMPT], "/nowhere"),
        (["--target", "/nowhere", PROMPT], "--draft"),
        (["x" * 3000], "prompt has 3000 tokens"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], named: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["generate", "--target", "bytes", *arguments]) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("torch-dflash: ")]
    assert out == "" and len(lines) == 1 and err.endswith(f"{lines[0]}\n") and named in lines[0]


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m torch_dflash.cli {' '.join(BYTES)} '{PROMPT}' | head -c 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)
    assert "Traceback" not in done.stderr and done.returncode == 0
