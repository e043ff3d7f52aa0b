"""The report for a person: lines of at most 110 columns."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from torch_dflash.config import BlockConfig
from torch_dflash.tpu import published
from torch_dflash.tpu.chips import GIGA
from torch_dflash.tpu.hlo import Facts
from torch_dflash.tpu.plan import PAGE_SIZE
from torch_dflash.tpu.published import Published
from torch_dflash.tpu.report import NOTE, Prediction, Program, Report, predictions
from torch_dflash.tpu.roofline import drafter_parameters, target_parameters

WIDTH = 110
_LABEL = 12
_HEAD_TWICE = (
    "HBM GB: weights and live K/V once in each pass, and what must be written. The fused step reads a head that target "
    "and drafter share twice, because the verification begins with the drafts. Exchange between chips, launches "
    "and the host are not counted: a roofline is a lower bound."
)


def lines(report: Report) -> Iterator[str]:
    """Everything, in order."""
    yield from _wrapped(NOTE[0].upper() + NOTE[1:] + ".")
    for section in (_asked, _memory, _rooflines, _compiled, _predicted, _published, _k_flat):
        yield ""
        yield from section(report)


def _asked(report: Report) -> Iterator[str]:
    setup, (target, drafter) = report.setup, report.names
    chip, draft = setup.chip, setup.drafter
    speed = f"{chip.flops_per_second / 1e12:.0f} TFLOP/s in bfloat16, {chip.hbm_bytes_per_second / GIGA:.0f} GB/s"
    yield from _labelled("chip", f"{setup.tp} x TPU {chip.name}: {speed}, {chip.hbm_bytes / GIGA:.1f} GB of HBM each")
    tied = "tied" if setup.target.tie_word_embeddings else "untied"
    shape = f"{setup.target.num_layers} layers, {_block(setup.target.block)}, vocabulary {setup.target.vocab_size} {tied}"
    billions = target_parameters(setup.target).total / GIGA
    yield from _labelled("target", f"{target}: {setup.target.architecture}, {shape}, {billions:.3f} B parameters")
    taps = ", ".join(map(str, draft.target_layer_ids))
    shape = f"{len(draft.layers)} layers, {_block(draft.block)}, block {draft.block_size}, taps {taps}"
    billions = drafter_parameters(draft).total / GIGA
    yield from _labelled("drafter", f"{drafter}: {shape}, {billions:.3f} B parameters of its own")
    yield from _labelled("asked", f"rows {setup.rows}, context {setup.context}, tp {setup.tp}, tau {setup.tau:g}")


def _block(block: BlockConfig) -> str:
    heads = f"heads {block.num_heads}/{block.num_kv_heads} x {block.head_dim}"
    return f"hidden {block.hidden_size}, MLP {block.intermediate_size}, {heads}"


def _memory(report: Report) -> Iterator[str]:
    plan, setup = report.memory, report.setup
    parts = [
        ("target weights", plan.target, "bfloat16"),
        ("drafter weights", plan.drafter, ""),
        ("target K/V", plan.pages, f"pages of {PAGE_SIZE} positions, for the context and one block more"),
        ("draft context", plan.draft_pages, "the drafter's K/V, on the same pages"),
        ("features", plan.features, ""),
        ("total", plan.total, "without what running programs need"),
        (f"left of {plan.hbm / GIGA:.1f}", plan.left, f"{plan.more_rows} more rows of {setup.context} would fit"),
    ]
    yield f"{'memory of each chip':30s}{'GB':>9s}"
    for name, size, remark in parts:
        yield f"  {name:28s}{size / GIGA:9.3f}  {remark}".rstrip()


def _rooflines(report: Report) -> Iterator[str]:
    titles = ("HBM GB", "weights", "K/V", "GFLOP", "memory ms", "compute ms", "roofline ms")
    yield _row("roofline, all chips together", titles)
    for program in report.programs:
        yield _row(f"  {program.name}", _program_cells(program))
    yield from _wrapped(_HEAD_TWICE, "  ")


def _program_cells(program: Program) -> tuple[str, ...]:
    work, time = program.work, program.time
    sizes = (work.hbm_bytes, work.weights, work.kv_read)
    gigas = (*(f"{size / GIGA:.3f}" for size in sizes), f"{work.flops / GIGA:.1f}")
    return (*gigas, *(f"{seconds * 1e3:.3f}" for seconds in (time.memory, time.compute, time.seconds)))


def _compiled(report: Report) -> Iterator[str]:
    if not report.compiled:
        yield from _labelled("programs", f"not compiled: {report.not_compiled}")
        return
    titles = ("HBM GB", "GFLOP", "Mosaic", "alias GB", "temp MB", "collect.", "estimate ms")
    yield _row("compiled, each chip", titles)
    for name, facts in report.compiled:
        yield _row(f"  {name}", _facts_cells(facts, report.setup.chip.clock_hz))
    clock = f"{report.setup.chip.clock_hz / GIGA:.2f} GHz, assumed"
    yield from _wrapped(f"estimate ms: the compiler's estimated cycles over the clock ({clock}). {_loops(report)}", "  ")


def _facts_cells(facts: Facts, clock_hz: float) -> tuple[str, ...]:
    def giga(value: float | None) -> str:
        return "-" if value is None else f"{value / GIGA:.3f}"

    counts = (f"{facts.mosaic_calls}", giga(facts.alias_bytes), f"{facts.temp_bytes / 1e6:.1f}")
    collectives = f"{sum(kind.count for kind in facts.collectives)}"
    return (giga(facts.hbm_bytes), giga(facts.flops), *counts, collectives, f"{facts.seconds(clock_hz) * 1e3:.3f}")


def _loops(report: Report) -> str:
    unknown = [name for name, facts in report.compiled if facts.loops_counted_once]
    return f"Loops of unknown length are counted once: {', '.join(unknown)}." if unknown else ""


def _predicted(report: Report) -> Iterator[str]:
    tau = report.setup.tau
    yield _row(f"predicted at tau {tau:g}, ms", ("plain step", "DFlash step", "plain TPOT", "TPOT", "speed-up"))
    for prediction in predictions(report, tau):
        plain = _optional(prediction.plain_ms, 3)
        cells = (plain, f"{prediction.step_ms:.3f}", plain, f"{prediction.tpot_ms:.3f}")
        yield _row(f"  model estimate: {prediction.source}", (*cells, _optional(prediction.speed_up, 2)))


def _published(report: Report) -> Iterator[str]:
    if not report.comparable:
        where = f"{published.TARGET} with {published.DRAFTER} on one {published.CHIP}, one row"
        average = published.AVERAGE
        figures = f"plain {average.plain_tpot_ms:.2f} ms, DFlash {average.dflash_tpot_ms:.2f} ms per token"
        yield from _labelled("published", f"for {where}; not what was asked here. Average: {figures}, tau {average.tau}")
        return
    sources = [estimate.source for estimate in predictions(report, 1.0)]
    yield _row("published (measured), ms", ("tau", "plain TPOT", "step", "TPOT", "speed-up", *sources))
    for row in (*published.QWEN3_4B, published.AVERAGE):
        yield _row(f"  {row.name}", _published_cells(row, predictions(report, row.tau)))
    estimates = f"{' and '.join(sources)}: TPOT as a model estimate, from that step time and the published tau"
    yield from _wrapped(f"Source: {published.SOURCE}; step is TPOT x tau. {estimates}.", "  ")


def _published_cells(row: Published, estimates: Sequence[Prediction]) -> tuple[str, ...]:
    measured = (row.tau, row.plain_tpot_ms, row.step_ms, row.dflash_tpot_ms, row.speed_up)
    return tuple(_optional(figure, 2) for figure in (*measured, *(estimate.tpot_ms for estimate in estimates)))


def _k_flat(report: Report) -> Iterator[str]:
    first = report.points[0].time.seconds
    yield _row("K-flat: query tokens of a row", ("memory ms", "compute ms", "roofline ms", "against 1"))
    for point in report.points:
        times = (point.time.memory, point.time.compute, point.time.seconds)
        yield _row(f"  {point.tokens}", (*(f"{t * 1e3:.3f}" for t in times), f"{point.time.seconds / first:.2f}"))
    yield from _wrapped(knee_line(report), "  ")
    flat = ", ".join(f"{tokens}: {ratio:.2f}" for tokens, ratio in published.K_FLAT)
    yield from _wrapped(f"Published (v5p, one row, context 256), against 16 query tokens: {flat}.", "  ")


def knee_line(report: Report) -> str:
    """Where a verification stops being flat."""
    if report.knee is None:
        return "Knee: none, computing never takes longer than the memory."
    return f"Knee: from {report.knee} query tokens of a row on, computing takes longer than the memory."


def _optional(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _row(name: str, cells: Iterable[str]) -> str:
    return f"{name:32s}" + "".join(f" {cell:>10s}" for cell in cells)


def _labelled(label: str, text: str) -> Iterator[str]:
    rest = " " * _LABEL
    yield from textwrap.wrap(text, WIDTH, initial_indent=f"{label:{_LABEL}s}", subsequent_indent=rest)


def _wrapped(text: str, indent: str = "") -> Iterator[str]:
    yield from textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
