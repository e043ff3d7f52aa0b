"""Programs compiled for TPU chips that are not there, by libtpu on an ordinary host.

libtpu lets one process at a time use it. The environment that keeps it quiet is set here, before it is loaded.
"""

import logging
import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import jax
from jax.experimental import topologies

from bridge.platform import TPU, Platform, with_mesh
from torch_dflash.config import DrafterConfig, TargetConfig
from torch_dflash.errors import InputError
from torch_dflash.pair import timed
from torch_dflash.tpu.chips import Chip
from torch_dflash.tpu.hlo import Facts, facts_of
from torch_dflash.tpu.plan import Setup
from torch_dflash.tpu.programs import Workload, lower_decode, lower_prefill, shapes_only
from torch_dflash.tpu.report import FUSED, PLAIN

log = logging.getLogger("torch_dflash")

PREFILL = "prefill chunk"
STEPS = 8
QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",  # it wants one, whatever is compiled for
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_LOG_DIR": "disabled",
}


def why_not() -> str | None:
    """Why nothing can be compiled here; None if it can."""
    return None if find_spec("libtpu") else "libtpu is not installed (pip install libtpu==0.0.52)"


def platform_of(chip: Chip, dp: int, tp: int) -> Platform:
    """dp * tp of these chips. Raises InputError where libtpu is missing or in use."""
    if reason := why_not():
        raise InputError(f"nothing is compiled: {reason}")
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    try:
        topology = topologies.get_topology_desc(topology_name=chip.topology(dp * tp), platform="tpu")
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"libtpu does not start ({reason}): one process at a time can use it") from None
    return with_mesh(TPU, topology.devices, dp, tp)


def compile_setup(setup: Setup) -> tuple[tuple[str, Facts], ...]:
    """The programs of a setup: a prompt chunk, a plain step, a DFlash step, the last two in loops of STEPS steps, of
    which the facts count one. Raises InputError."""
    platform = platform_of(setup.chip, 1, setup.tp)
    workload = Workload(setup.rows, min(setup.context + setup.drafter.block_size - 1, setup.target.context_limit))
    found = []
    for name, lowered in lowered_programs(setup.target, setup.drafter, platform, workload):
        with timed(f"compile {name} for {setup.tp} x {setup.chip.name}"):
            found.append((name, facts_of(lowered.compile())))
    return tuple(found)


def lowered_programs(
    target: TargetConfig, draft: DrafterConfig, platform: Platform, workload: Workload
) -> Iterator[tuple[str, Any]]:
    """(name, lowered program) of a pair, in bfloat16."""
    pair = shapes_only(target, draft, "bfloat16", platform)
    plain, dflash = pair.proposer("plain", None), pair.proposer("dflash", None)
    yield PREFILL, lower_prefill(pair, dflash, workload)
    yield PLAIN, lower_decode(pair, plain, workload, STEPS)
    yield FUSED, lower_decode(pair, dflash, workload, STEPS)
