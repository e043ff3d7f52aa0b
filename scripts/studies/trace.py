"""The accept counts of a bench run, read from its folder, and how sure they are."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torch_dflash.bench.figures import RESAMPLES, outcomes_of
from torch_dflash.bench.folder import BATCHES, SETTINGS, batches_of, read_about
from torch_dflash.bench.records import Batch, Outcome, read_batches
from torch_dflash.bench.report import ALL
from torch_dflash.errors import InputError

METHOD = "dflash"


@dataclass(frozen=True)
class Trace:
    """What DFlash did in one greedy run. outcomes: set -> its prompts, in their order; several sets are also there
    together, as ALL. settings: of the run."""

    path: Path
    settings: Mapping[str, Any]
    num_drafts: int
    outcomes: Mapping[str, list[Outcome]]

    def histograms(self, name: str) -> np.ndarray:
        """int[P,K+1] of a set: [p, a] = steps of prompt p that accepted exactly a drafts."""
        width = self.num_drafts + 1
        return np.array([np.bincount(np.array(o.accepted, int), minlength=width) for o in self.outcomes[name]])


def read_trace(path: Path) -> Trace:
    """Of the --out folder of `torch-dflash bench`. Raises InputError."""
    batches = read_batches(path / BATCHES)
    if not batches:
        raise InputError(f"RUN {path}: has no results ({BATCHES}); give the --out folder of a torch-dflash bench run")
    settings = read_about(path / SETTINGS)["settings"]
    if settings.get("temperature") != 0:
        raise InputError(f"RUN {path}: temperature is {settings.get('temperature')}; use a greedy run (temperature 0)")
    if settings.get("num_drafts") == "auto":
        raise InputError(
            f"RUN {path}: num_drafts is auto, so its steps differ in length; use a run with a fixed number"
        )
    if any(METHOD not in batch.outcomes for batch in batches):
        raise InputError(f"RUN {path}: has no accept counts of {METHOD}; use a run with --method {METHOD}")
    outcomes = _by_set(batches)
    silent = [name for name, some in outcomes.items() if not any(o.accepted for o in some)]
    if silent:
        raise InputError(f"RUN {path}: set {silent[0]} has no verify steps, so no accept counts; use longer answers")
    return Trace(path, settings, batches[0].num_drafts[METHOD], outcomes)


def _by_set(batches: list[Batch]) -> dict[str, list[Outcome]]:
    names = dict.fromkeys(batch.dataset for batch in batches)
    found = {name: outcomes_of(batches_of(batches, name), METHOD) for name in names}
    return found if len(found) == 1 else found | {ALL: outcomes_of(batches, METHOD)}


def accepted_shares(histogram: np.ndarray) -> np.ndarray:
    """Histograms [...,K+1] -> [...,K]: share of the steps whose first k drafts were all accepted, k = 1..K."""
    from_a = np.flip(np.cumsum(np.flip(histogram, -1), -1), -1)
    return from_a[..., 1:] / from_a[..., :1]


def resampled(histograms: np.ndarray, seed: int = 0) -> np.ndarray:
    """Histograms [RESAMPLES,K+1] of as many prompts, drawn with replacement from those of [P,K+1]. A draw without any
    step is left out."""
    drawn = np.random.default_rng(seed).integers(len(histograms), size=(RESAMPLES, len(histograms)))
    sums = histograms[drawn].sum(axis=1)
    return sums[sums.sum(axis=1) > 0]


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 95% bootstrap interval along the first axis: low and high."""
    low, high = np.percentile(values, [2.5, 97.5], axis=0)
    return low, high
