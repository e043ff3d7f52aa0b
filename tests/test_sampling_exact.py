"""Drawn tokens end to end, on the speculative path: distributed exactly as the target alone says, and a function of the
seed alone.

All requests of an engine have one budget, so a dispatch always has all rows and few programs are compiled.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import Loaded, load_pair, prompt_of, run_engine
from sampling_twins import adjusted, filtered, text
from scipy.stats import chi2
from test_dispatch import compilations

from torch_dflash import Result, generate, reference
from torch_dflash.engine import Engine
from torch_dflash.options import GREEDY, Sampling
from torch_dflash.pair import Pair
from torch_dflash.requests import Request, Run
from torch_dflash.state import Capacity

V = 12
ROWS = Capacity.whole(8, 5, 64)
STEPS = 16
PROMPT = tuple(prompt_of(9, seed=18))  # behind it the drafter is right now and then
DEPTH = 4  # new tokens: the first from prefill, three from verified blocks
DRAWS = 800
DRAWN = {
    "temperature": Sampling(temperature=2.0),
    "top-k": Sampling(temperature=2.0, top_k=3),
    "top-p": Sampling(temperature=2.0, top_p=0.8),
    "min-p": Sampling(temperature=2.0, min_p=0.15),
    "repetition": Sampling(temperature=2.0, repetition_penalty=2.5),
    "presence": Sampling(temperature=2.0, presence_penalty=3.0),
    "frequency": Sampling(temperature=2.0, frequency_penalty=3.0),
    "bias": Sampling(temperature=2.0, logit_bias={3: 4.0, 8: -3.0}),
    "together": Sampling(1.5, 6, 0.9, 0.02, None, 1.3, 0.5, 0.5, {3: 2.0}),
}


@pytest.fixture(scope="module")
def draws(tiny: Loaded) -> dict[str, list[Run]]:
    """DRAWS runs for each option, every one with a seed of its own; all options side by side in one engine."""
    asked = [(name, seed) for seed in range(DRAWS) for name in DRAWN]
    requests = [
        Request(i, PROMPT, DEPTH, (), replace(DRAWN[name], seed=i * 0x9E3779B97F4A7C15 % 2**64))
        for i, (name, _) in enumerate(asked)
    ]
    runs = run_engine(tiny.pair, tiny.pair.proposer("dflash", None), requests, ROWS, STEPS)
    return {wanted: [run for run, (name, _) in zip(runs, asked, strict=True) if name == wanted] for wanted in DRAWN}


@pytest.fixture(scope="module")
def logits_behind(tiny: Loaded) -> list[np.ndarray]:
    """[V**n,V] for n = 0..DEPTH-1: the target's logits behind all texts of n new tokens, from eager passes."""
    last = np.stack(
        [reference.target_pass(tiny.target, [*PROMPT, *new])[0][-DEPTH:] for new in np.ndindex((V,) * (DEPTH - 1))]
    )
    return [last[:: V ** (DEPTH - 1 - n), n] for n in range(DEPTH)]


def joint(s: Sampling, logits_behind: list[np.ndarray]) -> np.ndarray:
    """[V**DEPTH]: the probability of each text of DEPTH new tokens."""
    probability = np.ones(1)
    for n, logits in enumerate(logits_behind):
        texts = np.ndindex((V,) * n)
        left = [adjusted(s, row, [*PROMPT, *new], len(PROMPT)) for row, new in zip(logits, texts, strict=True)]
        next_token = torch.softmax(torch.tensor(filtered(s, np.stack(left))).double(), -1).numpy()
        probability = (probability[:, None] * next_token).ravel()
    return probability


def chi_square(counts: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """The statistic and its degrees of freedom. Cells that expect under 8 are put together with their neighbours, until
    they expect 12."""
    alone = expected >= 8
    few = np.where(alone, 0, expected).cumsum() / 12
    group = np.minimum(few, max(few[-1] - 1, 0)).astype(int)
    sums = [np.bincount(group[~alone], values[~alone]) for values in (counts, expected)]
    counts, expected = (np.append(v[alone], s) for v, s in zip((counts, expected), sums, strict=True))
    real = expected > 0
    return float(((counts - expected)[real] ** 2 / expected[real]).sum()), int(real.sum()) - 1


@pytest.mark.parametrize("name", DRAWN)
def test_the_joint_distribution_is_exact(
    name: str, draws: dict[str, list[Run]], logits_behind: list[np.ndarray]
) -> None:
    runs, expected = draws[name], DRAWS * joint(DRAWN[name], logits_behind)
    cells = [np.ravel_multi_index(run.token_ids, (V,) * DEPTH) for run in runs]
    counts = np.bincount(cells, minlength=V**DEPTH)
    assert not counts[expected == 0].any()
    statistic, freedom = chi_square(counts, expected)
    print(f"{name}: chi-square {statistic:.1f}, {freedom} degrees of freedom, p {chi2.sf(statistic, freedom):.3f}")
    assert freedom > 10
    assert chi2.sf(statistic, freedom) > 1e-3
    accepted = Counter(entry.accepted for run in runs for entry in run.trace)
    assert min(accepted[0], accepted[1], accepted[2] + accepted[3]) > 0
    assert len({tuple(run.token_ids) for run in runs}) > 10


def knowing_nothing(tiny: Loaded) -> Pair:
    """The pair with weights that leave both models one and the same distribution, whatever the text: no layer adds
    anything, all tokens have one embedding, and the head is random."""
    target, drafter = dict(tiny.pair.params["target"]), dict(tiny.pair.params["drafter"])
    for params in (target, drafter):
        for name in params:
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                params[name] = params[name] * 0
    drafter["norm.weight"] = target["norm.weight"]
    embedding = target["embed_tokens.weight"]
    target["embed_tokens.weight"] = embedding * 0 + embedding[3]
    return replace(tiny.pair, params={"target": target, "drafter": drafter})


@pytest.mark.parametrize("num_drafts", [1, None])
def test_a_drafter_that_knows_the_distribution_is_always_right(tiny: Loaded, num_drafts: int | None) -> None:
    """Since it draws with the target's noise, at any temperature; the likeliest token would be right now and then."""
    pair = knowing_nothing(tiny)
    unpenalised = [*MIXED[:4], MIXED[5]]
    for run in run_engine(pair, pair.proposer("dflash", num_drafts), requests_of(unpenalised), ROWS):
        assert all(entry.accepted == len(entry.proposed) for entry in run.trace)
        assert len(set(run.token_ids)) > 2


LONG = prompt_of(270, seed=3)  # prefilled in two chunks
NEW = 12
MIXED = [
    Sampling(temperature=2.5, seed=11),
    Sampling(temperature=2.0, top_k=4, seed=2**63 + 5),
    Sampling(temperature=3.0, top_p=0.7, seed=0),
    Sampling(temperature=3.0, min_p=0.1, seed=2**32),
    Sampling(temperature=1.5, repetition_penalty=1.8, presence_penalty=1.0, frequency_penalty=-0.5, seed=7),
    Sampling(temperature=2.0, logit_bias={3: 3.0}, seed=2**64 - 1),
    Sampling(repetition_penalty=1.5, frequency_penalty=0.8, logit_bias={5: 1.5}),
    Sampling(1.5, 6, 0.9, 0.02, 5, 1.3, 0.5, 0.5, {3: 2.0}),
]
GREEDILY = [
    Sampling(repetition_penalty=1.9),
    Sampling(repetition_penalty=0.7),
    Sampling(presence_penalty=4.0),
    Sampling(presence_penalty=-2.0),
    Sampling(frequency_penalty=1.5),
    Sampling(logit_bias={4: 3.0, 11: -6.0}),
    Sampling(repetition_penalty=1.2, presence_penalty=1.0, frequency_penalty=1.0, logit_bias={11: -3.0}),
    Sampling(),
]


def requests_of(listed: Sequence[Sampling]) -> list[Request]:
    return [Request(i, tuple(prompt_of(9 + i, seed=4)), NEW, (), sampling) for i, sampling in enumerate(listed)]


REQUESTS = [replace(r, prompt_ids=tuple(LONG)) if r.index == 0 else r for r in requests_of(MIXED)]


def expected_text(tiny: Loaded, r: Request) -> list[int]:
    """What the twins say: eager passes over everything, one token at a time."""
    return text(tiny.target, r.sampling, r.prompt_ids, r.max_new_tokens)


@pytest.fixture(scope="module")
def expected(tiny: Loaded) -> list[list[int]]:
    return [expected_text(tiny, r) for r in REQUESTS]


def run(tiny: Loaded, requests: Sequence[Request]) -> list[Run]:
    """On the speculative path, eight rows at a time."""
    return run_engine(tiny.pair, tiny.pair.proposer("dflash", None), requests, ROWS, STEPS)


def ids_of(runs: Sequence[Run]) -> list[list[int]]:
    return [run.token_ids for run in runs]


def test_a_seed_gives_its_text(tiny: Loaded, expected: list[list[int]]) -> None:
    runs = run(tiny, REQUESTS)
    assert ids_of(runs) == expected
    assert {0, 1, 2} <= {entry.accepted for run in runs for entry in run.trace}


def test_neighbours_and_order_change_no_text(tiny: Loaded, expected: list[list[int]]) -> None:
    assert ids_of(run(tiny, REQUESTS[:0:-1])) == expected[:0:-1]
    others = [replace(r, sampling=Sampling(temperature=2.0, seed=r.index)) for r in REQUESTS[1:7]]
    assert ids_of(run(tiny, [*others, *REQUESTS[5:7]]))[6:] == expected[5:7]


def test_another_seed_gives_another_text(tiny: Loaded, expected: list[list[int]]) -> None:
    """Also one that differs in its upper half only."""
    for seed in (12345, 11 + 2**32):
        runs = run(tiny, [replace(r, sampling=replace(r.sampling, seed=seed)) for r in REQUESTS[1:]])
        same = [ids == old for ids, old in zip(ids_of(runs), expected[1:], strict=True)]
        assert same == [r.sampling.temperature == 0 for r in REQUESTS[1:]]


def test_fewer_drafts_and_remembered_pages_change_no_text(tiny: Loaded, expected: list[list[int]]) -> None:
    """A smaller block, of which one draft is used; one row; one step per dispatch; small pages, and every other request
    finds the beginning of its prompt there."""
    pair = load_pair(tiny.folder / "target", tiny.folder / "draft", block_size=3)
    first_pages: dict[int, list[int]] = {r.index: [] for r in REQUESTS}

    def look(engine: Engine) -> None:
        held = engine.rows[0]
        if held is not None and len(held.token_ids) == 1:
            first_pages[held.request.index].append(int(engine.pages.table([0])[0, 0]))

    twice = [r for request in REQUESTS[1:] for r in (replace(request, sampling=GREEDY), request)]
    runs = run_engine(pair, pair.proposer("dflash", 1), twice, Capacity.whole(1, 4, 8), 1, look)
    assert ids_of(runs[1::2]) == expected[1:]
    assert all(len(pages) == 2 and len(set(pages)) == 1 for index, pages in first_pages.items() if index > 0)


def test_plain_decoding_gives_the_same_text(tiny: Loaded, expected: list[list[int]]) -> None:
    """Through the API; and so do penalties and bias without a temperature."""
    requests = [*REQUESTS[1:], *requests_of(GREEDILY)[:5]]
    results = plainly(tiny, [r.prompt_ids for r in requests], [r.sampling for r in requests])
    assert [result.token_ids for result in results] == [*expected[1:], *(expected_text(tiny, r) for r in requests[7:])]


def plainly(tiny: Loaded, prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling]) -> list[Result]:
    return generate(tiny.pair, prompts, NEW, sampling=sampling, method="plain", ignore_eos=True, rows=1)


def test_penalties_and_bias_without_a_temperature(tiny: Loaded) -> None:
    requests = requests_of(GREEDILY)
    found = ids_of(run(tiny, requests))
    assert found == [expected_text(tiny, r) for r in requests]
    without = [reference.greedy(tiny.target, r.prompt_ids, NEW) for r in requests]
    assert [ids == greedy for ids, greedy in zip(found, without, strict=True)] == [False] * 7 + [True]


def test_no_temperature_and_one_candidate_are_greedy(tiny: Loaded) -> None:
    requests = requests_of([*[Sampling(temperature=1e-6)] * 4, *[Sampling(temperature=3.0, top_k=1)] * 4])
    assert ids_of(run(tiny, requests)) == [reference.greedy(tiny.target, r.prompt_ids, NEW) for r in requests]


def test_logprobs_are_the_targets_own(tiny: Loaded) -> None:
    asked = [replace(sampling, logprobs=True) for sampling in MIXED]
    for done in run(tiny, requests_of(asked)):
        ids = [*done.request.prompt_ids, *done.token_ids]
        logits = reference.target_pass(tiny.target, ids)[0][-NEW - 1 : -1]
        logprobs = torch.log_softmax(logits, -1)[range(NEW), done.token_ids]
        np.testing.assert_allclose(done.logprobs, logprobs, atol=2e-5)


def test_a_seed_that_was_not_given_is_told(tiny: Loaded) -> None:
    drawn = Sampling(temperature=3.0)
    first, second, greedy = plainly(tiny, [PROMPT] * 3, [drawn, drawn, GREEDY])
    assert first.token_ids != second.token_ids
    assert greedy.seed is None
    again = plainly(tiny, [PROMPT] * 2, [replace(drawn, seed=r.seed) for r in (first, second)])
    assert [r.token_ids for r in again] == [first.token_ids, second.token_ids]


def test_no_option_compiles_anything(tiny: Loaded) -> None:
    plainly(tiny, [PROMPT], [GREEDY])
    with compilations() as seen:
        plainly(tiny, [PROMPT] * len(MIXED), [replace(s, logprobs=True) for s in MIXED])
    assert seen == []
