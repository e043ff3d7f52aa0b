"""The figures as Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from torch_dflash.bench.figures import DEFINITIONS, Equality, Figures, SpeedUp, Spread

EXACT = "float32"  # the dtype in which every method's output must equal plain decoding's


def markdown(document: Mapping[str, Any], results: Sequence[Figures]) -> str:
    """The whole report. `document` is the JSON one."""
    drafting = [each for each in results if each.acceptance]
    parts = [
        ["# torch-dflash bench", "", *_about(document)],
        main_table(results),
        not_lossless(document["settings"]["dtype"], results),
        ["## Accepted drafts by position", "", *acceptance_table(drafting)] if drafting else [],
        ["## Accepted drafts per step", "", *histogram_table(drafting)] if drafting else [],
        ["## What the figures mean", "", *(f"* {name}: {text}." for name, text in DEFINITIONS.items())],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _about(document: Mapping[str, Any]) -> list[str]:
    environment, settings = document["environment"], document["settings"]
    packages = ", ".join(f"{name} {number}" for name, number in environment["packages"].items())
    asked = ", ".join(f"{name} {_shown(value)}" for name, value in settings.items() if value is not None)
    warm_up = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in document["warm_up_seconds"].items())
    return [
        f"    {document['command']}",
        "",
        f"* Machine: {environment['machine']}. Begun {document['began']}.",
        f"* Code: git {environment['git']}; {packages}.",
        f"* Settings: {asked}.",
        f"* Compilation and warm-up, in no other figure: {warm_up}.",
    ]


def _shown(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list | dict) else str(value)


def main_table(results: Sequence[Figures]) -> list[str]:
    """A row for each set and method. Without plain decoding there is nothing to compare with: fewer columns."""
    compared = any(each.equality is not None for each in results)
    head = ["set", "method", "prompts", "tau", "TTFT ms", "TPOT ms", "tokens/s"]
    head += ["speed-up (95%)", "equal to plain", "first divergence (logit gap)"] if compared else []
    return table(head, (_row(each, compared) for each in results))


def _row(each: Figures, compared: bool) -> list[str]:
    tpot = "-" if each.tpot is None else _beside(each.tpot, each.tpot_of_prompts)
    row = [each.dataset, each.method, str(each.prompts), f"{each.tau:.2f}", _milliseconds(each.ttft), tpot]
    row.append(f"{each.tokens_per_second:.1f}")
    return row + ([_speed_up(each.speed_up), *_equality(each.equality)] if compared else [])


def _milliseconds(spread: Spread) -> str:
    return f"{spread.median * 1e3:.1f} ({spread.low * 1e3:.1f}-{spread.high * 1e3:.1f})"


def _beside(tpot: float, spread: Spread | None) -> str:
    of_prompts = "" if spread is None else f" ({spread.low * 1e3:.1f}-{spread.high * 1e3:.1f})"
    return f"{tpot * 1e3:.1f}{of_prompts}"


def _speed_up(value: SpeedUp | None) -> str:
    if value is None:
        return "-"
    return f"{value.ratio:.2f}" + ("" if value.low is None else f" ({value.low:.2f}-{value.high:.2f})")


def _equality(value: Equality | None) -> tuple[str, str]:
    """Share, and where the others part: the median place with the largest gap beside it."""
    if value is None:
        return "-", "-"
    share = f"{value.equal}/{value.prompts}"
    if not value.positions:
        return share, "-"
    return share, f"{median(value.positions):g} (at most {max(map(abs, value.gaps)):.3f})"


def not_lossless(dtype: str, results: Iterable[Figures]) -> list[str]:
    """In float32 every output must be equal: one line for every row where it is not."""
    wrong = [each for each in results if dtype == EXACT and _differing(each)]
    return [f"**Not equal in {EXACT}**: {each.dataset}, {each.method}: {_differing(each)} outputs." for each in wrong]


def _differing(each: Figures) -> int:
    return 0 if each.equality is None else each.equality.prompts - each.equality.equal


def acceptance_table(results: Sequence[Figures]) -> list[str]:
    """Share of the steps whose first k drafts were all accepted."""
    columns = range(1, max(len(each.acceptance) for each in results) + 1)
    rows = ([each.dataset, each.method, *(f"{share:.3f}" for share in each.acceptance)] for each in results)
    return table(["set", "method", *(f"k = {k}" for k in columns)], rows)


def histogram_table(results: Sequence[Figures]) -> list[str]:
    """Steps by the number of accepted drafts."""
    columns = range(max(len(each.accept_histogram) for each in results))
    rows = ([each.dataset, each.method, *map(str, each.accept_histogram)] for each in results)
    return table(["set", "method", *(f"a = {a}" for a in columns)], rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table. Rows that are too short are filled up."""
    lines = [head, ["---"] * len(head), *([*row, *["-"] * (len(head) - len(row))] for row in rows)]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
