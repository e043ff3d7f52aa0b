"""DFlash 2 drafters: tensor by tensor and round by round against PyPI dflash 0.1.0, then a random one in the engine
against the slow twin."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from config_files import ABSENT, assert_line, drafter
from helpers import (
    DFLASH_2,
    DRAFTER,
    GOLDEN,
    SCALES,
    Loaded,
    compilations,
    golden_data,
    golden_pair,
    load,
    prompt_of,
    write_drafter,
)
from helpers import write_target as write_random_target
from safetensors.torch import load_file
from torch import Tensor

from torch_dflash import Result, Sampling, generate, load_pair, reference
from torch_dflash.block import LIKELIEST, select, tokens_before
from torch_dflash.config import Convolution, Scales, Selector
from torch_dflash.config_reader import read_drafter_config
from torch_dflash.errors import InputError
from torch_dflash.likeliest import Several, best
from torch_dflash.models.dflash2 import convolve
from torch_dflash.options import Choice, row_options
from torch_dflash.pair import load_drafter, load_target
from torch_dflash.sampling import choose
from torch_dflash.train.export import drafter_fields

TOLERANCE = 2e-4


def full_blocks(prompt: dict[str, Any]) -> list[dict[str, Any]]:
    """The original's steps before the first block that it shortens, which ours never does."""
    steps = prompt["steps"]
    short = [k for k, step in enumerate(steps) if step["verify_size"] < 8]
    return steps[: short[0]] if short else steps


def golden_steps() -> Iterator[tuple[str, list[int], dict[str, Any]]]:
    """Key prefix, tokens up to the anchor, and record of each step whose tensors are there."""
    tensors = load_file(GOLDEN / "dflash2" / "golden.safetensors")
    for i, prompt in enumerate(golden_data("dflash2")["prompts"]):
        for k, step in enumerate(full_blocks(prompt)):
            if f"p{i}.step{k}.draft_logits" in tensors:
                yield f"p{i}.step{k}", prompt["output_ids"][: step["start"] + 1], step


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs.reshape(ours.shape), atol=TOLERANCE, rtol=0)


def test_tensors_of_the_original() -> None:
    """Layers, hidden states, logits, candidates, and scores along the path."""
    tensors = load_file(GOLDEN / "dflash2" / "golden.safetensors")
    _, target = load_target(GOLDEN / "dflash2" / "target", torch.float32)
    config, drafter = load_drafter(GOLDEN / "dflash2" / "draft", torch.float32)
    assert config.selector == Selector(rank=16, top_k=6) and config.convolution == Convolution(3, 8)
    assert config.scales == Scales(input_embedding=0.8, output=0.5, softcapping=15.0)
    layers: list[Tensor] = []
    for layer in drafter.layers:
        layer.register_forward_hook(lambda _, __, out: layers.append(out[0]))
    count = 0
    for key, tokens, step in golden_steps():
        layers.clear()
        _, features = reference.target_pass(target, tokens[:-1], config.target_layer_ids)
        hidden = reference.draft_hidden(target, drafter, config, features, tokens[-1])
        for i, out in enumerate(layers):
            close(out, tensors[f"{key}.draft_layer{i}"])
        close(hidden, tensors[f"{key}.draft_hidden"][:, 1:])
        logits = reference.draft_logits(target, drafter, config, hidden)
        close(logits, tensors[f"{key}.draft_logits"])
        theirs = tensors[f"{key}.candidates"][0]
        assert logits.topk(6).indices.sort().values.tolist() == theirs.sort().values.tolist()
        before = torch.tensor([tokens[-1], *step["draft_tokens"][:-1]])
        edges = drafter.edges(hidden[:, None], before[:, None, None], theirs[:, None])[:, 0, 0]
        close(logits.gather(1, theirs) + edges, tensors[f"{key}.scores"])
        assert reference.draft_ids(target, drafter, config, features, tokens[-1]) == step["draft_tokens"]
        count += 1
    assert count >= 6


def rounds(result: Result) -> list[tuple[int, list[int], int]]:
    return [(entry.start, entry.proposed, entry.accepted) for entry in result.trace or ()]


def test_rounds_of_the_original() -> None:
    """All prompts together; the original ran them one by one. What the likeliest tokens alone would be is recorded too:
    the selector must have changed drafts, or this would show nothing."""
    pair, prompts, changed = golden_pair("dflash2"), golden_data("dflash2")["prompts"], 0
    results = generate(pair, [p["prompt_ids"] for p in prompts], 48, trace=True, ignore_eos=True)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == prompt["ar_output_ids"][len(prompt["prompt_ids"]) :]
        steps = full_blocks(prompt)
        assert len(steps) >= 7
        wanted = [(step["start"], step["draft_tokens"], step["accepted"]) for step in steps]
        assert rounds(result)[: len(steps)] == wanted
        changed += sum(step["draft_tokens"] != step["unary_argmax"] for step in steps)
    assert changed >= 10


@pytest.mark.parametrize("num_drafts", [3, 2])
def test_proposals_equal_the_slow_twins(tiny2: Loaded, num_drafts: int) -> None:
    """Prompts of several lengths in one batch, several steps a dispatch, nothing compiled after warm-up."""
    prompts = [prompt_of(length) for length in (1, 5, 17)]
    generate(tiny2.pair, prompts, 24, num_drafts=num_drafts, ignore_eos=True)
    with compilations() as seen:
        results = generate(tiny2.pair, prompts, 24, num_drafts=num_drafts, ignore_eos=True, trace=True)
    assert seen == []
    for prompt, result in zip(prompts, results, strict=True):
        ids, trace = reference.dflash(tiny2.target, tiny2.drafter, tiny2.config, prompt, 24, num_drafts)
        assert result.token_ids == ids == reference.greedy(tiny2.target, prompt, 24)
        assert list(result.trace or ()) == trace


def test_smaller_blocks(tiny2: Loaded) -> None:
    pair = load_pair(tiny2.folder / "target", tiny2.folder / "draft", block_size=2)  # narrower than the kernel
    config = replace(tiny2.config, block_size=2)
    result = generate(pair, prompt_of(9), 16, ignore_eos=True, trace=True)[0]
    assert list(result.trace or ()) == reference.dflash(tiny2.target, tiny2.drafter, config, prompt_of(9), 16)[1]


def test_drawn_texts_are_the_targets_own(tiny2: Loaded) -> None:
    """Row by row as in plain decoding, whatever the options; greedy rows between them are not disturbed."""
    asked = [
        Sampling(temperature=1.0, seed=3),
        Sampling(),
        Sampling(temperature=0.6, top_k=1, seed=1),  # one candidate is finite
        Sampling(temperature=1.3, top_p=0.8, repetition_penalty=1.2, seed=7),
        Sampling(temperature=1e-42, seed=2),
    ]
    prompts = [prompt_of(length) for length in (4, 5, 6, 7, 8)]
    plain = generate(tiny2.pair, prompts, 32, method="plain", sampling=asked, ignore_eos=True)
    drafted = generate(tiny2.pair, prompts, 32, sampling=asked, ignore_eos=True)
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]


def test_bfloat16_texts_are_plain_decodings(tiny2: Loaded) -> None:
    pair = load_pair(tiny2.folder / "target", tiny2.folder / "draft", "bfloat16")
    results = [generate(pair, prompt_of(8), 24, method=m, ignore_eos=True)[0].token_ids for m in ("plain", "dflash")]
    assert results[0] == results[1]


@pytest.mark.parametrize("vocab_size", [5, 24, 128, 1000, 1009, 6144])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_best_are_the_largest(vocab_size: int, dtype: str) -> None:
    """In float32 no two are alike, so a wrong place has a wrong value; in bfloat16 many are."""
    rng = np.random.default_rng(vocab_size)
    if dtype == "bfloat16":  # all of them are exact
        values = rng.permuted(np.broadcast_to(np.arange(vocab_size) % 251, (2, 3, vocab_size)), axis=-1)
    else:
        values = rng.standard_normal((2, 3, vocab_size))
    scores = jnp.asarray(values, dtype)
    found, ids = best(scores, 5)
    assert found.dtype == jnp.float32
    order = np.sort(np.asarray(scores, np.float32), axis=-1)[..., -5:]
    np.testing.assert_array_equal(np.sort(found, axis=-1), order)
    np.testing.assert_array_equal(np.take_along_axis(np.asarray(scores, np.float32), np.asarray(ids), -1), found)
    assert all(len(set(row)) == 5 for row in np.asarray(ids).reshape(-1, 5).tolist())


def test_best_of_few_finite_ones_are_ids() -> None:
    scores = jnp.full((1, 1, 12), -jnp.inf).at[0, 0, 7].set(2.0)
    values, ids = best(scores, 4)
    assert float(values.max()) == 2.0 and int(ids[0, 0, values.argmax()]) == 7
    assert int(ids.max()) < 12


def test_several_hold_the_choice() -> None:
    """With edges of zero the selector chooses what `choose` chooses: drawn, filtered, penalised or greedy."""
    asked = [
        Sampling(temperature=0.9, seed=0),
        Sampling(temperature=0.9, seed=1, top_k=9, presence_penalty=0.5),
        Sampling(),
        Sampling(presence_penalty=1.5),
    ]
    options = row_options([Choice(s, (), 2) for s in asked], 1, 1)
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((4, 3, 300)) * 3, jnp.float32)
    ids = jnp.asarray(np.random.default_rng(1).integers(0, 300, (4, 9)), jnp.int32)
    start = jnp.array([4, 5, 6, 7], jnp.int32)
    one, _ = jax.jit(choose)(logits, ids, start, options)
    several = jax.jit(choose.several, static_argnums=(4, 5))(logits, ids, start, options, 6, 1)
    chosen = select(several, jnp.zeros((4, 3, 6, 6)), lambda logits: choose.keep(logits, options))
    np.testing.assert_array_equal(chosen, one)
    np.testing.assert_allclose(several.scale, [1 / 0.9, 1 / 0.9, 1, 1], rtol=1e-6)
    assert (one != logits.argmax(-1)).any()


def test_select_walks_from_left_to_right() -> None:
    """Candidate a of position k has the id 10 k + a. Edges pull from one path to another only where they should."""
    ids = jnp.arange(3)[None, :, None] * 10 + jnp.arange(2)[None, None]
    scores = jnp.array([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
    edges = jnp.zeros((1, 3, 2, 2)).at[0, 1, 0, 1].set(3.0).at[0, 2, 1, 0].set(3.0).at[0, 2, 0, 1].set(9.0)
    several = Several(ids, scores, jnp.zeros_like(scores), jnp.ones(1))
    assert select(several, edges, LIKELIEST.keep).tolist() == [[0, 11, 20]]
    assert select(replace(several, scale=jnp.full(1, 0.1)), edges, LIKELIEST.keep).tolist() == [[0, 10, 21]]
    noise = jnp.zeros_like(scores).at[0, 0, 1].set(2.0)
    assert select(replace(several, noise=noise), edges, LIKELIEST.keep).tolist() == [[1, 10, 21]]
    first = jnp.array([0.0, -jnp.inf])
    assert select(several, edges, lambda logits: logits + first).tolist() == [[0, 10, 20]]
    assert tokens_before(jnp.array([7]), ids).tolist() == [[[7, 7], [0, 1], [10, 11]]]


def test_convolutions_see_their_own_block_alone() -> None:
    """Tap w of position t has the weight 10^w, so each position shows which others it has seen."""
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])[..., None]
    kernel = torch.tensor([1.0, 10.0, 100.0]).expand(2, 4, 3)[..., None]
    assert convolve(kernel, x)[..., 0].tolist() == [[1, 12, 123, 234], [5, 56, 567, 678]]


@pytest.mark.parametrize(
    ("changes", "field", "reason"),
    [
        ({"selector_rank": ABSENT}, "selector_rank", "is missing"),
        ({"selector_rank": 0}, "selector_rank", "1.."),
        ({"selector_top_k": 257}, "selector_top_k", "1..256"),
        ({"conv_kernel_size": 9}, "conv_kernel_size", "1..8"),
        ({"conv_group_size": 7}, "conv_group_size", "divide hidden_size"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping", ">= 0"),
        ({"output_multiplier": 0}, "output_multiplier", "> 0"),
        ({"use_swa": True}, "use_swa", "Model-Optimizer"),
        ({"swa_window_size": 512}, "swa_window_size", "Model-Optimizer"),
        ({"markov_rank": 4}, "markov_rank", "not part of DFlash 2; use a drafter without it"),
    ],
)
def test_refusals(changes: dict[str, Any], field: str, reason: str, tmp_path: Path) -> None:
    own = {"mask_token_id": 255, "target_layer_ids": [1, 3], **DFLASH_2, **changes}
    own = {name: value for name, value in own.items() if value is not ABSENT}
    with pytest.raises(InputError) as error:
        drafter(tmp_path, architectures=["DFlash2DraftModel"], dflash_config=own)
    assert_line(error.value, str(tmp_path / "config.json"), field, reason)


def test_the_twins_drafts_in_bfloat16() -> None:
    """The selector adds in float32; as many drafts as in float32, and mostly the same."""

    def drafts(dtype: torch.dtype) -> list[list[int]]:
        _, target = load_target(GOLDEN / "dflash2" / "target", dtype)
        config, drafter = load_drafter(GOLDEN / "dflash2" / "draft", dtype)
        contexts = [tokens for _, tokens, _ in golden_steps()]
        features = [reference.target_pass(target, tokens[:-1], config.target_layer_ids)[1] for tokens in contexts]
        pairs = zip(features, contexts, strict=True)
        return [reference.draft_ids(target, drafter, config, seen, tokens[-1]) for seen, tokens in pairs]

    wide, narrow = drafts(torch.float32), drafts(torch.bfloat16)
    assert [len(ids) for ids in narrow] == [len(ids) for ids in wide]
    first = [a[0] == b[0] for a, b in zip(wide, narrow, strict=True)]
    assert sum(first) > len(first) / 2


def test_v1_drafters_may_have_scales(tmp_path: Path) -> None:
    """As in `dflash` 0.1.0; the drafts are the slow twin's, and other than without."""
    write_random_target(tmp_path / "target")
    write_drafter(tmp_path / "draft", dflash_config={**DRAFTER["dflash_config"], **SCALES})
    scaled = load(tmp_path)
    assert scaled.config.scales == Scales(0.7, 0.6, 4.0) and scaled.config.selector is None
    trace = list(generate(scaled.pair, prompt_of(9), 16, ignore_eos=True, trace=True)[0].trace or ())
    with_scales, without = (
        reference.dflash(scaled.target, scaled.drafter, config, prompt_of(9), 16)[1]
        for config in (scaled.config, replace(scaled.config, scales=Scales()))
    )
    assert trace == with_scales != without


def test_an_exported_config_is_read_as_it_was(tiny2: Loaded, tmp_path: Path) -> None:
    """Scales that change nothing are not written: readers of v1 drafters need not know them."""
    first = replace(tiny2.config, selector=None, convolution=None)
    for config in (tiny2.config, replace(tiny2.config, scales=Scales()), first, replace(first, scales=Scales())):
        fields = drafter_fields(config)
        (tmp_path / "config.json").write_text(json.dumps(fields))
        assert read_drafter_config(tmp_path) == config
        assert ("output_multiplier" in fields["dflash_config"]) == (config.scales != Scales())


def test_fields_may_stand_on_either_level(tmp_path: Path) -> None:
    config = json.loads((GOLDEN / "dflash2" / "draft" / "config.json").read_text())
    nested = config.pop("dflash_config")
    (tmp_path / "config.json").write_text(json.dumps(config | nested))
    assert read_drafter_config(tmp_path) == read_drafter_config(GOLDEN / "dflash2" / "draft")
