"""The peers, and the environment that each of them runs in.

Others pin other versions, so each has a virtual environment under runs/peers/, which git ignores. Making one is safe to
repeat: what is finished has a stamp and is left alone.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from torch_dflash.errors import InputError

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "runs" / "peers"
TORCH = "2.13.0+cpu"  # the local label is on no CUDA build
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # where the configured index lacks that wheel
REQUIREMENTS = {
    "original": ("dflash==0.1.0", "transformers==5.15.0"),
    "hf": ("transformers==5.24.0",),
}


@dataclass(frozen=True)
class Peer:
    """One row of the table.

    environment: a key of REQUIREMENTS, or None for this project's own. module, method: see worker.Job. packages: whose
    versions belong to its figures.
    """

    name: str
    environment: str | None
    module: str
    method: str
    packages: tuple[str, ...]


_OURS = ("torch-dflash", "torch", "jax", "torchax")
PEERS = {
    peer.name: peer
    for peer in (
        Peer("original", "original", "peer_original", "dflash", ("dflash", "torch", "transformers")),
        Peer("hf", "hf", "peer_hf", "plain", ("torch", "transformers")),
        Peer("hf-dflash", "hf", "peer_hf", "dflash", ("torch", "transformers")),
        Peer("dflash", None, "peer_ours", "dflash", _OURS),
        Peer("plain", None, "peer_ours", "plain", _OURS),
    )
}


def peers_named(text: str) -> list[Peer]:
    """The peers of a list with commas, in its order. Raises InputError."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in PEERS:
            raise InputError(f'--peers names "{name}", which is unknown: use some of {", ".join(PEERS)}')
        if names.count(name) > 1:
            raise InputError(f'--peers names "{name}" twice: name each peer once')
    return [PEERS[name] for name in names]


def python_of(peer: Peer, folder: Path) -> Path:
    """The Python that runs a peer. Raises InputError where its environment is missing or of another version."""
    if peer.environment is None:
        return Path(sys.executable)
    place = folder / peer.environment
    if not is_finished(place, peer.environment):
        raise InputError(f'peer "{peer.name}": {place} is missing or out of date; make it with --make')
    return place / "bin" / "python"


def is_finished(place: Path, name: str) -> bool:
    """Whether the environment `name` at `place` holds what it should."""
    stamp = place / "installed"
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == stamp_of(name)


def stamp_of(name: str) -> str:
    return "\n".join((f"torch=={TORCH}", *REQUIREMENTS[name])) + "\n"


def make(name: str, folder: Path) -> None:
    """Make an environment unless it is finished (minutes). Raises InputError with what pip said last."""
    place = folder / name
    if is_finished(place, name):
        return
    print(f"compare_peers: making {place} (minutes, once) ...", file=sys.stderr, flush=True)
    run("make the environment", sys.executable, "-m", "venv", "--clear", str(place))
    pinned = place / "torch.txt"
    pinned.write_text(f"torch=={TORCH}\n", encoding="utf-8")
    pip = (str(place / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "-q", "install")
    try:
        run("install torch", *pip, "-r", str(pinned))
    except InputError:
        run("install torch", *pip, "-r", str(pinned), "--index-url", CPU_INDEX)
    # The constraint keeps the requirements of a peer from bringing another torch.
    run(f"install {name}", *pip, "-c", str(pinned), *REQUIREMENTS[name])
    run("check torch", str(place / "bin" / "python"), "-c", "import torch; assert torch.version.cuda is None")
    (place / "installed").write_text(stamp_of(name), encoding="utf-8")


def run(what: str, *command: str) -> None:
    """Run a command of the set-up. Raises InputError with the last line of its errors."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=outer_environment())
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing was said").splitlines()[-1]
        raise InputError(f"cannot {what} ({said}); check the network and the disk, then run it again with --make")


def outer_environment() -> dict[str, str]:
    """This process's environment without the paths to this project's own packages."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
