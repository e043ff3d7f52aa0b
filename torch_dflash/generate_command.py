"""`torch-dflash generate`: a prompt in, text out as it is accepted, and a line of figures."""

import argparse
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from torch_dflash.errors import InputError
from torch_dflash.model_arguments import add_model_arguments, draft_name, load, num_drafts_of, use_compilation_cache
from torch_dflash.sampling_arguments import NUMBERS, add_sampling_arguments, sampling_of

# jax, torch and transformers take seconds to import: `--help` and bad arguments must not wait for them.
if TYPE_CHECKING:
    from torch_dflash.api import Result
    from torch_dflash.options import Sampling
    from torch_dflash.pair import Pair
    from torch_dflash.tokenizer import Prompt

DRAFTED, OWN, RESET = "\x1b[32m", "\x1b[1;33m", "\x1b[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("prompt", nargs="?", metavar="PROMPT", help="the prompt; without it or with -, stdin is read")
    add("--file", type=Path, metavar="FILE", help="read the prompt from FILE instead")
    add("--trace", type=Path, metavar="FILE", help="write each round to FILE as a JSON line")
    add("--json", action="store_true", help="print one JSON document instead of text")
    add("--compare", action="store_true", help="also decode plainly: speed-up and whether the outputs are equal")
    add("--color", action="store_true", help="green: accepted drafts; yellow: the target's own tokens")
    add_model_arguments(parser)
    add_sampling_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Load, write, report. Returns the exit code: 1 when --compare finds different outputs in float32."""
    _check_together(arguments)
    sampling = sampling_of(arguments)
    text = _read_prompt(arguments)
    with _open_trace(arguments.trace) as trace_file:
        use_compilation_cache()
        pair = load(arguments, draft_name(arguments))
        prompt = _chat(pair, text, arguments.no_chat)
        options = _options(arguments, sampling)
        result = _write(pair, prompt, options, arguments)
        if trace_file is not None:
            trace_file.writelines(json.dumps(dict(entry)) + "\n" for entry in result.trace or ())
    plain = _run_plain(pair, prompt, options) if arguments.compare else None
    _report(pair, result, plain, arguments)
    return int(plain is not None and arguments.dtype == "float32" and plain.token_ids != result.token_ids)


def _check_together(arguments: argparse.Namespace) -> None:
    """Refuse options that would do nothing beside others, before anything is loaded."""
    num_drafts_of(arguments)
    plain = arguments.method == "plain" or arguments.draft == "none"
    for name, given in (("--compare", arguments.compare), ("--block-size", arguments.block_size is not None)):
        if plain and given:
            raise InputError(f"{name} has no meaning in plain decoding: leave it out, or let the drafter run")
    if arguments.json and arguments.color:
        raise InputError("--color has no meaning in JSON: leave out --color or --json")


def _read_prompt(arguments: argparse.Namespace) -> str:
    if arguments.file is not None and arguments.prompt is not None:
        raise InputError("PROMPT and --file are both given: give one")
    if arguments.file is not None:
        try:
            return arguments.file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--file {arguments.file} cannot be read as text: {error}") from None
    if arguments.prompt in (None, "-"):
        if sys.stdin.isatty():
            print("Type a prompt, end it with Ctrl-D:", file=sys.stderr)
        try:
            return sys.stdin.read()
        except UnicodeDecodeError as error:
            raise InputError(f"PROMPT on stdin cannot be read as text: {error}") from None
    return arguments.prompt


def _open_trace(path: Path | None) -> AbstractContextManager[IO[str] | None]:
    """Opened before anything is run, so that a bad path costs nothing."""
    if path is None:
        return nullcontext()
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--trace {path} cannot be written: {error.strerror}") from None


def _chat(pair: "Pair", text: str, no_chat: bool) -> "Prompt":
    """An empty text stays one, so that it is refused."""
    from torch_dflash.tokenizer import as_chat

    return text if no_chat or not text else as_chat(text, pair.tokenizer)


def _options(arguments: argparse.Namespace, sampling: "Sampling") -> dict[str, Any]:
    """What holds for the run and for the plain one beside it."""
    return {
        "max_new_tokens": arguments.max_new_tokens,
        "steps_per_dispatch": arguments.steps_per_dispatch,
        "sampling": sampling.seeded(),  # one seed for both
        "stop": arguments.stop,
        "stop_token_ids": arguments.stop_token_id,
        "ignore_eos": arguments.ignore_eos,
    }


def _write(pair: "Pair", prompt: "Prompt", options: dict[str, Any], arguments: argparse.Namespace) -> "Result":
    """Decode; unless JSON is asked for, print each token as soon as it is accepted."""
    from torch_dflash.api import follow
    from torch_dflash.tokenizer import TextPieces

    moves = follow(pair, prompt, num_drafts=num_drafts_of(arguments), method=arguments.method, **options)
    pieces = None if arguments.json or pair.tokenizer is None else TextPieces(pair.tokenizer, arguments.stop)
    for move in moves:
        if pieces is not None:
            for drafted, group in groupby(zip(move.token_ids, move.drafted, strict=True), key=itemgetter(1)):
                piece = pieces.feed(token for token, _ in group)
                _print_piece(piece, (DRAFTED if drafted else OWN) if arguments.color else "")
            sys.stdout.flush()
    if pieces is not None:
        print(pieces.finish())
    assert move.result is not None
    return move.result


def _print_piece(piece: str, color: str) -> None:
    """A letter of several tokens is printed in the color of the last one."""
    sys.stdout.write(f"{color}{piece}{RESET}" if color and piece else piece)


def _run_plain(pair: "Pair", prompt: "Prompt", options: dict[str, Any]) -> "Result":
    from torch_dflash.api import generate

    return generate(pair, [prompt], method="plain", **options)[0]


def _report(pair: "Pair", result: "Result", plain: "Result | None", arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(json.dumps(_document(pair, result, plain, arguments)))
        return
    if pair.tokenizer is None:
        print(" ".join(map(str, result.token_ids)))
    print(f"\n{_line(result)}", file=sys.stderr)
    if arguments.color:
        print(f"{DRAFTED}accepted drafts{RESET}, {OWN}the target's own tokens{RESET}", file=sys.stderr)
    if plain is not None:
        print(f"plain: {_line(plain)}", file=sys.stderr)
        print(_comparison_line(result, plain, arguments.dtype), file=sys.stderr)


def _line(result: "Result") -> str:
    s = result.stats
    speed = f"{s.new_tokens} tokens, {s.tokens_per_second:.1f} tokens/s"
    tau = f", tau {s.tau:.2f} ({s.steps} steps)" if len(s.accept_histogram) > 1 else ""
    seed = "" if result.seed is None else f", seed {result.seed}"
    return f"{speed}{tau}, TTFT {s.ttft:.2f} s, TPOT {s.tpot * 1e3:.1f} ms, ended by {result.finish_reason}{seed}"


def _comparison(result: "Result", plain: "Result") -> dict[str, Any]:
    both = zip(result.token_ids, plain.token_ids, strict=False)
    equal = result.token_ids == plain.token_ids
    shorter = min(len(result.token_ids), len(plain.token_ids))
    return {
        "equal": equal,
        "first_difference": None if equal else next((i for i, (a, b) in enumerate(both) if a != b), shorter),
        "speed_up": plain.stats.tpot / result.stats.tpot if result.stats.tpot else None,
    }


def _comparison_line(result: "Result", plain: "Result", dtype: str) -> str:
    found = _comparison(result, plain)
    speed = "" if found["speed_up"] is None else f", {found['speed_up']:.2f}x the speed (TPOT, one run each)"
    if found["equal"]:
        return f"The outputs are equal{speed}."
    why = "in bfloat16 near-ties may fall either way, float32 is exact"
    if dtype == "float32":
        why = "in float32 this is a defect, please report it"
    return f"The outputs differ from token {found['first_difference']} on ({why}){speed}."


def _document(pair: "Pair", result: "Result", plain: "Result | None", arguments: argparse.Namespace) -> dict[str, Any]:
    document: dict[str, Any] = {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "stats": dict(result.stats),
        "settings": _settings(pair, result, arguments),
    }
    if result.logprobs is not None:
        document["logprobs"] = result.logprobs
    if plain is not None:
        document["compare"] = {**_comparison(result, plain), "plain": dict(plain.stats)}
    return document


def _block_size(pair: "Pair") -> int | None:
    """Of a DFlash drafter."""
    from torch_dflash.block import DrafterFunctions

    return pair.drafter.config.block_size if isinstance(pair.drafter, DrafterFunctions) else None


def _settings(pair: "Pair", result: "Result", arguments: argparse.Namespace) -> dict[str, Any]:
    """What the run really used, defaults resolved."""
    num_drafts = len(result.stats.accept_histogram) - 1
    chosen = {name: getattr(arguments, name) for name, *_ in NUMBERS if getattr(arguments, name) is not None}
    return {
        "target": arguments.target,
        "draft": draft_name(arguments),
        "dtype": arguments.dtype,
        "method": pair.method if num_drafts else "plain",
        "block_size": _block_size(pair) if num_drafts else None,
        "num_drafts": "auto" if arguments.num_drafts == "auto" else num_drafts,
        "steps_per_dispatch": arguments.steps_per_dispatch,
        "temperature": 0.0,
        **chosen,
        **({} if result.seed is None else {"seed": result.seed}),
    }
