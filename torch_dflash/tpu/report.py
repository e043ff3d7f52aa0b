"""The figures of `torch-dflash tpu-report`, put together: what was asked, memory, rooflines, what was compiled,
predictions beside published figures. Everything but the published figures is a model estimate."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch_dflash.config import DrafterConfig, TargetConfig
from torch_dflash.tpu import published
from torch_dflash.tpu.chips import CHIPS, Chip
from torch_dflash.tpu.hlo import Facts
from torch_dflash.tpu.plan import MemoryPlan, Setup, plan_memory
from torch_dflash.tpu.published import Published
from torch_dflash.tpu.roofline import (
    KFlat,
    Time,
    Work,
    dflash_step,
    draft_pass,
    drafter_parameters,
    feature_bytes,
    k_flat,
    knee,
    target_parameters,
    target_pass,
    time_of,
)

PLAIN, VERIFY, DRAFT, FUSED = "plain step", "verify", "draft", "fused step"
NOTE = "model estimates: nothing was measured on a TPU, except what is called published"


@dataclass(frozen=True)
class Program:
    """A program at its roofline."""

    name: str
    work: Work
    time: Time


@dataclass(frozen=True)
class Prediction:
    """Milliseconds at a tau. source: "roofline", or "cycles" (the compiler's estimate), of step and plain."""

    source: str
    tau: float
    step_ms: float
    plain_ms: float | None

    @property
    def tpot_ms(self) -> float:
        return self.step_ms / self.tau

    @property
    def speed_up(self) -> float | None:
        return None if self.plain_ms is None else self.plain_ms / self.tpot_ms


@dataclass(frozen=True)
class Curve:
    """What a verification costs on one kind of chip. knee: None where computing never takes longer."""

    chip: str
    points: tuple[KFlat, ...]
    knee: int | None


@dataclass(frozen=True)
class Report:
    """All of it. names: target and drafter as the user called them. compiled: programs and what the compiler made of
    them; not_compiled: why there are none. curves: of all chips, the one asked for first."""

    names: tuple[str, str]
    setup: Setup
    memory: MemoryPlan
    programs: tuple[Program, ...]
    compiled: tuple[tuple[str, Facts], ...]
    not_compiled: str
    curves: tuple[Curve, ...]
    comparable: bool

    def program(self, name: str) -> Program:
        return next(program for program in self.programs if program.name == name)

    def pages_read(self, name: str) -> float:
        """Bytes of the target's live K/V that a program reads, on all chips together."""
        read = self.program(VERIFY if name == FUSED else name).work.kv_read
        return 0.0 if name == DRAFT else read


def make_report(
    names: tuple[str, str],
    setup: Setup,
    compiled: Sequence[tuple[str, Facts]] = (),
    not_compiled: str = "libtpu is not installed",
) -> Report:
    """Of a checked setup. compiled: (program, facts), programs called PLAIN, VERIFY, DRAFT, FUSED or otherwise; a cycle
    estimate for FUSED gives a second prediction. not_compiled: the reason where there are none. Raises InputError if
    it does not fit in memory."""
    target, chip, rows, context = setup.target, setup.chip, setup.rows, setup.context
    memory = plan_memory(setup)
    works = program_works(target, setup.drafter, rows, context)
    return Report(
        names=names,
        setup=setup,
        memory=memory,
        programs=tuple(Program(name, work, time_of(work, chip, setup.tp)) for name, work in works),
        compiled=tuple(compiled),
        not_compiled="" if compiled else not_compiled,
        curves=tuple(_curve(setup, other) for other in (chip, *(c for c in CHIPS if c != chip))),
        comparable=published.comparable(target, setup.drafter, chip, setup.tp, rows),
    )


def program_works(
    target: TargetConfig, drafter: DrafterConfig, rows: int, context: int
) -> tuple[tuple[str, Work], ...]:
    """The programs whose rooflines are shown."""
    size, features = drafter.block_size, feature_bytes(drafter)
    return (
        (PLAIN, target_pass(target, rows, 1, context)),
        (VERIFY, target_pass(target, rows, size, context, features)),
        (DRAFT, draft_pass(target, drafter, rows, context)),
        (FUSED, dflash_step(target, drafter, rows, context)),
    )


def predictions(report: Report, tau: float) -> tuple[Prediction, ...]:
    """Step time and TPOT at `tau`: at the roofline, and by the cycles of the compiled programs if there are any."""
    plain, fused = (report.program(name).time.seconds * 1e3 for name in (PLAIN, FUSED))
    ideal = Prediction("roofline", tau, fused, plain)
    cycles = {name: facts.seconds(report.setup.chip.clock_hz) * 1e3 for name, facts in report.compiled if facts.cycles}
    if FUSED not in cycles:
        return (ideal,)
    return ideal, Prediction("cycles", tau, cycles[FUSED], cycles.get(PLAIN))


def of_ideal(report: Report, name: str, facts: Facts) -> float | None:
    """Bytes that a compiled program moves from and to HBM, against its roofline's; None for a program without one.

    The live K/V pages are added where the kernel that reads them does not count them itself.
    """
    ideal = next((program.work for program in report.programs if program.name == name), None)
    if ideal is None:
        return None
    pages = report.pages_read(name) if facts.silent_mosaic_calls else 0.0
    return (facts.hbm_bytes + pages / report.setup.tp) / (ideal.hbm_bytes / report.setup.tp)


def document(report: Report) -> dict[str, Any]:
    """The same for a program: bytes, seconds and numbers as they are, nothing rounded."""
    setup = report.setup
    target, drafter = report.names
    return {
        "note": NOTE,
        "chip": asdict(setup.chip),
        "target": {"name": target, "config": asdict(setup.target), "parameters": target_parameters(setup.target).total},
        "draft": {
            "name": drafter,
            "config": asdict(setup.drafter),
            "parameters": drafter_parameters(setup.drafter).total,
        },
        "tp": setup.tp,
        "rows": setup.rows,
        "context": setup.context,
        "tau": setup.tau,
        "memory_per_chip": asdict(report.memory)
        | {"total": report.memory.total, "left": report.memory.left, "more_rows": report.memory.more_rows},
        "roofline": [_program(program) for program in report.programs],
        "compiled": [_compiled(report, name, facts) for name, facts in report.compiled],
        "not_compiled": report.not_compiled or None,
        "predicted": [_prediction(prediction) for prediction in predictions(report, setup.tau)],
        "published": {
            "source": published.SOURCE,
            "comparable": report.comparable,
            "served": asdict(published.LLAMA),
            "rows": [_published(report, row) for row in (*published.QWEN3_4B, published.AVERAGE)],
        },
        "k_flat": [
            {"chip": curve.chip, "knee": curve.knee, "points": [_point(point) for point in curve.points]}
            for curve in report.curves
        ],
    }


def _curve(setup: Setup, chip: Chip) -> Curve:
    points = k_flat(setup.target, chip, setup.context, rows=setup.rows, tp=setup.tp)
    return Curve(chip.name, points, knee(setup.target, chip, setup.context, rows=setup.rows))


def _point(point: KFlat) -> dict[str, Any]:
    return {"tokens": point.tokens} | _time(point.time)


def _program(program: Program) -> dict[str, Any]:
    work = asdict(program.work) | {"hbm_bytes": program.work.hbm_bytes}
    return {"name": program.name} | work | _time(program.time)


def _time(time: Time) -> dict[str, float]:
    return {"memory_seconds": time.memory, "compute_seconds": time.compute, "seconds": time.seconds}


def _compiled(report: Report, name: str, facts: Facts) -> dict[str, Any]:
    seconds = facts.seconds(report.setup.chip.clock_hz)
    return {"name": name} | asdict(facts) | {"estimated_seconds": seconds, "of_ideal": of_ideal(report, name, facts)}


def _prediction(prediction: Prediction) -> dict[str, Any]:
    return asdict(prediction) | {"tpot_ms": prediction.tpot_ms, "speed_up": prediction.speed_up}


def _published(report: Report, row: Published) -> dict[str, Any]:
    """A published row; where it is comparable, also what is predicted at its tau."""
    predicted = [_prediction(prediction) for prediction in predictions(report, row.tau)] if report.comparable else []
    return asdict(row) | {"step_ms": row.step_ms, "predicted": predicted}
