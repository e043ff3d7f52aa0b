"""The measurement: the configuration and its plausible mistakes over the same anchors, compared in pairs."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torch_dflash.config import DrafterConfig
from torch_dflash.doctor.propose import accepted_drafts, drafter_of, tap
from torch_dflash.doctor.texts import Text
from torch_dflash.doctor.variants import Variant, configured
from torch_dflash.doctor.weights import Check
from torch_dflash.errors import InputError
from torch_dflash.models.drafter import Drafter
from torch_dflash.models.target import Target

log = logging.getLogger("torch_dflash")

STRETCH = 16  # positions
MIN_STRETCHES = 12  # with fewer, not even a gain in each of them would be significant
MAX_ANCHORS = 48  # of a text: neighbours share most of their blocks, so every second one tells nearly as much
SIGNIFICANT = 0.002  # two-sided; some 25 mistakes are tried
FLIPS = 8191
LEAST_GAIN = 0.05  # tokens per step
AS_GOOD = 0.9
NEAR_ONE = 1.2


@dataclass(frozen=True)
class Outcome:
    """A variant's figures over all anchors. tau: mean accepted + 1; acceptance[k]: share with draft k + 1 accepted.

    gain: its tau minus the configuration's, over the same anchors. error: the gain's standard error; p_value: of the
    sign-flip test, two-sided. For both, the anchors in a stretch of the text are one observation, since their blocks
    overlap.
    """

    variant: Variant
    tau: float
    acceptance: tuple[float, ...]
    gain: float
    error: float
    p_value: float

    @property
    def finding(self) -> Literal["better", "worse", "within noise"]:
        if abs(self.gain) <= LEAST_GAIN or self.p_value > SIGNIFICANT:
            return "within noise"
        return "better" if self.gain > 0 else "worse"


@dataclass(frozen=True)
class Run:
    """The short run. decoding_tau: tau of decoding the texts anchor by anchor as `generate` does."""

    texts: int
    tokens: int
    anchors: int
    decoding_tau: float
    own: Outcome
    mistakes: tuple[Outcome, ...]


@dataclass(frozen=True)
class Verdict:
    """How it ends. `reason` is empty for a healthy pair."""

    kind: Literal["healthy", "suspicious", "broken"]
    reason: str


def anchors_of(text: Text, block_size: int) -> Tensor:
    """int64 [A]: positions of the target's own tokens behind which a whole block of the text follows."""
    return torch.arange(text.prompt_length, max(text.prompt_length, len(text.token_ids) - block_size + 1))


def measure(
    target: Target, drafter: Drafter, config: DrafterConfig, mistakes: Sequence[Variant], texts: Sequence[Text]
) -> Run:
    """Every variant over every anchor of the texts. Raises InputError if these are too few for a verdict."""
    every = [anchors_of(text, config.block_size) for text in texts]
    anchors = [positions[:: -(-len(positions) // MAX_ANCHORS) or 1] for positions in every]
    stretch = torch.cat(_stretches(anchors))
    if (count := len(stretch.unique())) < MIN_STRETCHES:
        found = f"the target's answers have anchors in {count} stretches of {STRETCH} tokens, a verdict needs"
        raise InputError(f"{found} {MIN_STRETCHES}; raise --max-new-tokens or give --prompts with longer answers")
    variants = [configured(config), *mistakes]
    layers = {layer for variant in variants for layer in variant.config.target_layer_ids}
    tapped = [tap(target, text, layers) for text in texts]

    def counts(variant: Variant, at: Sequence[Tensor]) -> list[Tensor]:
        module, each = drafter_of(drafter, variant), zip(tapped, texts, at, strict=True)
        return [accepted_drafts(target, module, variant, *one) for one in each]

    accepted = []
    for number, variant in enumerate(variants, 1):
        log.debug("variant %d of %d: %s, %s", number, len(variants), variant.field, variant.name)
        accepted.append(torch.cat(counts(variant, anchors)))
    outcomes = [compare(v, a, accepted[0], stretch) for v, a in zip(variants, accepted, strict=True)]
    tokens = sum(len(text.token_ids) - text.prompt_length for text in texts)
    decoding_tau = _decoding_tau(counts(variants[0], every))
    return Run(len(texts), tokens, len(stretch), decoding_tau, outcomes[0], tuple(outcomes[1:]))


def _stretches(anchors: Sequence[Tensor]) -> list[Tensor]:
    """For every anchor the number of its stretch, over all texts."""
    numbers, start = [], 0
    for positions in anchors:
        within = (positions - positions[:1]) // STRETCH
        numbers.append(start + within)
        start += int(within[-1]) + 1 if len(within) else 0
    return numbers


def compare(variant: Variant, accepted: Tensor, own: Tensor, stretch: Tensor) -> Outcome:
    """Figures of a variant that accepted int64 [A] drafts where the configuration accepted `own` [A]; `stretch` [A]."""
    difference = (accepted - own).double()
    gain = difference.mean().item()
    zeros = torch.zeros(int(stretch.max()) + 1, dtype=torch.float64)
    sums, sizes = (zeros.index_add(0, stretch, values) for values in (difference, torch.ones_like(difference)))
    spread = (sums - gain * sizes).square().sum() * len(sums) / (len(sums) - 1)
    drafts = torch.arange(1, variant.config.block_size)
    acceptance = (accepted[:, None] >= drafts).double().mean(0)
    tau = accepted.double().mean().item() + 1
    error = spread.sqrt().item() / len(own)
    return Outcome(variant, tau, tuple(acceptance.tolist()), gain, error, sign_flip_p_value(sums))


def sign_flip_p_value(sums: Tensor) -> float:
    """Two-sided p-value of paired differences float64 [G]: how often random signs bring their total as far from 0."""
    signs = torch.randint(0, 2, (FLIPS, len(sums)), generator=torch.Generator().manual_seed(0)) * 2 - 1
    as_far = (signs.double() @ sums).abs() >= sums.sum().abs() - 1e-9
    return (1 + int(as_far.sum())) / (1 + FLIPS)


def _decoding_tau(accepted: Sequence[Tensor]) -> float:
    """Kept tokens per step, walking from anchor to anchor."""
    kept = []
    for counts in map(Tensor.tolist, accepted):
        at = 0
        while at < len(counts):
            kept.append(counts[at] + 1)
            at += kept[-1]
    return sum(kept) / len(kept)


def check_texts(config: DrafterConfig, texts: Sequence[Text]) -> list[Check]:
    """What this run cannot tell or should not contain."""
    longest, hints = max(len(text.token_ids) for text in texts), list[str]()
    windows = {layer.window for layer in config.layers if layer.window is not None}
    if windows and min(windows) >= longest:
        hints.append(f"window {min(windows)}: the run says nothing about it, its texts have at most {longest} tokens")
    if any(config.mask_token_id in text.token_ids for text in texts):
        hints.append(f"mask id {config.mask_token_id} occurs in the texts; a mask id is a token of no text")
    return [Check("hint", hint) for hint in hints]


def verdict(checks: Sequence[Check], run: Run | None) -> Verdict:
    """What the findings come to. `run` is None only if the weights are broken."""
    broken = [check.text for check in checks if check.level == "broken"]
    if broken or run is None:
        return Verdict("broken", "; ".join(broken))
    better = [outcome for outcome in run.mistakes if outcome.finding == "better"]
    if better:
        highest = max(outcome.gain for outcome in better)
        best = next(outcome for outcome in better if outcome.gain >= AS_GOOD * highest)  # likely ones stand first
        what = f"{best.variant.field} {best.variant.name} gives tau {best.tau:.2f} instead of {run.own.tau:.2f}"
        return Verdict("suspicious", f"{what}; {best.variant.remedy}")
    if run.own.tau < NEAR_ONE:
        hint = "no mistake tried explains it: an untrained drafter, or one for another target"
        return Verdict("suspicious", f"tau is {run.own.tau:.2f}, next to no draft is accepted; {hint}")
    blind = [o for o in run.mistakes if o.variant.inputs.hidden_context is None and o.finding != "worse"]
    if blind:
        reason = f"without any context tau is {blind[0].tau:.2f}, with it {run.own.tau:.2f}"
        return Verdict("suspicious", f"{reason}; the features are of no use: check target_layer_ids and fc")
    return Verdict("healthy", "")
