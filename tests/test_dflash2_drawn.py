"""Drafts of a DFlash 2 drafter at a temperature: chosen with the target's own noise, behind the request's own filters,
compared with a walk in NumPy over the slow twin's logits."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import sampling_twins
import torch
from helpers import Loaded, load, prompt_of, second, write_drafter, write_target

from torch_dflash import Sampling, generate, reference

ASKED = [
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.6, top_k=2, seed=2**40 + 1),
    Sampling(temperature=0.9, top_p=0.6, seed=9),
    Sampling(temperature=1.2, min_p=0.3, repetition_penalty=1.3, seed=5),
    Sampling(),
    Sampling(presence_penalty=0.8, logit_bias={3: 0.7}),
]


@pytest.fixture(scope="module")
def drawn2(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Edges of the size of the logits, so that they decide."""
    folder = tmp_path_factory.mktemp("drawn")
    write_target(folder / "target")
    write_drafter(folder / "draft", **second(final_logit_softcapping=None, output_multiplier=0.3))
    return load(folder)


def drafts_of(pair: Loaded, asked: Sampling, tokens: Sequence[int], prompt_len: int, reach: float = 1.0) -> list[int]:
    """Behind `tokens`, whose last is the anchor. reach: by what the edges are multiplied."""
    config, drafter = pair.config, pair.drafter
    assert config.selector is not None
    _, features = reference.target_pass(pair.target, tokens[:-1], config.target_layer_ids)
    hidden = reference.draft_hidden(pair.target, drafter, config, features, tokens[-1])
    drafts, before = list[int](), tokens[-1]
    for j, logits in enumerate(reference.draft_logits(pair.target, drafter, config, hidden).numpy()):
        heat, noise = asked.temperature or 1.0, np.zeros(len(logits))
        if asked.seed is not None:
            noise = sampling_twins.gumbel(asked.seed, len(tokens) + j, len(logits))
        scaled = sampling_twins.adjusted(asked, logits, tokens, prompt_len) / heat
        left = sampling_twins.filtered(replace(asked, temperature=0.0), scaled[None].astype(np.float32))[0]
        near = np.lexsort((np.where(np.isinf(left), scaled, scaled + noise), ~np.isinf(left)))[-config.selector.top_k :]
        places = torch.tensor(near)[None, None]
        edges = drafter.edges(hidden[j : j + 1, None], torch.tensor([[[before]]]), places)[0, 0, 0].numpy() * reach
        behind = (scaled[near] + edges / heat).astype(np.float32)
        kept = sampling_twins.filtered(replace(asked, temperature=0.0), behind[None])[0]
        before = int(near[(kept + noise[near]).argmax()])
        drafts.append(before)
    return drafts


def test_drafts_are_those_of_a_walk_over_the_candidates(drawn2: Loaded) -> None:
    prompts = [prompt_of(length) for length in (4, 5, 6, 7, 8, 9)]
    results = generate(drawn2.pair, prompts, 24, sampling=ASKED, ignore_eos=True, trace=True)
    by_edges, by_filters = 0, 0
    for prompt, asked, result in zip(prompts, ASKED, results, strict=True):
        for entry in result.trace or ():
            tokens = [*prompt, *result.token_ids][: entry.start + 1]
            assert entry.proposed == drafts_of(drawn2, asked, tokens, len(prompt)), (asked, entry)
            by_edges += entry.proposed != drafts_of(drawn2, asked, tokens, len(prompt), reach=0.0)
            unfiltered = replace(asked, top_k=None, top_p=1.0, min_p=0.0)
            by_filters += entry.proposed != drafts_of(drawn2, unfiltered, tokens, len(prompt))
    assert by_edges > 10 and by_filters > 5, "neither decided anything: nothing was tested"


def test_one_token_left_is_drafted_as_greedily(drawn2: Loaded) -> None:
    """top_k 1 leaves the likeliest token, edges included, whatever the noise would like."""
    prompt = prompt_of(11)
    asked = [Sampling(), Sampling(temperature=0.6, top_k=1, seed=4)]
    greedy, filtered = generate(drawn2.pair, [prompt] * 2, 24, sampling=asked, ignore_eos=True, trace=True)
    assert greedy.token_ids == filtered.token_ids
    assert greedy.trace == filtered.trace
