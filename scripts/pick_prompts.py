"""Picks prompts at random: as many from each file, none longer than so many tokens. JSON lines on stdout.

Usage: .venv/bin/python scripts/pick_prompts.py TRAIN.jsonl ... [--each 61 --most-tokens 160 --seed 0] > prompts.jsonl
"""

import argparse
import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from torch_dflash.config_reader import read_target_config
from torch_dflash.hub import resolve_target
from torch_dflash.tokenizer import as_chat, encode_prompt, load_tokenizer
from torch_dflash.train.records import read_prompts


def short(path: Path, target: Path, most_tokens: int, source: random.Random) -> Iterator[str]:
    """Prompts of a file in random order, without the long ones; bytes count where the target has no tokenizer."""
    tokenizer, vocab_size = load_tokenizer(target), read_target_config(target).vocab_size
    texts = list(read_prompts(path))
    source.shuffle(texts)
    for text in texts:
        ids = text.encode() if tokenizer is None else encode_prompt(as_chat(text, tokenizer), tokenizer, vocab_size)
        if len(ids) <= most_tokens:
            yield text


def main() -> None:
    """The lines are as `torch-dflash train` reads them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+", type=Path)
    parser.add_argument("--target", default="default", help="whose tokens are counted")
    parser.add_argument("--each", type=int, default=61)
    parser.add_argument("--most-tokens", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    target, source = resolve_target(arguments.target), random.Random(arguments.seed)
    for path in arguments.prompts:
        for text in islice(short(path, target, arguments.most_tokens, source), arguments.each):
            print(json.dumps({"turns": [text]}))


if __name__ == "__main__":
    main()
