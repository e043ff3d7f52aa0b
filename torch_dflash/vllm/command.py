"""`torch-dflash vllm-check`: what the plugin finds in this environment, and what it would replace."""

import argparse
import importlib.metadata

from torch_dflash.errors import InputError
from torch_dflash.vllm import seams

PACKAGES = ("vllm-tpu", seams.SERVER, "jax", "torchax", "torch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none."""
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print versions and seams. Raises InputError when something is missing."""
    version = seams.server_version()
    if version is None:
        raise InputError(f"{seams.SERVER} is not installed in this environment: install vllm-tpu beside torch-dflash")
    for package in PACKAGES:
        print(f"{package} {_version(package)}")
    lacking = seams.missing()
    for seam in seams.SEAMS:
        state = "MISSING" if seam in lacking else "would be replaced" if seam.replaced else "used"
        print(f"{state:18}{seam.name}: {seam.why}")
    if lacking:
        raise InputError(seams.refusal(version, lacking))
    tested = "tested" if version in seams.TESTED else "not tested, but nothing is missing"
    print(f"ready: {seams.SERVER} {version} ({tested})")
    return 0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"
