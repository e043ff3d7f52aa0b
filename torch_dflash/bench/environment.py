"""Where figures come from: code, packages, machine."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "jax", "jaxlib", "torchax", "transformers", "numpy")
_ROOT = Path(__file__).parents[2]


def environment() -> dict[str, Any]:
    """Figures of two runs belong together only when this is the same for both."""
    return {"git": git_commit(), "packages": {name: version(name) for name in PACKAGES}, "machine": machine()}


def git_commit() -> str:
    """The commit that this code is from, "-dirty" when it has been changed since; "unknown" outside of a checkout (also
    where the package is installed below somebody else's)."""
    try:
        _git("ls-files", "--error-unmatch", __file__)
        changed = _git("status", "--porcelain", "--", "torch_dflash", "bridge")
        return _git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def machine() -> str:
    """Processor, cores that this process may use, and JAX's device."""
    import jax

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    device = jax.devices()[0]
    return f"{_processor()}, {cores} cores, {platform.system()}, JAX on {len(jax.devices())} {device.device_kind}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
