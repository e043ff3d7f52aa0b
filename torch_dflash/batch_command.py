"""`torch-dflash batch`: a file of prompts in, a file of answers out, many at a time."""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_dflash.errors import InputError, checked_integer
from torch_dflash.model_arguments import add_model_arguments, draft_name, load, num_drafts_of, use_compilation_cache
from torch_dflash.sampling_arguments import add_sampling_arguments, sampling_of

if TYPE_CHECKING:
    from torch_dflash.engine import Engine
    from torch_dflash.pair import Pair
    from torch_dflash.requests import Request, Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    parser.set_defaults(run=run)
    add = parser.add_argument
    add(
        "prompts",
        type=Path,
        metavar="PROMPTS",
        help='file of JSON lines, {"turns": [text, ...]}; the first turn is used',
    )
    add(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="answers as JSON lines, each written when it is finished",
    )
    add("--limit", type=int, metavar="N", help="only the first N prompts")
    add("--rows", type=int, default=8, metavar="R", help="prompts at a time (default 8)")
    add("--pages", type=int, metavar="N", help="pages of K/V memory, shared by the rows (default: enough for all)")
    add_model_arguments(parser)
    add_sampling_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Answer all prompts. Returns the exit code."""
    from torch_dflash.train.records import read_prompts

    sampling = sampling_of(arguments)
    for name in ("limit", "rows", "pages"):
        if getattr(arguments, name) is not None:
            checked_integer(getattr(arguments, name), f"--{name}", 1)
    num_drafts_of(arguments)
    prompts = read_prompts(arguments.prompts)[: arguments.limit]
    if arguments.out.exists():
        raise InputError(f"--out {arguments.out} is there already: name another file, or remove it")
    draft_name(arguments)
    use_compilation_cache()
    pair = load(arguments, draft_name(arguments))
    requests = _requests(pair, prompts, sampling, arguments)
    engine = _engine(pair, requests, arguments)
    return _answer(pair, engine, requests, arguments.out)


def _requests(pair: "Pair", prompts: list[str], sampling: Any, arguments: argparse.Namespace) -> list["Request"]:
    """Prompt i is drawn with seed + i, so that equal prompts get different answers."""
    from torch_dflash.service import make_request, stop_ids_of
    from torch_dflash.tokenizer import as_chat

    seeded = sampling.seeded()
    stops = stop_ids_of(pair, arguments.stop_token_id, arguments.ignore_eos), arguments.stop
    requests = []
    for i, text in enumerate(prompts):
        prompt = text if arguments.no_chat else as_chat(text, pair.tokenizer)
        own = replace(seeded, seed=(seeded.seed + i) % 2**64)
        try:
            requests.append(make_request(pair, prompt, arguments.max_new_tokens, *stops, sampling=own, index=i))
        except InputError as error:
            raise InputError(f"{arguments.prompts}, line {i + 1}: {error}") from None
    if not requests or arguments.max_new_tokens == 0:
        raise InputError(f"{arguments.prompts}: nothing to answer; give prompts and --max-new-tokens above 0")
    return requests


def _engine(pair: "Pair", requests: list["Request"], arguments: argparse.Namespace) -> "Engine":
    from torch_dflash.service import open_engine

    longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
    return open_engine(
        pair,
        rows=min(arguments.rows, len(requests)),
        context=longest,
        num_pages=arguments.pages,
        method=arguments.method,
        num_drafts=num_drafts_of(arguments),
        steps_per_dispatch=arguments.steps_per_dispatch,
    )


def _answer(pair: "Pair", engine: "Engine", requests: list["Request"], out: Path) -> int:
    from tqdm import tqdm

    begin, tokens, steps = time.perf_counter(), 0, 0
    for request in requests:
        engine.submit(request)
    try:
        with out.open("x", encoding="utf-8") as file, tqdm(total=len(requests), unit="answer") as bar:
            while not engine.idle:
                for finished in [run for run in engine.step() if run.finish_reason is not None]:
                    file.write(json.dumps(_document(pair, finished)) + "\n")
                    file.flush()
                    tokens, steps = tokens + len(finished.token_ids), steps + len(finished.trace)
                    bar.update()
                seconds = time.perf_counter() - begin
                bar.set_postfix_str(f"{tokens / seconds:.1f} tokens/s", refresh=False)
    except OSError as error:
        raise InputError(f"--out {out} cannot be written: {error.strerror or error}") from None
    kept = (tokens - len(requests)) / steps if steps else 0.0
    speed = f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s"
    print(f"{len(requests)} answers, {speed}, tau {kept:.2f}", file=sys.stderr)
    return 0


def _document(pair: "Pair", run: "Run") -> dict[str, Any]:
    from torch_dflash.api import text_of
    from torch_dflash.metrics import tau

    sampling = run.choice.sampling
    document: dict[str, Any] = {
        "index": run.request.index,
        "text": text_of(pair, run),
        "token_ids": run.token_ids,
        "finish_reason": run.finish_reason,
        "prompt_tokens": len(run.request.prompt_ids),
        "tau": tau(len(run.token_ids), len(run.trace)),
    }
    if sampling.logprobs:
        document["logprobs"] = run.logprobs
    return document | ({"seed": sampling.seed} if sampling.temperature > 0 else {})
