"""What a drafter reaches when the target draws, and what drafts of likeliest tokens could reach at most.

Usage: .venv/bin/python scripts/likeliest_bound.py PROMPTS.jsonl ... [--count 32 --max-new-tokens 128 --temperature 1]

Definition. The pair answers prompt i with seed i; the text is the target's own draw. For the bound a step proposes, at
each of its B-1 positions, the token that the target itself finds likeliest behind the drawn text (no drafter knows
more), and keeps the drafts up to the first one that was not drawn, and one token more. tau: kept tokens / steps, of all
prompts of a set together. The DFlash paper drafts likeliest tokens; this project draws its drafts with the target's
noise, which this does not bound.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from torch_dflash.hub import resolve_target
from torch_dflash.models.target import Target
from torch_dflash.pair import DTYPES, load_pair, load_target
from torch_dflash.reference import target_pass
from torch_dflash.train.answers import prompt_ids
from torch_dflash.train.evaluate import decoded, figures, line
from torch_dflash.train.records import read_prompts


def steps(drawn_was_likeliest: Sequence[bool], block_size: int) -> int:
    """Steps that an answer takes, of which the first token comes from prefill and does not count.

    Example: [right, wrong, right], blocks of 4: the step keeps 2 tokens, the next one 1."""
    count = position = 0
    while position < len(drawn_was_likeliest):
        block = [*drawn_was_likeliest[position : position + block_size - 1], False]
        position, count = position + block.index(False) + 1, count + 1
    return count


def likeliest(target: Target, prompt: Sequence[int], answer: Sequence[int]) -> list[bool]:
    """Of each token of the answer but the first: whether it was the target's likeliest."""
    logits, _ = target_pass(target, [*prompt, *answer])
    best = logits[len(prompt) : -1].argmax(-1).tolist()
    return [token == wanted for token, wanted in zip(answer[1:], best, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+", type=Path)
    parser.add_argument("--target", default="default")
    parser.add_argument("--draft", default="default")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
    pair = load_pair(args.target, args.draft, args.dtype)
    _, target = load_target(resolve_target(args.target), torch.float32)
    block_size = pair.proposer(None, None).num_drafts + 1
    for path in args.prompts:
        prompts = read_prompts(path)[: args.count]
        results = decoded(pair, prompts, args.max_new_tokens, args.temperature)
        answers = zip(prompts, results, strict=True)
        right = [likeliest(target, prompt_ids(pair, text), result.token_ids) for text, result in answers]
        kept, least = sum(map(len, right)), sum(steps(each, block_size) for each in right)
        share = sum(map(sum, right)) / kept
        print(line(figures(path.stem, results)))
        print(f"  likeliest tokens: tau at most {kept / least:.2f}; {share:.2f} of {kept} drawn were the likeliest")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
