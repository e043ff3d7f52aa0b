"""What the doctor found, as lines for a terminal (100 columns) or as one JSON document."""

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch_dflash.config import BlockConfig, DrafterConfig, DraftLayer, TargetConfig
from torch_dflash.doctor.measure import Outcome, Run, Verdict
from torch_dflash.doctor.variants import describe_rope
from torch_dflash.doctor.weights import Check

WIDTH = 100
_LABEL, _NAME = 11, 50


@dataclass(frozen=True)
class Model:
    """A model as it was asked for and read."""

    name: str
    folder: str
    stored_dtypes: tuple[str, ...]
    config: Any


@dataclass(frozen=True)
class Report:
    """All of it. `run` is None where broken weights made one pointless. `mask_text`: the mask id as a token."""

    target: Model
    drafter: Model
    mask_text: str
    dtype: str
    checks: tuple[Check, ...]
    run: Run | None
    verdict: Verdict


def document(report: Report) -> dict[str, Any]:
    """The same for a program; figures are not rounded."""
    run = None
    if report.run is not None:
        run = asdict(report.run) | {
            "own": _figures(report.run.own),
            "mistakes": [_figures(outcome) for outcome in report.run.mistakes],
        }
    return {
        "target": asdict(report.target),
        "drafter": asdict(report.drafter) | {"head": describe_head(report.target.config, report.drafter.config)},
        "dtype": report.dtype,
        "checks": [asdict(check) for check in report.checks],
        "run": run,
        "verdict": asdict(report.verdict),
    }


def _figures(outcome: Outcome) -> dict[str, Any]:
    variant = {"field": outcome.variant.field, "name": outcome.variant.name, "remedy": outcome.variant.remedy}
    figures = {name: getattr(outcome, name) for name in ("tau", "gain", "error", "p_value", "finding", "acceptance")}
    return variant | figures


def lines(report: Report) -> Iterator[str]:
    """The report for a person."""
    yield from _labelled("target", _target_lines(report.target))
    yield from _labelled("drafter", _drafter_lines(report))
    yield ""
    yield from _labelled("checks", [f"{check.level:6s}  {check.text}" for check in report.checks])
    yield ""
    if report.run is not None:
        yield from _labelled("short run", _run_lines(report.run, report.dtype))
        yield ""
        yield f"{'what if':{_LABEL + _NAME}s}{'tau':>6s}{'change':>9s}  (error)"
        yield from map(_outcome_line, (report.run.own, *report.run.mistakes))
        yield ""
    yield from _labelled("verdict", [verdict_line(report.verdict)])


def verdict_line(verdict: Verdict) -> str:
    """The verdict, and why."""
    return f"{verdict.kind}: {verdict.reason or 'no plausible mistake does better than the configuration'}"


def _labelled(label: str, texts: list[str]) -> Iterator[str]:
    for text in texts:
        for part in textwrap.wrap(text, WIDTH - _LABEL, drop_whitespace=True, break_on_hyphens=False):
            yield f"{label:{_LABEL}s}{part}"
            label = ""


def _target_lines(model: Model) -> list[str]:
    config: TargetConfig = model.config
    head = "tied to the embedding" if config.tie_word_embeddings else "its own"
    return [
        f"{model.name}: {config.architecture}, {_shape(config.num_layers, config.block)}",
        f"vocabulary {config.vocab_size}, head {head}; RoPE {describe_rope(config.rope)}; {_stored(model)}",
    ]


def _drafter_lines(report: Report) -> list[str]:
    config: DrafterConfig = report.drafter.config
    same = ", as the target" if config.rope == report.target.config.rope else ", not the target's"
    return [
        f"{report.drafter.name}: {_shape(len(config.layers), config.block)}; {_stored(report.drafter)}",
        f"taps {' '.join(map(str, config.target_layer_ids))} of the target's layers "
        f"0..{report.target.config.num_layers - 1}; RoPE {describe_rope(config.rope)}{same}",
        f"block_size {config.block_size}; mask id {config.mask_token_id} {report.mask_text or '(no token text)'}",
        f"attention {describe_layers(config.layers)}",
        f"layout {config.layout.name}",
        f"head {describe_head(report.target.config, config)}",
    ]


def _shape(layers: int, block: BlockConfig) -> str:
    return (
        f"{layers} layers, hidden {block.hidden_size}, heads {block.num_heads}/{block.num_kv_heads} x {block.head_dim}"
    )


def _stored(model: Model) -> str:
    return f"stored as {', '.join(model.stored_dtypes)}"


def describe_layers(layers: tuple[DraftLayer, ...]) -> str:
    """Visibility in the drafter's layers, equal ones counted."""
    texts = [
        f"{'causal' if layer.causal else 'bidirectional'} in the block, "
        f"{'no window' if layer.window is None else f'window {layer.window}'}"
        for layer in layers
    ]
    return "; ".join(f"{texts.count(text)} x {text}" for text in dict.fromkeys(texts))


def describe_head(target: TargetConfig, drafter: DrafterConfig) -> str:
    """Whose embedding and head turn hidden states into drafts."""
    if drafter.draft_vocab_size is not None:
        return f"its own, {drafter.draft_vocab_size} of the target's {target.vocab_size} tokens"
    tied = "tied to its embedding" if target.tie_word_embeddings else "not tied to its embedding"
    return f"the target's, {tied}; {target.vocab_size} tokens"


def _run_lines(run: Run, dtype: str) -> list[str]:
    shares = " ".join(f"{share * 100:.0f}" for share in run.own.acceptance)
    return [
        f"{run.texts} texts, {run.tokens} tokens of the target's own, {dtype}",
        f"tau {run.own.tau:.2f} over {run.anchors} anchors, evenly spread; {run.decoding_tau:.2f} as decoding goes",
        f"accepted at draft 1..{len(run.own.acceptance)}: {shares} %",
    ]


def _outcome_line(outcome: Outcome) -> str:
    name = outcome.variant.name
    name = name if len(name) < _NAME else f"{name[: _NAME - 4]}..."
    figures = f"{outcome.tau:6.2f}{outcome.gain:+9.2f}{f'({outcome.error:.2f})':>9s}"
    finding = "BETTER" if outcome.finding == "better" else outcome.finding
    start = f"{outcome.variant.field:{_LABEL}s}{name:{_NAME}s}"
    return f"{start}{figures}  {finding}" if outcome.variant.remedy else f"{start}{outcome.tau:6.2f}"
