"""Studies of what DFlash's speed is made of. Each leaves a table (.md), a picture (.png) and a JSON document in --out.

    verify-cost   seconds of a verification against query tokens and rows: measured here, and TPUs' rooflines
    tau-of-k      tokens kept per step against the number of drafts, the geometric model, what alpha and K are worth
    decay         how far into the block drafts are right, by prompt set
    cost-model    the speed-up predicted from the cost of its parts, beside a race of the engines

RUN is the --out folder of a greedy `torch-dflash bench` run. Times want an idle machine. docs/studies.md has results.
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch_dflash.bench.datasets import OWN, read_datasets
from torch_dflash.errors import InputError, checked_integer
from torch_dflash.model_arguments import use_compilation_cache

# jax, torch and the studies are imported where they are used: `--help` must not wait for them, and JAX looks for a
# compilation cache only once, at the first compilation, which happens while torchax is imported.
if TYPE_CHECKING:
    from torch_dflash.pair import Pair

DTYPES = ("bfloat16", "float32")


def main(argv: list[str] | None = None) -> int:
    """0; 2 for bad input, in one line."""
    arguments = parser().parse_args(argv)
    use_compilation_cache()
    try:
        arguments.run(arguments)
    except InputError as error:
        print(f"study: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """One subcommand for each study."""
    whole = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    studies = whole.add_subparsers(required=True, metavar="STUDY")
    cost = studies.add_parser("verify-cost")
    cost.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16", "float32"])
    cost.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32], help="query tokens of a row")
    cost.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8])
    cost.add_argument("--context", type=int, default=128, help="positions before them (default 128)")
    cost.add_argument("--repeats", type=int, default=7)
    of_k, by_task = studies.add_parser("tau-of-k"), studies.add_parser("decay")
    of_k.add_argument("--check", nargs="+", type=Path, default=[], metavar="RUN", help="runs with fewer --num-drafts")
    for command in (of_k, by_task):
        command.add_argument("bench", type=Path, metavar="RUN", help="--out folder of a bench run with all drafts")
    model = studies.add_parser("cost-model")
    model.add_argument("--dataset", default=",".join(OWN), metavar="SET,...", help="sets, as bench takes them")
    model.add_argument("--data", type=Path, metavar="FOLDER", help="where the named sets are")
    model.add_argument("--max-samples", type=int, default=6, metavar="N", help="the first N prompts (default 6)")
    model.add_argument("--max-new-tokens", type=int, default=96, metavar="N")
    model.add_argument("--steps-per-dispatch", type=int, default=4, metavar="N")
    model.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    for command in (cost, model):
        command.add_argument("--target", default="default")
        command.add_argument("--draft", default="default")
    runs = {cost: run_verify_cost, of_k: run_tau_of_k, by_task: run_decay, model: run_cost_model}
    for command, run in runs.items():
        command.add_argument("--out", type=Path, required=True, metavar="FOLDER")
        command.set_defaults(run=run)
    return whole


def load(arguments: argparse.Namespace, dtype: str) -> "Pair":
    """A pair with a DFlash drafter. Raises InputError."""
    from torch_dflash.pair import load_pair

    pair = load_pair(arguments.target, arguments.draft, dtype)
    if pair.method != "dflash":
        raise InputError(f"--draft {arguments.draft}: is made for {pair.method}; name a DFlash drafter")
    return pair


def run_verify_cost(arguments: argparse.Namespace) -> None:
    """Raises InputError."""
    from studies import verify_cost
    from studies.output import open_out, write

    asked = arguments.tokens, arguments.rows, arguments.context, arguments.repeats
    grid = verify_cost.checked_grid(*asked)
    folder = open_out(arguments)
    found = verify_cost.measure({dtype: load(arguments, dtype) for dtype in arguments.dtype}, grid)
    draw, text = partial(verify_cost.draw, grid=grid, found=found), verify_cost.lines(grid, found)
    write(folder, verify_cost.NAME, verify_cost.document(grid, found), text, draw, 2)


def run_tau_of_k(arguments: argparse.Namespace) -> None:
    """Raises InputError."""
    from studies import tau_of_k
    from studies.output import open_out, write
    from studies.trace import read_trace

    trace = read_trace(arguments.bench)
    others = [tau_of_k.read_check(trace, path) for path in arguments.check]
    folder, results, checked = open_out(arguments), tau_of_k.taus(trace), tau_of_k.checks(trace, others)
    draw, text = partial(tau_of_k.draw, results=results, checked=checked), tau_of_k.lines(results, checked)
    write(folder, tau_of_k.NAME, tau_of_k.document(trace, results, checked), text, draw, 2)


def run_decay(arguments: argparse.Namespace) -> None:
    """Raises InputError."""
    from studies import decay
    from studies.output import open_out, write
    from studies.trace import read_trace

    trace = read_trace(arguments.bench)
    folder, results = open_out(arguments), decay.decays(trace)
    draw = partial(decay.draw, results=results)
    write(folder, decay.NAME, decay.document(trace, results), decay.lines(results), draw, 2)


def run_cost_model(arguments: argparse.Namespace) -> None:
    """Raises InputError."""
    from studies import cost_model, race
    from studies.output import open_out, write

    for name, least in (("max_samples", 1), ("max_new_tokens", 2), ("steps_per_dispatch", 1)):
        checked_integer(getattr(arguments, name), f"--{name.replace('_', '-')}", least)
    datasets = read_datasets(arguments.dataset.split(","), arguments.data, arguments.max_samples)
    folder, pair = open_out(arguments), load(arguments, arguments.dtype)
    bench = race.bench_for(arguments.max_new_tokens, arguments.steps_per_dispatch)
    measured = [race.measure(pair, bench, dataset) for dataset in datasets]
    results = [cost_model.predict(each) for each in measured]
    draw = partial(cost_model.draw, results=results)
    write(folder, cost_model.NAME, cost_model.document(measured, results), cost_model.lines(results), draw, 1)


if __name__ == "__main__":
    raise SystemExit(main())
