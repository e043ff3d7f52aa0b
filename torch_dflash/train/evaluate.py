"""Held-out tau, by really running the decode loop.

python -m torch_dflash.train.evaluate DRAFTER gsm8k.jsonl humaneval.jsonl --count 32 --max-new-tokens 128
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from bridge.views import Params
from torch_dflash.api import Result, generate
from torch_dflash.block import DrafterFunctions
from torch_dflash.errors import InputError
from torch_dflash.options import Sampling
from torch_dflash.pair import Pair, load_pair
from torch_dflash.propose_eagle import Eagle3Functions
from torch_dflash.train.answers import prompt_ids
from torch_dflash.train.records import read_prompts
from torch_dflash.train.trainer import BUFFERS


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
    """What a set's results come to. Prompts whose answer ended with prefill's token have no step and do not count;
    without any step tau is 0."""
    stats = [result.stats for result in results if result.stats.steps]
    if not stats:
        return SetFigures(name, len(results), 0, 0, 0.0, 0.0, ())
    steps = sum(s.steps for s in stats)
    histogram = [sum(column) for column in zip(*(s.accept_histogram for s in stats), strict=True)]
    acceptance = tuple(sum(histogram[k:]) / steps for k in range(1, len(histogram)))
    kept = sum(s.new_tokens - 1 for s in stats)
    mean = sum(s.tau for s in stats) / len(stats)
    return SetFigures(name, len(results), sum(s.new_tokens for s in stats), steps, kept / steps, mean, acceptance)


def evaluate(
    pair: Pair, name: str, prompts: Sequence[str], max_new_tokens: int, temperature: float = 0.0
) -> SetFigures:
    """The figures of `decoded` answers."""
    return figures(name, decoded(pair, prompts, max_new_tokens, temperature))


def decoded(pair: Pair, prompts: Sequence[str], max_new_tokens: int, temperature: float = 0.0) -> list[Result]:
    """Answers to prompts (through the chat template where there is one). Above temperature 0 prompt i has seed i."""
    sampling = [Sampling(temperature=temperature, seed=i) for i in range(len(prompts))]
    ids = [prompt_ids(pair, prompt) for prompt in prompts]
    return generate(pair, ids, max_new_tokens, sampling=sampling)


@dataclass(frozen=True)
class HeldOutPlan:
    """Evaluation while training: prompt sets by name, every so many steps (0: never) and after the last."""

    every: int = 0
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    max_new_tokens: int = 64


@dataclass(frozen=True)
class HeldOut:
    """The plan with a target to decode with."""

    pair: Pair
    plan: HeldOutPlan

    def due(self, step: int, steps: int) -> bool:
        return step % self.plan.every == 0 or step == steps

    def __call__(self, drafter: DrafterFunctions | Eagle3Functions, params: Params) -> dict[str, SetFigures]:
        """Decode with a drafter under training, its parameters rounded to the pair's dtype, buffers as they are.

        Parameters are arguments of what is compiled: only the first call compiles.
        """
        held = {name: jnp.asarray(np.asarray(value)) for name, value in params.items()}
        cast = {name: value if name in BUFFERS else value.astype(self.pair.dtype) for name, value in held.items()}
        pair = replace(self.pair, drafter=drafter, params=self.pair.params | {"drafter": cast})
        return {name: evaluate(pair, name, some, self.plan.max_new_tokens) for name, some in self.plan.groups.items()}


def make_held_out(pair: Pair, plan: HeldOutPlan) -> HeldOut | None:
    """None where nothing is to be evaluated. Raises InputError for a prompt that does not fit the target."""
    if not plan.every:
        return None
    limit = pair.target.config.context_limit
    for name, prompts in plan.groups.items():
        longest = max(len(prompt_ids(pair, prompt)) for prompt in prompts)
        if longest >= limit:
            raise InputError(f"a held-out prompt of {name} has {longest} tokens and the target's context {limit}")
    return HeldOut(pair, plan)


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
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    pair = load_pair(args.target, args.drafter, args.dtype)
    for path in args.prompts:
        result = evaluate(pair, path.stem, read_prompts(path)[: args.count], args.max_new_tokens, args.temperature)
        print(json.dumps(asdict(result)), flush=True)
        print(line(result), file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
