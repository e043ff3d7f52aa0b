"""What a verification costs against its query tokens and rows: measured here, and at the roofline of TPUs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bridge.positions import pages_for
from studies.output import shown, spread
from studies.parts import Cost, Part, free_drafts, make_device, most_growth, rounds, whole_step
from torch_dflash.bench.figures import Spread
from torch_dflash.bench.table import table
from torch_dflash.config_reader import read_target_config
from torch_dflash.engine import PAGE_SIZE
from torch_dflash.errors import InputError, checked_integer
from torch_dflash.pair import Pair
from torch_dflash.propose import DFlash
from torch_dflash.state import Capacity
from torch_dflash.tpu.chips import CHIPS
from torch_dflash.tpu.roofline import K_FLAT_TOKENS, k_flat, knee
from torch_dflash.tpu.shapes import target_folder

NAME = "verify-cost"
TPU_TARGET = "Qwen/Qwen3-4B"
DEFINITIONS = {
    "seconds": "of one step without drafting: the target's pass over `tokens` tokens of each row, the head on all of "
    "them, acceptance and commit, in the engine's decode program; (a dispatch of 4 steps - one of 1) / 3, median "
    "(lowest-highest) over repeats in turns",
    "ratio": "seconds / seconds of 1 token with the same rows and dtype, within one repeat",
    "knee": "query tokens of a row at which computing overtakes the memory, as in tpu-report; of measured times under "
    "the same roofline max(memory, tokens * compute): seconds of 1 token / (seconds of the most tokens / the most "
    "tokens). 1 or less would be: never flat",
    "tpu": "tpu-report's roofline, a model estimate, not measured",
}


@dataclass(frozen=True)
class Point:
    """One shape; see DEFINITIONS."""

    dtype: str
    rows: int
    tokens: int
    seconds: Spread
    ratio: Spread


@dataclass(frozen=True)
class Grid:
    """What is measured."""

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    context: int
    repeats: int


def checked_grid(tokens: Sequence[int], rows: Sequence[int], context: int, repeats: int) -> Grid:
    """Sorted, with the 1 token that all are compared with. Raises InputError."""
    for name, some in (("--tokens", tokens), ("--rows", rows)):
        for value in some:
            checked_integer(value, name, 1)
    checked_integer(context, "--context", 1)
    checked_integer(repeats, "--repeats", 1)
    return Grid(tuple(sorted({1, *tokens})), tuple(sorted({*rows})), context, repeats)


def measure(pairs: dict[str, Pair], grid: Grid) -> list[Point]:
    """dtype -> pair. Raises InputError for a context that the target has not."""
    parts: dict[tuple[str, int, int], tuple[Part, int]] = {}
    for dtype, pair in pairs.items():
        for rows in grid.rows:
            parts |= {(dtype, rows, tokens): own for tokens, own in _parts(pair, rows, grid).items()}
    return points(list(rounds(parts, grid.repeats)))


def _parts(pair: Pair, rows: int, grid: Grid) -> dict[int, tuple[Part, int]]:
    """Tokens -> part, on one device. Attention reads half of a row's positions (see Platform.narrowest): all that the
    dispatches here may reach."""
    positions, limit = grid.context + most_growth(grid.tokens[-1] - 1), pair.target.config.context_limit
    if positions > limit:
        raise InputError(f"--context is {grid.context}: up to {positions} positions are used, the target has {limit}")
    full = pair.proposer("dflash", None)
    assert isinstance(full, DFlash)
    drafts = {tokens: free_drafts(full, tokens - 1) for tokens in reversed(grid.tokens)}
    capacity = Capacity.whole(rows, 2 * pages_for(positions, PAGE_SIZE), PAGE_SIZE)
    device = make_device(pair, [*drafts.values()], capacity)
    return {tokens: (whole_step(device, drafts[tokens]), grid.context) for tokens in grid.tokens}


def points(costs: Sequence[dict[tuple[str, int, int], Cost]]) -> list[Point]:
    """Of the repeats."""
    found = []
    for dtype, rows, tokens in costs[0]:
        seconds = [each[dtype, rows, tokens].step for each in costs]
        alone = [each[dtype, rows, 1].step for each in costs]
        ratio = spread(own / one for own, one in zip(seconds, alone, strict=True))
        found.append(Point(dtype, rows, tokens, spread(seconds), ratio))
    return found


def measured_knee(curve: Sequence[Point]) -> float:
    """Of one dtype and number of rows; see DEFINITIONS."""
    first, last = curve[0], curve[-1]
    return last.tokens * first.seconds.median / last.seconds.median


def curves(found: Sequence[Point]) -> dict[tuple[str, int], list[Point]]:
    """(dtype, rows) -> points, tokens ascending."""
    groups: dict[tuple[str, int], list[Point]] = {}
    for point in found:
        groups.setdefault((point.dtype, point.rows), []).append(point)
    return groups


def tpu_curves(grid: Grid) -> dict[str, tuple[list[float], int | None]]:
    """Chip -> ratios to 1 token, for K_FLAT_TOKENS, and knee; one row, at the roofline."""
    config, found = read_target_config(target_folder(TPU_TARGET)), {}
    for chip in CHIPS:
        times = [point.time.seconds for point in k_flat(config, chip, grid.context)]
        found[chip.name] = ([seconds / times[0] for seconds in times], knee(config, chip, grid.context))
    return found


def lines(grid: Grid, found: Sequence[Point]) -> list[str]:
    """Three tables: milliseconds, ratios and knees, TPUs."""
    columns = [f"T = {tokens}" for tokens in grid.tokens]
    measured = curves(found)
    rows = ([dtype, str(r), *(shown(p.seconds, 1, 1e3) for p in some)] for (dtype, r), some in measured.items())
    ratios = (
        [dtype, str(r), *(shown(p.ratio) for p in some), f"{measured_knee(some):.1f}"]
        for (dtype, r), some in measured.items()
    )
    chips = (
        [f"{TPU_TARGET}, {chip}", *(f"{ratio:.2f}" for ratio in own), str(at or "nowhere")]
        for chip, (own, at) in tpu_curves(grid).items()
    )
    return [
        f"ms of one verification of T tokens in each row, context {grid.context}, median (lowest-highest):",
        "",
        *table(["dtype", "rows", *columns], rows),
        "",
        "Times the seconds of T = 1 with as many rows, and the knee in tokens of a row:",
        "",
        *table(["dtype", "rows", *columns, "knee"], ratios),
        "",
        "The same of one row at the roofline of a TPU (model estimates, nothing measured):",
        "",
        *table(["target, chip", *(f"T = {tokens}" for tokens in K_FLAT_TOKENS), "knee"], chips),
    ]


def draw(left: Any, right: Any, grid: Grid, found: Sequence[Point]) -> None:
    """Ratios to one token: measured, and at the roofline of TPUs."""
    styles, rows = ("o-", "s--", "^:"), list(grid.rows)
    dtypes = list(dict.fromkeys(point.dtype for point in found))
    for (dtype, r), some in curves(found).items():
        style, colour = styles[dtypes.index(dtype)], f"C{rows.index(r)}"
        points = [(p.tokens, p.ratio.median) for p in some]
        left.plot(*zip(*points, strict=True), style, ms=4, color=colour, label=f"{dtype}, {r} row(s)")
    for number, (chip, (ratios, at)) in enumerate(tpu_curves(grid).items()):
        right.plot(K_FLAT_TOKENS, ratios, "o-", ms=4, color=f"C{number}", label=f"{chip}: knee {at or 'nowhere'}")
    left.set(title="measured here", ylabel="times the seconds of T = 1")
    right.set(title=f"{TPU_TARGET}, one row, roofline: a model estimate")
    for axes, tokens in ((left, grid.tokens), (right, K_FLAT_TOKENS)):
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, [str(number) for number in tokens])
        axes.set(xlabel="T, query tokens of a row", ylim=(0, None))


def document(grid: Grid, found: Sequence[Point]) -> dict[str, Any]:
    """For a program."""
    knees = [{"dtype": d, "rows": r, "knee": measured_knee(some)} for (d, r), some in curves(found).items()]
    tpu = [{"chip": chip, "ratios": ratios, "knee": at} for chip, (ratios, at) in tpu_curves(grid).items()]
    about = {"definitions": DEFINITIONS, "context": grid.context, "tokens": grid.tokens}
    about |= {"tpu_target": TPU_TARGET, "tpu_tokens": K_FLAT_TOKENS, "tpu": tpu}
    return about | {"points": [asdict(point) for point in found], "knees": knees}
