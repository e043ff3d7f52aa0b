"""Measures this machine: DFlash, plain decoding and HF eager torch on the same weights and prompts, interleaved.

Usage: .venv/bin/python scripts/measure.py [--target T --draft D --dtype bfloat16 --repeats 3], on an idle machine.

Definitions. tokens/s: new tokens / (start of the request to its last token), compilation apart. A figure is the median
over prompts and repeats, with its lowest and highest; a ratio is taken within one prompt of one repeat. Host share:
1 - (time in dispatches) / (time of the decode loop). Peak memory: growth of the resident set since the imports, at its
highest, over the bytes of the weights. The last line is one JSON document.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import jax
import torch

from torch_dflash.api import generate
from torch_dflash.hub import resolve_target
from torch_dflash.pair import DTYPES, Pair, load_pair
from torch_dflash.service import engine_for, make_pace, make_request
from torch_dflash.tokenizer import as_chat, encode_prompt

CHAT = [
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Tom has 12 apples, gives 5 to Ann and buys 8 more. How many has he now? Explain step by step.",
    "List five tips for sleeping well.",
    "Explain to a child why the sky is blue.",
]
CODE = ["def display_name(self):", "class Stack:\n    def __init__(self):", "import os\n\ndef read_file(path):"]


def peak_resident_bytes() -> int:
    """The resident set of this process at its highest."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_bytes() -> int:
    """The resident set of this process now (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def prompts_for(pair: Pair) -> list[list[int]]:
    """Token ids of the prompts, through the chat template where there is one."""
    chat = pair.tokenizer.chat_template is not None
    vocab_size = pair.target.config.vocab_size
    return [
        encode_prompt(as_chat(text, pair.tokenizer), pair.tokenizer, vocab_size) for text in (CHAT if chat else CODE)
    ]


def host_share(pair: Pair, prompt: list[int], new_tokens: int, steps_per_dispatch: int) -> float:
    """Share of the decode loop's time in which no dispatch is under way."""
    request = make_request(pair, prompt, new_tokens, stop_ids=())
    engine = engine_for(pair, make_pace(pair, None, None), [request], 1, steps_per_dispatch)
    run = engine.submit(request)
    engine.warm_up()
    while not run.decoding:
        engine.step()
    before, begin = engine.dispatch_seconds, time.perf_counter()
    while not engine.idle:
        engine.step()
    return 1 - (engine.dispatch_seconds - before) / (time.perf_counter() - begin)


def hf_speed(model: torch.nn.Module, prompt: list[int], new_tokens: int) -> float:
    """Tokens per second of HF generate, greedy, eager."""
    begin = time.perf_counter()
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        model.generate(torch.tensor([prompt]), **options)
    return new_tokens / (time.perf_counter() - begin)


def spread(values: list[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def ratio(name: str, over: str, speeds: dict[str, list[float]]) -> dict[str, float]:
    """Spread of the speed ratios, each of one prompt in one repeat."""
    return spread([a / b for a, b in zip(speeds[name], speeds[over], strict=True)])


def environment() -> dict[str, object]:
    """Where the figures come from."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    packages = {name: version(name) for name in ("torch", "jax", "torchax", "transformers")}
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, jax {jax.default_backend()}"
    return {"git": git, "argv": sys.argv, "machine": machine, "packages": packages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="default")
    parser.add_argument("--draft", default="default")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--steps-per-dispatch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments)))


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """All figures. Ours first and alone, so that peak memory is ours."""
    compilations = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compilations.append(event) if "backend_compile" in event else None
    )
    start = resident_bytes()
    pair = load_pair(arguments.target, arguments.draft, arguments.dtype)
    weights = sum(array.nbytes for params in pair.params.values() for array in params.values())
    prompts = prompts_for(pair)
    options = {"max_new_tokens": arguments.new_tokens, "steps_per_dispatch": arguments.steps_per_dispatch}
    options["ignore_eos"] = True  # the same number of tokens for everyone
    compile_times = {
        m: [generate(pair, [p], method=m, **options)[0].stats.compile_time for p in prompts] for m in METHODS
    }
    peak, warm = peak_resident_bytes() - start, len(compilations)
    share = host_share(pair, prompts[0], arguments.new_tokens, arguments.steps_per_dispatch)
    speeds, taus, equal = race(pair, prompts, arguments, options)
    return {
        "tokens_per_second": {name: spread(values) for name, values in speeds.items()},
        "speed_up_over_plain": ratio("dflash", "plain", speeds),
        "plain_over_hf": ratio("plain", "hf", speeds),
        "tau": spread(taus),
        "outputs_equal_to_plain": f"{sum(equal)} of {len(equal)}",
        "host_share": share,
        "compile_seconds": {name: sum(times) for name, times in compile_times.items()},
        "recompilations_after_warm_up": len(compilations) - warm,
        "weights_mib": weights / 2**20,
        "peak_memory_over_weights": peak / weights,
        "environment": environment(),
    }


METHODS = ("dflash", "plain")


def race(
    pair: Pair, prompts: list[list[int]], arguments: argparse.Namespace, options: dict
) -> tuple[dict[str, list[float]], list[float], list[bool]]:
    """Interleaved runs, prompt by prompt: speeds by name, taus, and whether DFlash equals plain decoding."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(resolve_target(arguments.target), dtype=DTYPES[arguments.dtype])
    hf_speed(model, prompts[0], 8)
    speeds: dict[str, list[float]] = {"dflash": [], "plain": [], "hf": []}
    taus, equal = [], []
    for repeat in range(arguments.repeats):
        for i, prompt in enumerate(prompts):
            results = {method: generate(pair, [prompt], method=method, **options)[0] for method in METHODS}
            for method, result in results.items():
                speeds[method].append(result.stats.tokens_per_second)
            speeds["hf"].append(hf_speed(model, prompt, arguments.new_tokens))
            taus.append(results["dflash"].stats.tau)
            equal.append(results["dflash"].token_ids == results["plain"].token_ids)
            latest = {name: round(values[-1], 1) for name, values in speeds.items()}
            print(
                f"repeat {repeat + 1}, prompt {i + 1}/{len(prompts)}: tokens/s {latest}, tau {taus[-1]:.2f}", flush=True
            )
    return speeds, taus, equal


if __name__ == "__main__":
    main()
