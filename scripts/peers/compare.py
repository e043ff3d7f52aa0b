"""DFlash side by side: z-lab's original, Hugging Face, and this project, on the same pair, prompts and processors.

Usage: scripts/compare_peers PROMPTS.jsonl ... [--dtype float32 --per-set 4 --repeats 3], on an idle machine. It makes
the environments that are missing (runs/peers/, minutes, once) and calls this file with --make.

Each peer is a process that loads once, warms up, and then answers one prompt at a time, greedily, while the others
idle: the driver asks them in turns. All get the same token ids (chat template applied once, here), stop ids, budget,
dtype and number of processors. Peers: original (PyPI dflash 0.1.0), hf (transformers' generate), hf-dflash (its DFlash
candidate generator), dflash and plain (this project). Definitions: table.py. A turn (one prompt, all peers) in which
other processes took more than --others of the processors does not count. Results: OUT/result.json and OUT/table.md,
written whole at the end.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from environments import FOLDER, PEERS, ROOT, Peer, make, peers_named, python_of
from race import Answered, Prompt, Worker, opened, race, say, undisturbed, warm_up
from table import figures_of, names_of, set_table, whole_table
from worker import Job

from torch_dflash.config import DrafterConfig, TargetConfig
from torch_dflash.config_reader import check_pair, read_drafter_config, read_target_config
from torch_dflash.errors import InputError, checked_integer
from torch_dflash.hub import resolve_draft, resolve_target
from torch_dflash.tokenizer import as_chat, encode_prompt, eos_ids, load_tokenizer
from torch_dflash.train.records import read_prompts

DTYPES = ("float32", "bfloat16")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line for bad input."""
    try:
        return compare(parser().parse_args(argv))
    except InputError as error:
        print(f"compare_peers: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ncompare_peers: interrupted, nothing is written", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("prompts", nargs="+", type=Path, metavar="PROMPTS.jsonl", help='prompt sets, lines of {"turns": [text, ...]}')
    add("--peers", default=",".join(PEERS), metavar="NAMES", help=f"some of {','.join(PEERS)} (default: all)")
    add("--target", default="default", help="as torch-dflash generate takes it")
    add("--draft", default="default", help="as torch-dflash generate takes it, in z-lab's layout")
    add("--dtype", choices=DTYPES, default="float32")
    add("--per-set", type=int, default=4, metavar="N", help="the first N prompts of each set (4)")
    add("--new-tokens", type=int, default=96, metavar="N", help="at most N tokens an answer (96)")
    add("--repeats", type=int, default=3, metavar="N", help="counted answers to each prompt (3)")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="processors for each (all)")
    add("--others", type=float, default=0.1, metavar="SHARE", help="leave out turns in which other processes took more")
    add("--out", type=Path, help="folder of the results (runs/peers/result-DTYPE)")
    add("--environments", type=Path, default=FOLDER, help="folder of the peers' environments (runs/peers)")
    add("--make", action="store_true", help="make environments that are missing")
    return made


def compare(arguments: argparse.Namespace) -> int:
    """Check everything, load everybody, race, write."""
    peers = peers_named(arguments.peers)
    check_numbers(arguments)
    folders = resolve_target(arguments.target), resolve_draft(arguments.draft)
    configs = read_target_config(folders[0]), read_drafter_config(folders[1])
    check_pair(configs[0].shape, configs[1])
    tokenizer = load_tokenizer(folders[0])
    prompts = prompts_of(arguments, tokenizer, configs[0])
    stop_ids = list(eos_ids(tokenizer, configs[0].eos_token_ids))
    if arguments.make:
        for name in dict.fromkeys(peer.environment for peer in peers if peer.environment is not None):
            make(name, arguments.environments)
    pythons = {peer: python_of(peer, arguments.environments) for peer in peers}
    out = writable(arguments.out or FOLDER / f"result-{arguments.dtype}")

    def job_of(peer: Peer) -> Job:
        return make_job(peer, arguments, folders, configs[1], stop_ids)

    with opened(pythons, job_of, out) as workers:
        warm_up(workers, prompts)
        machine = {"load_before": os.getloadavg(), "began": time.strftime("%Y-%m-%d %H:%M:%S %Z")}
        answers = race(workers, prompts, arguments.repeats)
        machine |= {"load_after": os.getloadavg(), "ended": time.strftime("%Y-%m-%d %H:%M:%S %Z")}
    write(out, arguments, prompts, answers, workers, machine)
    return 0


def writable(folder: Path) -> Path:
    """The folder, made where it is missing. Raises InputError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {folder} cannot be made: {error.strerror}; name another folder") from None
    return folder


def check_numbers(arguments: argparse.Namespace) -> None:
    """Raises InputError for numbers out of range, before anything is loaded."""
    for name in ("per_set", "new_tokens", "repeats"):
        checked_integer(getattr(arguments, name), f"--{name.replace('_', '-')}", 1)
    most = len(os.sched_getaffinity(0))
    checked_integer(arguments.threads, "--threads", 1, most, "the processors of this machine")
    if not 0 <= arguments.others <= 1:
        raise InputError(f"--others is {arguments.others}: use a share of the processors, 0..1")


def prompts_of(arguments: argparse.Namespace, tokenizer: object, target: TargetConfig) -> list[Prompt]:
    """The first prompts of each set as ids. Raises InputError for one that does not fit."""
    prompts = []
    for path in arguments.prompts:
        for text in read_prompts(path)[: arguments.per_set]:
            ids = encode_prompt(as_chat(text, tokenizer), tokenizer, target.vocab_size)  # type: ignore[arg-type]
            if len(ids) + arguments.new_tokens > target.context_limit:
                limit = f"the target's context is {target.context_limit}"
                raise InputError(f"{path}: a prompt has {len(ids)} tokens, {limit}; lower --new-tokens or shorten it")
            prompts.append(Prompt(path.stem, ids))
    return prompts


def make_job(
    peer: Peer, arguments: argparse.Namespace, folders: tuple[Path, Path], drafter: DrafterConfig, stop_ids: list[int]
) -> Job:
    """What the worker of a peer is told."""
    return Job(
        module=peer.module,
        method=peer.method,
        target=str(folders[0]),
        draft=str(folders[1]),
        dtype=arguments.dtype,
        threads=arguments.threads,
        max_new_tokens=arguments.new_tokens,
        stop_ids=stop_ids,
        drafter={
            "block_size": drafter.block_size,
            "mask_token_id": drafter.mask_token_id,
            "target_layer_ids": list(drafter.target_layer_ids),
        },
        packages=list(peer.packages),
    )


def write(
    out: Path,
    arguments: argparse.Namespace,
    prompts: list[Prompt],
    answers: list[Answered],
    workers: list[Worker],
    machine: dict,
) -> None:
    """Everything in OUT/result.json, the table on stdout and in OUT/table.md. Raises InputError where no turn counts;
    the answers are kept then."""
    document = {
        "argv": sys.argv,
        "git": git_commit(),
        "machine": machine | {"processor": processor(), "threads": arguments.threads, "dtype": arguments.dtype},
        "processes": {worker.peer.name: process_of(worker) for worker in workers},
        "prompts": [asdict(prompt) for prompt in prompts],
        "answers": [asdict(answer) for answer in answers],
    }
    replace(out / "result.json", json.dumps(document) + "\n")
    names = [worker.peer.name for worker in workers]
    counted = undisturbed(answers, arguments.others)
    base, reference = names_of(names)
    figures = {name: asdict(figures_of(counted, name, base, reference)) for name in names}
    turns = f"{len(counted) // len(names)} of {len(answers) // len(names)} turns counted"
    document |= {"ratio_to": base, "equal_to": reference, "figures": figures, "turns": turns}
    memory = {worker.peer.name: worker.peak_bytes for worker in workers}
    tables = f"{whole_table(counted, names, memory)}\n{set_table(counted, names, prompts)}\n{turns}\n"
    replace(out / "result.json", json.dumps(document) + "\n")
    replace(out / "table.md", tables)
    print(tables)
    say(f"written: {out / 'result.json'}, {out / 'table.md'}")


def process_of(worker: Worker) -> dict:
    """Versions, loading and warm-up seconds, peak memory."""
    return worker.loaded | {"warm_up_seconds": worker.warm_up_seconds, "peak_bytes": worker.peak_bytes}


def git_commit() -> str:
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def processor() -> str:
    """The name of the processor (Linux), or what Python knows of it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def replace(path: Path, content: str) -> None:
    """Write a file whole or not at all."""
    scratch = path.with_name(f"{path.name}.new")
    scratch.write_text(content, encoding="utf-8")
    scratch.replace(path)


if __name__ == "__main__":
    sys.exit(main())
