"""The driver's side: workers that idle until they are asked, and the order in which they are."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from environments import PEERS, Peer, outer_environment
from worker import Job

from torch_dflash.errors import InputError

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Prompt:
    """One prompt: the set it comes from and its ids, the chat template applied."""

    name: str
    ids: list[int]


@dataclass(frozen=True)
class Answered:
    """One answer of one peer.

    prompt: its number. seconds: ids in to ids out. steps: target passes behind prefill. others: share of all
    processors' time that went to other processes meanwhile (and, in a virtual machine, to other machines).
    """

    peer: str
    prompt: int
    repeat: int
    seconds: float
    steps: int
    token_ids: list[int]
    others: float

    @property
    def speed(self) -> float:
        """Tokens per second, prefill included."""
        return len(self.token_ids) / self.seconds


class Worker:
    """A peer's process. What it prints goes to a log. Raises InputError, in one line, when it dies."""

    def __init__(self, peer: Peer, python: Path, job: Job, log: Path) -> None:
        self.peer, self.log = peer, log
        # Our own worker imports what this driver imports, the others must not.
        environment = dict(os.environ) if peer.environment is None else outer_environment()
        with log.open("w", encoding="utf-8") as file:
            self._process = subprocess.Popen(
                [str(python), str(HERE / "worker.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=environment | {"OMP_NUM_THREADS": str(job.threads)},
            )
        self.peak_bytes = 0
        self.warm_up_seconds = 0.0
        self.loaded = self._ask(asdict(job))

    def answer(self, prompt: Prompt, number: int, repeat: int) -> Answered:
        """Ask, and wait."""
        before, begin = busy_seconds(), time.perf_counter()
        said = self._ask({"prompt_ids": prompt.ids})
        whole = (time.perf_counter() - begin) * (os.cpu_count() or 1)
        others = busy_seconds() - before - said["cpu_seconds"]
        others = min(max(others / whole, 0.0), 1.0)  # the clock of the machine ticks in hundredths of seconds
        self.peak_bytes = said["peak_bytes"]
        return Answered(self.peer.name, number, repeat, said["seconds"], said["steps"], said["token_ids"], others)

    def _ask(self, message: dict) -> dict:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps(message) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            last = (self.log.read_text(encoding="utf-8", errors="replace").strip() or "no message").splitlines()[-1]
            raise InputError(f'peer "{self.peer.name}" ended with exit code {code} ({last}); see {self.log}')
        return json.loads(line)

    def close(self) -> None:
        """End the process: at the end of its input it leaves by itself."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=10)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()


@contextmanager
def opened(pythons: dict[Peer, Path], job_of: Callable[[Peer], Job], folder: Path) -> Iterator[list[Worker]]:
    """All peers loaded, one after the other, each under its Python; they end with the block."""
    workers: list[Worker] = []
    try:
        for peer, python in pythons.items():
            say(f"loading {peer.name} ...")
            workers.append(Worker(peer, python, job_of(peer), folder / f"{peer.name}.log"))
        yield workers
    finally:
        for worker in workers:
            worker.close()


def warm_up(workers: Sequence[Worker], prompts: Sequence[Prompt]) -> None:
    """Uncounted answers. Ours compile for each length of prompt, so they get every prompt, the others the first."""
    for worker in workers:
        own = PEERS[worker.peer.name].environment is None
        for number, prompt in enumerate(prompts if own else prompts[:1]):
            worker.warm_up_seconds += worker.answer(prompt, number, -1).seconds
        say(f"{worker.peer.name} is warm after {worker.warm_up_seconds:.1f} s")


def race(workers: Sequence[Worker], prompts: Sequence[Prompt], repeats: int) -> list[Answered]:
    """Every prompt through every worker, one at a time, the others idle. The order moves on by one each time, so that
    nobody always comes after the same neighbour."""
    answers: list[Answered] = []
    for repeat in range(repeats):
        for number, prompt in enumerate(prompts):
            first = (number + repeat) % len(workers)
            turn = [worker.answer(prompt, number, repeat) for worker in (*workers[first:], *workers[:first])]
            answers += turn
            speeds = ", ".join(f"{answer.peer} {answer.speed:.1f}" for answer in sorted(turn, key=lambda a: a.peer))
            say(f"repeat {repeat + 1}, {prompt.name} {number + 1}/{len(prompts)}: tokens/s {speeds}")
    return answers


def busy_seconds() -> float:
    """Time that all processors have worked since the machine started, the time stolen from it included (Linux)."""
    user, nice, system, _, _, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text(encoding="ascii").split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def undisturbed(answers: Sequence[Answered], most: float) -> list[Answered]:
    """The answers of those turns (one prompt in one repeat) in which other processes took at most `most` of the
    processors while any of the peers answered. Raises InputError where no turn is left."""
    worst: dict[tuple[int, int], float] = {}
    for answer in answers:
        turn = answer.prompt, answer.repeat
        worst[turn] = max(worst.get(turn, 0.0), answer.others)
    if min(worst.values()) > most:
        took = f"other processes took {min(worst.values()):.2f} or more in every turn"
        raise InputError(f"--others is {most}, and {took}: wait for an idle machine")
    return [answer for answer in answers if worst[answer.prompt, answer.repeat] <= most]


def say(line: str) -> None:
    """Progress, on stderr."""
    print(f"compare_peers: {line}", file=sys.stderr, flush=True)
