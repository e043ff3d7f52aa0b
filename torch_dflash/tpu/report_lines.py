"""The report for a person: lines of at most 110 columns."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from torch_dflash.config import BlockConfig
from torch_dflash.tpu import published
from torch_dflash.tpu.chips import GIGA
from torch_dflash.tpu.hlo import Facts
from torch_dflash.tpu.plan import PAGE_SIZE
from torch_dflash.tpu.published import Published
from torch_dflash.tpu.report import NOTE, Prediction, Program, Report, of_ideal, predictions
from torch_dflash.tpu.roofline import drafter_parameters, target_parameters

WIDTH = 110
_LABEL = 12
_HEAD_TWICE = (
    "HBM GB: weights and live K/V once in each pass, and what must be written. The fused step reads a head that target "
    "and drafter share twice, because the verification begins with the drafts. Exchange between chips, launches "
    "and the host are not counted: a roofline is a lower bound."
)

_COMPILED = (
    "HBM GB: read and written by the compiled program, without the K/V pages of Mosaic calls that do not say what they "
    "read; of ideal: with them, against the roofline's bytes. Mosaic: calls of Pallas kernels; their time is not "
    "in the estimate. exchanges: between chips. estimate ms: the compiler's estimated cycles"
)
_BEYOND = "What stays flat beyond the knee is bound by something that a roofline does not know."


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
    config = setup.target
    vocabulary = f"vocabulary {config.vocab_size} {'tied' if config.tie_word_embeddings else 'untied'}"
    shape = f"{config.architecture}, {config.num_layers} layers, {_block(config.block)}, {vocabulary}"
    parameters = _count(target_parameters(config).total)
    yield from _labelled("target", f"{target}: {shape}, {parameters} parameters")
    taps = ", ".join(map(str, draft.target_layer_ids))
    shape = f"{len(draft.layers)} layers, {_block(draft.block)}, block {draft.block_size}, taps {taps}"
    parameters = _count(drafter_parameters(draft).total)
    yield from _labelled("drafter", f"{drafter}: {shape}, {parameters} parameters of its own")
    yield from _labelled("asked", f"rows {setup.rows}, context {setup.context}, tp {setup.tp}, tau {setup.tau:g}")


def _count(number: int) -> str:
    """In words for people.  Examples: 4022468096 -> 4.022 B; 11948928 -> 11.9 M."""
    return f"{number / GIGA:.3f} B" if number >= 1e8 else f"{number / 1e6:.1f} M"


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
    return (*gigas, *map(_ms, (time.memory, time.compute, time.seconds)))


def _compiled(report: Report) -> Iterator[str]:
    if not report.compiled:
        yield from _labelled("programs", f"not compiled: {report.not_compiled}")
        return
    titles = ("HBM GB", "of ideal", "GFLOP", "Mosaic", "temp MB", "exchanges", "estimate ms")
    yield _row("compiled, each chip", titles)
    for name, facts in report.compiled:
        yield _row(f"  {name}", _facts_cells(report, name, facts))
    clock = f"{report.setup.chip.clock_hz / GIGA:.2f} GHz, assumed"
    yield from _wrapped(f"{_COMPILED} over the clock ({clock}). {_loops(report)}", "  ")


def _facts_cells(report: Report, name: str, facts: Facts) -> tuple[str, ...]:
    moved = f"{facts.hbm_bytes / GIGA:.3f}", _optional(of_ideal(report, name, facts), 3)
    runs = sum(kind.runs for kind in facts.collectives)
    counts = f"{facts.flops / GIGA:.1f}", f"{facts.mosaic_calls}", f"{facts.temp_bytes / 1e6:.1f}", f"{runs}"
    return (*moved, *counts, f"{facts.seconds(report.setup.chip.clock_hz) * 1e3:.3f}")


def _loops(report: Report) -> str:
    unknown = [name for name, facts in report.compiled if facts.loops_counted_once]
    return f"Loops of unknown length count once: {', '.join(unknown)}." if unknown else ""


def _predicted(report: Report) -> Iterator[str]:
    tau = report.setup.tau
    yield _row(f"predicted at tau {tau:g}, ms", ("plain step", "DFlash step", "plain TPOT", "TPOT", "speed-up"))
    for prediction in predictions(report, tau):
        plain = _optional(prediction.plain_ms, 3)
        cells = (plain, f"{prediction.step_ms:.3f}", plain, f"{prediction.tpot_ms:.3f}")
        yield _row(f"  model estimate: {prediction.source}", (*cells, _optional(prediction.speed_up, 2)))


def _published(report: Report) -> Iterator[str]:
    if not report.comparable:
        yield from _labelled("published", f"{_elsewhere()} Not what was asked here.")
        return
    sources = [estimate.source for estimate in predictions(report, 1.0)]
    yield _row("published (measured), ms", ("tau", "plain TPOT", "step", "TPOT", "speed-up", *sources))
    for row in (*published.QWEN3_4B, published.AVERAGE):
        yield _row(f"  {row.name}", _published_cells(row, predictions(report, row.tau)))
    estimates = f"{' and '.join(sources)}: TPOT as a model estimate, from that step time and the published tau"
    yield from _wrapped(f"Source: {published.SOURCE}; step is TPOT x tau. {estimates}.", "  ")


def _elsewhere() -> str:
    """All published figures in short."""
    mean, served = published.AVERAGE, published.LLAMA
    where = f"{published.TARGET} with {published.DRAFTER} on one {published.CHIP}, one row"
    served_name = f"{served.target} with {served.num_drafts} drafts, {served.pipeline}"
    return (
        f"{where}: plain {mean.plain_tpot_ms:.2f} ms, DFlash {mean.dflash_tpot_ms:.2f} ms per token on average (tau "
        f"{mean.tau}). {served_name}: {served.speed_up:.2f} times as fast on average, {served.name} "
        f"{served.plain_tpot_ms:.2f} -> {served.dflash_tpot_ms:.2f} ms per token."
    )


def _published_cells(row: Published, estimates: Sequence[Prediction]) -> tuple[str, ...]:
    measured = (row.tau, row.plain_tpot_ms, row.step_ms, row.dflash_tpot_ms, row.speed_up)
    return tuple(_optional(figure, 2) for figure in (*measured, *(estimate.tpot_ms for estimate in estimates)))


def _k_flat(report: Report) -> Iterator[str]:
    own, *others = report.curves
    names = (f"{curve.chip} ms" for curve in others)
    yield _row("K-flat: query tokens of a row", ("memory ms", "compute ms", f"{own.chip} ms", "against 1", *names))
    for number, point in enumerate(own.points):
        times = (point.time.memory, point.time.compute, point.time.seconds)
        ratio = f"{point.time.seconds / own.points[0].time.seconds:.2f}"
        elsewhere = (_ms(curve.points[number].time.seconds) for curve in others)
        yield _row(f"  {point.tokens}", (*map(_ms, times), ratio, *elsewhere))
    yield from _wrapped(knee_line(report), "  ")
    flat = ", ".join(f"{tokens}: {ratio:.2f}" for tokens, ratio in published.K_FLAT)
    yield from _wrapped(f"Published (v5p, one row, context 256), against 16 query tokens: {flat}. {_BEYOND}", "  ")


def knee_line(report: Report) -> str:
    """Where a verification stops being flat."""
    knees = (f"{curve.chip} {'never' if curve.knee is None else curve.knee}" for curve in report.curves)
    return f"Knee, query tokens of a row from which computing takes longer than the memory: {', '.join(knees)}."


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _optional(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _row(name: str, cells: Iterable[str]) -> str:
    return f"{name:32s}" + "".join(f" {cell:>10s}" for cell in cells)


def _labelled(label: str, text: str) -> Iterator[str]:
    rest = " " * _LABEL
    yield from textwrap.wrap(text, WIDTH, initial_indent=f"{label:{_LABEL}s}", subsequent_indent=rest)


def _wrapped(text: str, indent: str = "") -> Iterator[str]:
    yield from textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
