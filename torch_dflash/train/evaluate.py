"""Held-out tau, by really running the decode loop.

python -m torch_dflash.train.evaluate DRAFTER gsm8k.jsonl humaneval.jsonl --count 32 --max-new-tokens 128
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch_dflash.api import Result, generate
from torch_dflash.pair import Pair, load_pair
from torch_dflash.tokenizer import as_chat
from torch_dflash.train.records import read_prompts


@dataclass(frozen=True)
class SetFigures:
    """Figures of one prompt set. tau: kept tokens / verify steps, of all prompts together; mean_tau: their mean.

    acceptance[k]: share of the steps in which draft k + 1 was accepted, among all steps, so it falls with k.
    """

    name: str
    prompts: int
    new_tokens: int
    steps: int
    tau: float
    mean_tau: float
    acceptance: tuple[float, ...]


def figures(name: str, results: Sequence[Result]) -> SetFigures:
    """What a set's results come to. Prompts whose answer ended with prefill's token have no step and do not count."""
    stats = [result.stats for result in results if result.stats.steps]
    steps = sum(s.steps for s in stats)
    histogram = [sum(column) for column in zip(*(s.accept_histogram for s in stats), strict=True)]
    acceptance = tuple(sum(histogram[k:]) / steps for k in range(1, len(histogram)))
    kept = sum(s.new_tokens - 1 for s in stats)
    mean = sum(s.tau for s in stats) / len(stats)
    return SetFigures(name, len(results), sum(s.new_tokens for s in stats), steps, kept / steps, mean, acceptance)


def evaluate(pair: Pair, name: str, prompts: Sequence[str], max_new_tokens: int) -> SetFigures:
    """Greedy answers to prompts (through the chat template where there is one)."""
    return figures(name, generate(pair, [as_chat(prompt, pair.tokenizer) for prompt in prompts], max_new_tokens))


def line(result: SetFigures) -> str:
    """One line of text."""
    shares = " ".join(f"{share:.2f}" for share in result.acceptance)
    return f"{result.name:12s} tau {result.tau:.2f} (mean of prompts {result.mean_tau:.2f}), accepted at 1.. {shares}"


def main() -> int:
    parser = argparse.ArgumentParser(description="held-out tau of a drafter")
    parser.add_argument("drafter")
    parser.add_argument("prompts", nargs="+", type=Path)
    parser.add_argument("--target", default="default")
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    pair = load_pair(args.target, args.drafter, args.dtype)
    for path in args.prompts:
        result = evaluate(pair, path.stem, read_prompts(path)[: args.count], args.max_new_tokens)
        print(json.dumps(asdict(result)), flush=True)
        print(line(result), file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
