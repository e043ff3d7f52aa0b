"""The worker's side: one peer, loaded once in a process and an environment of its own, then asked prompt by prompt.

Needs the standard library only, since it runs under every peer's Python. JSON lines: the first line on stdin is a Job;
the reply says what was loaded. Every further line is {"prompt_ids": [...]}, its reply an answer. The end of stdin ends
the worker. Seconds are wall-clock, from ids in to ids out, tokenizer and pipe apart.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import IO

Answer = Callable[[list[int]], tuple[list[int], int]]  # prompt ids -> new ids, target passes behind prefill


@dataclass(frozen=True)
class Job:
    """What a peer is to load and how it is to answer: greedily, one prompt at a time.

    module: file of this folder that knows the peer. method: "dflash" or "plain". target, draft: folders.
    dtype: "float32" or "bfloat16". threads: processors that the process may use. stop_ids: they end an answer and
    belong to it. drafter: block_size, mask_token_id and target_layer_ids, as this project understands them.
    packages: whose versions are told.
    """

    module: str
    method: str
    target: str
    draft: str
    dtype: str
    threads: int
    max_new_tokens: int
    stop_ids: list[int]
    drafter: dict
    packages: list[str]


def main() -> None:
    replies = claim_stdout()
    job = Job(**json.loads(sys.stdin.readline()))
    confine(job.threads)
    begin = time.perf_counter()
    answer: Answer = import_module(job.module).load(job)
    seconds = time.perf_counter() - begin
    reply(replies, {"seconds": seconds, "versions": {name: version(name) for name in job.packages}})
    for line in sys.stdin:
        prompt_ids = json.loads(line)["prompt_ids"]
        begin, worked = time.perf_counter(), time.process_time()
        token_ids, steps = answer(prompt_ids)
        used = {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - worked}
        reply(replies, {"token_ids": token_ids, "steps": steps, "peak_bytes": peak_bytes(), **used})


def claim_stdout() -> IO[str]:
    """The pipe to the driver, for replies alone: what libraries print goes to stderr from now on."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def reply(replies: IO[str], message: dict) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def confine(threads: int) -> None:
    """The same processors for every peer. XLA makes as many threads as it may use processors, PyTorch reads
    OMP_NUM_THREADS; both look when they are imported."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    os.environ["OMP_NUM_THREADS"] = str(threads)


def peak_bytes() -> int:
    """The resident set of this process at its highest (Linux). Not ru_maxrss, which begins at the parent's."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) * 1024


if __name__ == "__main__":
    main()
