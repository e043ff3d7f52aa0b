"""Measures tokens per second of the whole engine against the number of rows: DFlash, plain decoding, and "auto".

Usage: .venv/bin/python scripts/throughput.py PROMPTS.jsonl ... [--rows 1 2 4 8 16], on an idle machine.

Definition. 3 R requests, each --new-tokens tokens (end-of-text ignored), on an engine of R rows; tokens/s is all their
tokens / the engine's time from the first submit to the last token, prefill included, compilation apart. The methods'
engines take turns, one step each, since a machine is fast and slow in spells of seconds; a ratio is taken within one
repeat. Three requests a row: with one, most of what is seen is how the last rows end, alone. "auto" is
num_drafts="auto": the engine measures and chooses. A dispatch's rows are padded to a power of two, as in an open
engine. Every engine gets a first batch that is not counted, so that auto has its measurements as a server would. The
last line is one JSON document.
"""

import argparse
import json
import statistics
import sys
import time
from itertools import cycle, islice
from pathlib import Path

from torch_dflash.engine import Engine
from torch_dflash.pair import DTYPES, Pair, load_pair
from torch_dflash.service import engine_for, make_pace, make_request
from torch_dflash.tokenizer import as_chat
from torch_dflash.train.records import read_prompts

EACH = 3  # requests for each row
METHODS = {"dflash": (None, None), "plain": ("plain", None), "auto": (None, "auto")}


def tokens_per_second(engines: dict[str, Engine], requests: list) -> dict[str, float]:
    """One batch through each of the engines, which are warm and take turns."""
    seconds = dict.fromkeys(engines, 0.0)
    runs = {name: [engine.submit(request) for request in requests] for name, engine in engines.items()}
    while not all(engine.idle for engine in engines.values()):
        for name, engine in engines.items():
            if not engine.idle:
                begin = time.perf_counter()
                engine.step()
                engine.device.wait()  # a prompt chunk that is still under way is this engine's
                seconds[name] += time.perf_counter() - begin
    return {name: sum(len(run.token_ids) for run in runs[name]) / seconds[name] for name in engines}


def measure(pair: Pair, prompts: list[str], rows: int, new_tokens: int, repeats: int) -> dict[str, list[float]]:
    """Tokens per second of each method, one figure a repeat."""
    texts = list(islice(cycle(prompts), EACH * rows * (repeats + 1)))
    requests = [make_request(pair, as_chat(text, pair.tokenizer), new_tokens, stop_ids=()) for text in texts]
    engines = {}
    for name, (method, num_drafts) in METHODS.items():
        engine = engines[name] = engine_for(pair, make_pace(pair, method, num_drafts), requests, rows, 8, finer_by=2)
        for request in requests[-EACH * rows :]:
            engine.submit(request)
        engine.warm_up()
        while not engine.idle:
            engine.step()
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for repeat in range(repeats):
        batch = requests[EACH * repeat * rows : EACH * (repeat + 1) * rows]
        for name, speed in tokens_per_second(engines, batch).items():
            speeds[name].append(speed)
    return speeds


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+", type=Path)
    parser.add_argument("--target", default="default")
    parser.add_argument("--draft", default="default")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    pair = load_pair(args.target, args.draft, args.dtype)
    # The sets take turns, so that a batch has some of each.
    prompts = [text for group in zip(*map(read_prompts, args.prompts), strict=False) for text in group]
    results = {}
    for rows in args.rows:
        speeds = results[rows] = measure(pair, prompts, rows, args.new_tokens, args.repeats)
        better = [max(pair) for pair in zip(speeds["dflash"], speeds["plain"], strict=True)]
        ratios = {
            "dflash/plain": [a / b for a, b in zip(speeds["dflash"], speeds["plain"], strict=True)],
            "auto/better": [a / b for a, b in zip(speeds["auto"], better, strict=True)],
        }
        shown = ", ".join(f"{name} {spread(values)}" for name, values in (speeds | ratios).items())
        print(f"R {rows}: {shown}", flush=True)
    print(json.dumps({"argv": sys.argv, "tokens_per_second": results}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
