"""`torch-dflash bench`: methods beside plain decoding, on the same prompts, one code path, interleaved."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_dflash.bench.datasets import NAMED, OWN, Dataset, read_datasets
from torch_dflash.bench.hub_datasets import FORM
from torch_dflash.bench.methods import DEFAULT, METHODS, check_methods
from torch_dflash.bench.plot import check_plots
from torch_dflash.errors import InputError, checked_integer
from torch_dflash.model_arguments import add_pair_arguments, draft_name, load, num_drafts_of, use_compilation_cache

# jax, torch and transformers take seconds to import: `--help` and bad arguments must not wait for them.
if TYPE_CHECKING:
    from torch_dflash.bench.folder import RunFolder
    from torch_dflash.bench.runner import Bench
    from torch_dflash.pair import Pair


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    parser.set_defaults(run=run)
    add = parser.add_argument
    sets = f"sets, with commas: {', '.join(OWN)} (these ship, and are the default); {', '.join(NAMED)} (NAME.jsonl in "
    sets += '--data FOLDER); files of JSON lines, {"turns": [text, ...]}; or '
    sets += f"{FORM}. Of several turns the first is used"
    add("--dataset", default=",".join(OWN), metavar="SET,...", help=sets)
    add("--data", type=Path, metavar="FOLDER", help="where the named sets are")
    names, default = ", ".join(METHODS), ",".join(DEFAULT)
    measured = f"what is measured, with commas: {names} (default {default})"
    add("--method", default=default, metavar="NAME,...", help=measured)
    add("--eagle3-head", metavar="HEAD", help="what eagle3 drafts with: folder or hub id of an EAGLE-3 head")
    add("--eagle3-num-drafts", type=int, metavar="K", help="drafts of eagle3 in each step (default 2)")
    add("--max-samples", type=int, default=8, metavar="N", help="the first N prompts of each set (default 8)")
    add("--rows", type=int, default=1, metavar="R", help="prompts at a time (default 1)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    add(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="prompt i is drawn with S + i; also the bootstrap's",
    )
    thinking = "enable_thinking for the chat template, where it knows that (default off)"
    add("--thinking", action=argparse.BooleanOptionalAction, default=False, help=thinking)
    add("--out", type=Path, required=True, metavar="FOLDER", help="results; the same command again goes on there")
    add("--json", action="store_true", help="print the JSON document instead of Markdown")
    add_pair_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure what has not been measured yet, then report. Returns 0, or 1 for outputs that differ from plain
    decoding's in float32. Raises InputError."""
    methods = tuple(arguments.method.split(","))
    check_arguments(arguments, methods)
    datasets = read_datasets(arguments.dataset.split(","), arguments.data, arguments.max_samples)
    check_plots()

    from torch_dflash.bench.environment import environment
    from torch_dflash.bench.folder import open_folder
    from torch_dflash.bench.report import report
    from torch_dflash.bench.table import not_lossless

    bench = bench_of(arguments, methods)
    folder = open_folder(arguments.out, settings_of(arguments, methods, datasets), environment())
    measure_all(arguments, bench, datasets, folder)
    results, about, text = report(folder, [dataset.name for dataset in datasets], methods, bench.seed)
    print(json.dumps(about) if arguments.json else text.rstrip())
    return int(bool(not_lossless(arguments.dtype, results)))


def check_arguments(arguments: argparse.Namespace, methods: Sequence[str]) -> None:
    """All that can be known before anything is read. Raises InputError."""
    check_methods(methods)
    for name, least, why in (("max_samples", 1, ""), ("rows", 1, ""), ("max_new_tokens", 2, "prefill gives the first")):
        checked_integer(getattr(arguments, name), f"--{name.replace('_', '-')}", least, why=why)
    checked_integer(arguments.seed, "--seed", 0, 2**64 - 1)
    check_drafters(arguments, methods)
    if arguments.thinking and arguments.no_chat:
        raise InputError("--thinking has no meaning beside --no-chat: leave one out")


def check_drafters(arguments: argparse.Namespace, methods: Sequence[str]) -> None:
    """Every method has what it drafts with, and nothing is named for one that does not run. Raises InputError."""
    if "dflash" in methods and draft_name(arguments) is None:
        raise InputError("--method dflash needs a drafter, and --draft is none: name one, or leave the method out")
    if "eagle3" in methods and arguments.eagle3_head is None:
        raise InputError("--method eagle3 needs a head: --eagle3-head names it, or leave the method out")
    own = {"--num-drafts": "dflash", "--eagle3-head": "eagle3", "--eagle3-num-drafts": "eagle3"}
    for option, method in own.items():
        value = vars(arguments)[option[2:].replace("-", "_")]
        if value is not None and method not in methods:
            raise InputError(f"{option} is {value}, and --method has no {method}: leave it out")


def load_pairs(arguments: argparse.Namespace, methods: Sequence[str]) -> "dict[str, Pair]":
    """A pair for each method; all share one target in memory. Raises InputError for what does not fit it."""
    from torch_dflash.pair import with_head

    pair = load(arguments, draft_name(arguments) if "dflash" in methods else None)
    return {name: with_head(pair, arguments.eagle3_head) if name == "eagle3" else pair for name in methods}


def bench_of(arguments: argparse.Namespace, methods: tuple[str, ...]) -> "Bench":
    """How it is measured. Raises InputError for a temperature that is none."""
    from torch_dflash.bench.runner import Bench
    from torch_dflash.options import Sampling

    Sampling(temperature=arguments.temperature)
    return Bench(
        methods=methods,
        rows=arguments.rows,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
        num_drafts={"dflash": num_drafts_of(arguments), "eagle3": arguments.eagle3_num_drafts},
        steps_per_dispatch=checked_integer(arguments.steps_per_dispatch, "--steps-per-dispatch", 1),
        chat=not arguments.no_chat,
        thinking=arguments.thinking,
    )


# What decides the figures, besides the prompts. The folder of a run is refused to other values of these.
DECISIVE = (
    *("max_samples", "max_new_tokens", "temperature", "rows", "seed", "thinking", "no_chat", "target", "dtype"),
    *("block_size", "num_drafts", "eagle3_head", "eagle3_num_drafts", "steps_per_dispatch", "tp", "dp"),
)


def settings_of(arguments: argparse.Namespace, methods: Sequence[str], datasets: Sequence[Dataset]) -> dict[str, Any]:
    """Name -> value, of all that decides the figures. A set stands with what is in it."""
    sets = {dataset.name: dataset.digest for dataset in datasets}
    draft = draft_name(arguments) if "dflash" in methods else None
    own = {"dataset": sets, "method": list(methods), "draft": draft}
    return own | {name: getattr(arguments, name) for name in DECISIVE}


def measure_all(
    arguments: argparse.Namespace, bench: "Bench", datasets: Sequence[Dataset], folder: "RunFolder"
) -> None:
    """Every batch that the folder does not hold yet. Nothing is loaded where it holds all."""
    from tqdm import tqdm

    from torch_dflash.bench.folder import batches_of
    from torch_dflash.bench.runner import check_thinking, measure, requests_of

    there = folder.batches()
    done = {d.name: sum(len(b.outcomes[bench.methods[0]]) for b in batches_of(there, d.name)) for d in datasets}
    total = sum(len(dataset.prompts) for dataset in datasets)
    if sum(done.values()) == total:
        return
    use_compilation_cache()
    pairs = load_pairs(arguments, bench.methods)
    pair = pairs[bench.methods[0]]
    check_thinking(pair, bench)
    # Of all sets, so that a prompt that does not fit is refused before the first one runs.
    requests = {dataset.name: requests_of(pair, dataset, bench) for dataset in datasets}
    folder.begin()
    with tqdm(total=total, initial=sum(done.values()), unit="prompt") as bar:
        for name, asked in requests.items():
            bar.set_postfix_str(name)
            for batch in measure(pairs, bench, name, asked, done[name]):
                folder.append(batch)
                bar.update(len(batch.outcomes[bench.methods[0]]))
