"""Answers -> figures -> a Markdown table. The definitions are the docstrings here."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from race import Answered, Prompt


@dataclass(frozen=True)
class Spread:
    """Median over prompts, with the lowest and the highest prompt."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))

    def shown(self, digits: int) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


@dataclass(frozen=True)
class Figures:
    """Of one peer on some prompts.

    tokens_per_second: new tokens / seconds; a prompt's figure is the median of its repeats. ratio: tokens/s over the
    base's for the same prompt in the same repeat; again the median of repeats, then over prompts. tau: (new tokens - 1)
    / target passes behind prefill, summed over prompts and repeats. equal: share of answers that are, token for token,
    the reference's to the same prompt in the same repeat.
    """

    tokens_per_second: Spread
    ratio: Spread
    tau: float
    equal: float


def figures_of(answers: Sequence[Answered], peer: str, base: str, reference: str) -> Figures:
    """The figures of one peer; `answers` are everybody's."""
    at = {(answer.peer, answer.prompt, answer.repeat): answer for answer in answers}
    own = [answer for answer in answers if answer.peer == peer]

    def over_base(answer: Answered) -> float:
        return answer.speed / at[base, answer.prompt, answer.repeat].speed

    same = [answer.token_ids == at[reference, answer.prompt, answer.repeat].token_ids for answer in own]
    steps = sum(answer.steps for answer in own)
    return Figures(
        tokens_per_second=Spread.of(by_prompt(own, lambda answer: answer.speed)),
        ratio=Spread.of(by_prompt(own, over_base)),
        tau=sum(len(answer.token_ids) - 1 for answer in own) / steps if steps else 0.0,
        equal=sum(same) / len(same),
    )


def by_prompt(answers: Sequence[Answered], value: Callable[[Answered], float]) -> list[float]:
    """The median of its repeats, for each prompt."""
    numbers = sorted({answer.prompt for answer in answers})
    return [statistics.median(value(answer) for answer in answers if answer.prompt == number) for number in numbers]


def names_of(peers: Sequence[str]) -> tuple[str, str]:
    """The base of ratios and the reference of equality: the original and this project, or the first where one does
    not run."""
    return tuple(name if name in peers else peers[0] for name in ("original", "dflash"))  # type: ignore[return-value]


def whole_table(answers: Sequence[Answered], peers: Sequence[str], memory: dict[str, int]) -> str:
    """One line for each peer, over all prompts. memory: peak bytes of each peer's process."""
    base, reference = names_of(peers)
    head = ("peer", "tokens/s", f"ratio to {base}", "tau", f"equal to {reference}", "peak memory, MiB")
    lines = [head, ("---",) * len(head)]
    for peer in peers:
        f = figures_of(answers, peer, base, reference)
        shown = f.tokens_per_second.shown(1), f.ratio.shown(2), f"{f.tau:.2f}", f"{f.equal:.0%}"
        lines.append((peer, *shown, str(memory[peer] >> 20)))
    return markdown(lines)


def set_table(answers: Sequence[Answered], peers: Sequence[str], prompts: Sequence[Prompt]) -> str:
    """Ratio to the base and tau of each peer on each set of prompts."""
    base, reference = names_of(peers)
    lines = [(f"ratio to {base}; tau", *peers), ("---",) * (len(peers) + 1)]
    for name in dict.fromkeys(prompt.name for prompt in prompts):
        own = [answer for answer in answers if prompts[answer.prompt].name == name]
        figures = [figures_of(own, peer, base, reference) for peer in peers]
        lines.append((name, *(f"{f.ratio.shown(2)}; {f.tau:.2f}" for f in figures)))
    return markdown(lines)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
