"""A cost model: predicts the speed-up of DFlash from the costs of its parts and the accept counts. It is held against
a race of the engines in the same run.

Letters: K drafts of a step, N steps of a dispatch at most.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from studies.output import shown, spread
from studies.parts import Cost
from torch_dflash.bench.figures import Figures, Spread, figures, kept_tokens
from torch_dflash.bench.methods import PLAIN
from torch_dflash.bench.records import Batch, Outcome
from torch_dflash.bench.table import table

NAME = "cost-model"
DFLASH = "dflash"
STEP = {PLAIN: (PLAIN,), DFLASH: ("draft", "verify")}  # method -> the parts of its step
DEFINITIONS = {
    "costs": "width -> part -> seconds, means of this set's rounds; width: positions that attention reads of a row. "
    "plain, dflash: whole steps; verify: a step whose drafts cost nothing; draft: absorb and draft alone. step: (a "
    "dispatch of 4 steps - one of 1) / 3; around: a dispatch of 1 - a step. Two rounds of these are measured before "
    "every prompt's race; steps: the same as median, lowest and highest",
    "host": "seconds of a dispatch besides its steps: around (of the whole step), and the engine's work between two "
    "dispatches",
    "simple": "tau * (plain + host / N) / (draft + verify + host / N), at the narrowest width",
    "model": "ratio of TPOTs as in bench, each prompt's decoding taken to last: its steps, each at the width that its "
    "context needs, and for each of its ceil(steps / N) dispatches the host",
    "measured": "speed_up of bench, with its 95% interval; the engines take turns, dispatch by dispatch",
    "error": "predicted / measured - 1",
    "in_race": "seconds of decoding in the race / what the model says, of each method",
}
Costs = Mapping[int, Mapping[str, Cost]]  # width -> part -> cost
Round = Mapping[tuple[int, str], Cost]  # (width, part) -> cost


@dataclass(frozen=True)
class Host:
    """Of one method: what the engine does between two dispatches (seconds), and its N."""

    between: float
    steps_per_dispatch: int


@dataclass(frozen=True)
class Measured:
    """One set, all there is: a batch for each prompt, rounds of costs between them, and by method the host."""

    batches: Sequence[Batch]
    rounds: Sequence[Round]
    hosts: Mapping[str, Host]

    def document(self) -> dict[str, Any]:
        """For a program."""
        rounds = [[{"width": w, "part": part} | asdict(cost) for (w, part), cost in r.items()] for r in self.rounds]
        hosts = {name: asdict(host) for name, host in self.hosts.items()}
        return {"batches": [asdict(batch) for batch in self.batches], "rounds": rounds, "hosts": hosts}


@dataclass(frozen=True)
class Prediction:
    """Of one set; see DEFINITIONS."""

    dataset: str
    prompts: int
    tau: float
    costs: Costs
    steps: Mapping[int, Mapping[str, Spread]]
    host: Mapping[str, float]
    measured: float
    low: float | None
    high: float | None
    simple: float
    model: float
    in_race: Mapping[str, float]

    @property
    def errors(self) -> tuple[float, float]:
        """Of the simple model and of the full one."""
        return self.simple / self.measured - 1, self.model / self.measured - 1


def mean_costs(rounds: Sequence[Round]) -> Costs:
    """Means over the rounds: what they predict is a sum, in which slow spells count. Medians leave those out."""
    found: dict[int, dict[str, Cost]] = {}
    for width, part in sorted(rounds[0]):
        own = [each[width, part] for each in rounds]
        found.setdefault(width, {})[part] = Cost(mean(c.step for c in own), mean(c.around for c in own))
    return found


def step_spreads(rounds: Sequence[Round]) -> dict[int, dict[str, Spread]]:
    """width -> part -> seconds of a step."""
    found: dict[int, dict[str, Spread]] = {}
    for width, part in sorted(rounds[0]):
        found.setdefault(width, {})[part] = spread(each[width, part].step for each in rounds)
    return found


def step_seconds(costs: Costs, method: str, width: int) -> float:
    """A step of a method at a width, from its parts."""
    return sum(costs[width][part].step for part in STEP[method])


def host_seconds(costs: Costs, method: str, host: Host) -> float:
    """A dispatch besides its steps."""
    return costs[widths_with(costs, method)[0]][method].around + host.between


def widths_with(costs: Costs, method: str) -> list[int]:
    """Those at which this method's engine may read, ascending."""
    return sorted(width for width, parts in costs.items() if method in parts)


def widths_of(outcome: Outcome, num_drafts: int, widths: Sequence[int]) -> list[int]:
    """Of each step of one prompt: the positions that attention reads, the fewest of `widths` (ascending) that hold the
    block, which is cut short below the context limit. The first step's anchor is the token that prefill gave, behind
    the prompt."""
    found, committed = [], outcome.prompt_tokens
    for accepted in outcome.accepted:
        found.append(next((w for w in widths if w >= committed + num_drafts + 1), widths[-1]))
        committed += accepted + 1
    return found


def decode_seconds(outcome: Outcome, method: str, num_drafts: int, costs: Costs, host: Host) -> float:
    """What the model says for one prompt, from its first token to its last."""
    steps = [step_seconds(costs, method, width) for width in widths_of(outcome, num_drafts, widths_with(costs, method))]
    dispatches = -(-len(steps) // host.steps_per_dispatch)
    return sum(steps) + dispatches * host_seconds(costs, method, host)


def predict(measured: Measured) -> Prediction:
    """Of a set in which both methods ran."""
    batches, rounds, hosts = measured.batches, measured.rounds, measured.hosts
    costs = mean_costs(rounds)
    own = figures(batches[0].dataset, DFLASH, batches, 0)
    assert own.speed_up is not None, "the prompts have steps by both methods"
    outcomes = {method: [o for batch in batches for o in batch.outcomes[method]] for method in STEP}
    drafts = batches[0].num_drafts
    seconds = {m: sum(decode_seconds(o, m, drafts[m], costs, hosts[m]) for o in outcomes[m]) for m in STEP}
    kept = {m: sum(map(kept_tokens, outcomes[m])) for m in STEP}
    return Prediction(
        dataset=own.dataset,
        prompts=own.prompts,
        tau=own.tau,
        costs=costs,
        steps=step_spreads(rounds),
        host={method: host_seconds(costs, method, hosts[method]) for method in STEP},
        measured=own.speed_up.ratio,
        low=own.speed_up.low,
        high=own.speed_up.high,
        simple=simple_speed_up(own, costs, hosts),
        model=(seconds[PLAIN] / kept[PLAIN]) / (seconds[DFLASH] / kept[DFLASH]),
        in_race={m: sum(o.decode_seconds for o in outcomes[m]) / seconds[m] for m in STEP},
    )


def simple_speed_up(own: Figures, costs: Costs, hosts: Mapping[str, Host]) -> float:
    """tau times a plain step over a DFlash step."""
    steps = {m: step_seconds(costs, m, widths_with(costs, m)[0]) for m in STEP}
    hosts_own = {m: host_seconds(costs, m, hosts[m]) / hosts[m].steps_per_dispatch for m in STEP}
    return own.tau * (steps[PLAIN] + hosts_own[PLAIN]) / (steps[DFLASH] + hosts_own[DFLASH])


def lines(results: Sequence[Prediction]) -> list[str]:
    """Two tables: costs as they spread, and predictions beside what was measured."""
    return [
        "ms of a step of one row by the positions that attention reads, median (lowest-highest). Draft + verify, "
        "and host (of a dispatch besides its steps): means, as the models use them.",
        "",
        *table(COSTS_HEAD, (row for each in results for row in _cost_rows(each))),
        "",
        "Speed-up of TPOT over plain decoding:",
        "",
        *table(HEAD, map(_row, results)),
    ]


COSTS_HEAD = ["set", "width", "plain", "draft", "verify", "draft + verify", "whole step", "host, plain", "host, dflash"]
HEAD = ["set", "prompts", "tau", "measured (95%)", "simple", "error", "model", "error"]
HEAD += ["plain / model", "dflash / model"]


def _cost_rows(result: Prediction) -> list[list[str]]:
    rows = []
    for width, parts in result.costs.items():
        cells = {name: shown(seconds, 1, 1e3) for name, seconds in result.steps[width].items()}
        if DFLASH in parts:
            cells["both"] = f"{step_seconds(result.costs, DFLASH, width) * 1e3:.1f}"
        own = [cells.get(name, "-") for name in (PLAIN, "draft", "verify", "both", DFLASH)]
        rows.append([result.dataset, str(width), *own, *(f"{result.host[method] * 1e3:.2f}" for method in STEP)])
    return rows


def _row(result: Prediction) -> list[str]:
    bounds = "" if result.low is None else f" ({result.low:.2f}-{result.high:.2f})"
    simple, model = result.errors
    cells = [f"{result.tau:.2f}", f"{result.measured:.2f}{bounds}", f"{result.simple:.2f}", f"{simple:+.1%}"]
    cells += [f"{result.model:.2f}", f"{model:+.1%}", *(f"{result.in_race[method]:.2f}" for method in STEP)]
    return [result.dataset, str(result.prompts), *cells]


def draw(axes: Any, results: Sequence[Prediction]) -> None:
    """Predicted against measured, with the band of 10%."""
    most = 1.15 * max(max(r.measured, r.model, r.simple) for r in results)
    axes.fill_between([0, most], [0, 0.9 * most], [0, 1.1 * most], color="gray", alpha=0.2, label="within 10%")
    axes.plot([0, most], [0, most], color="gray", linewidth=1)
    for number, r in enumerate(results):
        low, high = (r.measured if bound is None else bound for bound in (r.low, r.high))
        bars = [[max(r.measured - low, 0)], [max(high - r.measured, 0)]]
        axes.errorbar([r.measured], [r.model], xerr=bars, fmt="o", capsize=3, color=f"C{number}", label=r.dataset)
        axes.plot([r.measured], [r.simple], "x", color=f"C{number}")
    axes.set(title="speed-up over plain decoding; x: simple model", xlabel="measured (95%)", ylabel="predicted")
    axes.set(xlim=(0, most), ylim=(0, most))


def document(measured: Sequence[Measured], results: Sequence[Prediction]) -> dict[str, Any]:
    """For a program; with all that was measured, so that another model can be tried on it."""
    sets = [asdict(r) | dict(zip(("error_simple", "error_model"), r.errors, strict=True)) for r in results]
    return {"definitions": DEFINITIONS, "sets": sets, "measured": [each.document() for each in measured]}
