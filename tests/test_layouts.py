"""Every layout of the same drafter gives the same proposals; a reduced head of its own equals full recomputation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from helpers import load, prompt_of
from layout_files import (
    speculators_config,
    tensors_of,
    write,
    write_model_optimizer,
    write_muse,
    write_pair,
    write_speculators,
)

from torch_dflash import InputError, Pair, generate, load_pair, reference
from torch_dflash.config import ZLAB, DrafterConfig, DraftLayer
from torch_dflash.config_reader import read_drafter_config
from torch_dflash.pair import load_drafter
from torch_dflash.train.loss import lower_drafter

PROMPTS = [prompt_of(n) for n in (5, 9, 16)]
NEW = 16
REDUCED = [0, 2, 3, 5, 7, 8, 9, 11]
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 6}


def rounds(pair: Pair) -> list[Any]:
    """The trace of every prompt. One row, so that all of them run the same two programs."""
    return [generate(pair, [prompt], NEW, trace=True, ignore_eos=True)[0].trace for prompt in PROMPTS]


def with_programs_of(other: Pair, pair: Pair) -> Pair:
    """The pair, running what has been compiled for another one: equal configs trace to equal programs."""
    assert bare(pair) == bare(other)
    assert jax.tree.map(jax.typeof, pair.params) == jax.tree.map(jax.typeof, other.params)
    return replace(other, params=pair.params)


def bare(pair: Pair) -> DrafterConfig:
    """Its drafter's config without what some layouts leave out and no program depends on."""
    assert pair.drafter is not None
    return replace(pair.drafter.config, layout=ZLAB, num_target_layers=3, vocab_size=12)


def full_rounds(pair: Path, draft: Path, tmp_path: Path) -> list[Any]:
    """The trace of every prompt by full recomputation."""
    (tmp_path / "target").symlink_to(pair / "target")
    case = load(draft.parent)
    return [reference.dflash(case.target, case.drafter, case.config, prompt, NEW)[1] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("layouts"))


@pytest.fixture(scope="module")
def zlab(pair: Path) -> Pair:
    return load_pair(pair / "target", pair / "draft")


@pytest.fixture(scope="module")
def expected(zlab: Pair) -> list[Any]:
    return rounds(zlab)


@pytest.fixture(scope="module")
def whole_head(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The same drafter with copies of the target's head and embedding."""
    return load_pair(pair / "target", write_speculators(pair, tmp_path_factory.mktemp("whole")))


@pytest.fixture(scope="module")
def reduced(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of eight rows and an embedding, both of its own."""
    folder = tmp_path_factory.mktemp("reduced") / "draft"
    return write_speculators(pair, folder, rows=REDUCED, head=noise(8, 3), embedding=noise(12, 6))


@pytest.fixture(scope="module")
def reduced_pair(pair: Path, reduced: Path) -> Pair:
    return load_pair(pair / "target", reduced)


def noise(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("layout", [write_muse, write_model_optimizer])
def test_same_weights_in_another_layout(
    layout: Any, pair: Path, zlab: Pair, expected: list[Any], tmp_path: Path
) -> None:
    assert rounds(with_programs_of(zlab, load_pair(pair / "target", layout(pair, tmp_path)))) == expected


def test_a_copy_of_the_targets_head_drafts_as_that_does(whole_head: Pair, expected: list[Any]) -> None:
    assert {"lm_head.weight", "d2t"} <= whole_head.params["drafter"].keys()
    assert "embed_tokens.weight" not in whole_head.params["drafter"]  # it is the target's, bit for bit
    assert rounds(whole_head) == expected


def test_windows_of_the_layouts(pair: Path, tmp_path: Path) -> None:
    """One window in three spellings. Muse's counts its edge in."""
    sliding = {"layer_types": ["sliding_attention"] * 2}
    layer = speculators_config()["transformer_layer_config"] | sliding
    layer |= {"use_sliding_window": True, "sliding_window": 6}
    folders = [
        write_muse(pair, tmp_path / "muse", sliding_window=5, **sliding),
        write_model_optimizer(pair, tmp_path / "optimizer", use_swa=True, swa_window_size=6, causal=False),
        write_speculators(
            pair, tmp_path / "speculators", transformer_layer_config=layer, sliding_window_non_causal=True
        ),
    ]
    for folder in folders:
        assert read_drafter_config(folder).layers == (DraftLayer(causal=False, window=6),) * 2


@pytest.mark.parametrize(
    ("layer", "top", "layers"),
    [
        (SLIDING, {}, (DraftLayer(True, 6), DraftLayer(False, None))),
        (SLIDING, {"sliding_window_non_causal": True}, (DraftLayer(False, 6), DraftLayer(False, None))),
        (SLIDING | {"sliding_window": None}, {}, (DraftLayer(False, None),) * 2),
        (SLIDING | {"use_sliding_window": False}, {}, (DraftLayer(False, None),) * 2),
        ({"layer_types": None}, SLIDING, (DraftLayer(True, 6), DraftLayer(False, None))),
    ],
)
def test_layers_of_speculators(layer: dict, top: dict, layers: tuple, tmp_path: Path) -> None:
    config = speculators_config(**top)
    fields = config["transformer_layer_config"] | layer
    if top is SLIDING:
        fields = {name: value for name, value in fields.items() if name not in SLIDING}
    write(tmp_path, config | {"transformer_layer_config": fields}, {"x": torch.ones(1)})
    assert read_drafter_config(tmp_path).layers == layers


def test_a_reduced_head_equals_full_recomputation(
    pair: Path, reduced: Path, reduced_pair: Pair, tmp_path: Path
) -> None:
    ours = rounds(reduced_pair)
    assert ours == full_rounds(pair, reduced, reduced.parent)
    proposed = {token for trace in ours for entry in trace for token in entry.proposed}
    assert len(proposed) > 3 and proposed <= set(REDUCED)
    assert all(len(trace) >= 3 for trace in ours)
    assert reduced_pair.params["drafter"]["embed_tokens.weight"].shape == (12, 32)


def test_the_head_of_the_target_never_replaces_its_own(
    pair: Path, whole_head: Pair, expected: list[Any], tmp_path: Path
) -> None:
    """Full vocabulary, other weights: other proposals, those of the oracle."""
    folder = write_speculators(pair, tmp_path / "draft", head=noise(12, 4))
    ours = rounds(with_programs_of(whole_head, load_pair(pair / "target", folder)))
    assert ours != expected
    assert ours == full_rounds(pair, folder, tmp_path)


def test_rows_stand_for_the_ids_that_d2t_gives(pair: Path, reduced_pair: Pair, tmp_path: Path) -> None:
    """Rows may be shuffled together with d2t; d2t alone renames every proposal of a first round."""
    shuffled = [REDUCED[i] for i in (3, 0, 7, 5, 1, 6, 2, 4)]
    head, embedding = noise(8, 3), noise(12, 6)
    order = [REDUCED.index(token) for token in shuffled]
    both = write_speculators(pair, tmp_path / "b", rows=shuffled, head=head[order], embedding=embedding)
    renamed = write_speculators(pair, tmp_path / "c", rows=shuffled, head=head, embedding=embedding)
    plain = rounds(reduced_pair)
    assert rounds(with_programs_of(reduced_pair, load_pair(pair / "target", both))) == plain
    names = dict(zip(REDUCED, shuffled, strict=True))
    other = rounds(with_programs_of(reduced_pair, load_pair(pair / "target", renamed)))
    for ours, theirs in zip(other, plain, strict=True):
        assert list(ours[0].proposed) == [names[token] for token in theirs[0].proposed]


def test_the_embedding_may_be_left_out(pair: Path, whole_head: Pair, expected: list[Any], tmp_path: Path) -> None:
    folder = write_speculators(pair, tmp_path)
    tensors = {name: t for name, t in tensors_of(folder).items() if name != "embed_tokens.weight"}
    write(folder, speculators_config(), tensors)
    assert rounds(with_programs_of(whole_head, load_pair(pair / "target", folder))) == expected


def test_a_head_of_its_own_in_bfloat16(pair: Path, tmp_path: Path) -> None:
    folder = write_speculators(pair, tmp_path, rows=REDUCED)
    params = load_pair(pair / "target", folder, dtype="bfloat16").params["drafter"]
    assert (str(params["lm_head.weight"].dtype), str(params["d2t"].dtype)) == ("bfloat16", "int32")


def test_training_refuses_a_head_of_its_own(pair: Path, tmp_path: Path) -> None:
    config, module = load_drafter(write_speculators(pair, tmp_path, rows=REDUCED), torch.float32)
    with pytest.raises(InputError, match="draft_vocab_size is 8; a drafter with a head of its own cannot be trained"):
        lower_drafter(module, config)


@pytest.mark.parametrize(
    ("d2t", "reason"),
    [
        (torch.tensor([-1, *[0] * 7]), r"d2t gives ids -1\.\.7; row \+ d2t\[row\] must be distinct ids 0\.\.11"),
        (torch.tensor([*[0] * 7, 5]), r"d2t gives ids 0\.\.12"),
        (torch.tensor([1, *[0] * 7]), "must be distinct"),
        (torch.tensor([2**32, *[0] * 7]), "d2t has values beyond 32 bits"),
        (torch.zeros(8), "d2t has dtype F32; only I32, I64 are read"),
        (torch.zeros(7, dtype=torch.int64), r"d2t has shape \[7\], but config.json asks for \[8\]"),
        (None, "tensor d2t is missing"),
    ],
)
def test_bad_tables_of_ids(d2t: torch.Tensor | None, reason: str, pair: Path, tmp_path: Path) -> None:
    folder = write_speculators(pair, tmp_path, rows=REDUCED)
    tensors = {name: tensor for name, tensor in tensors_of(folder).items() if name != "d2t"}
    write(folder, speculators_config(8), tensors if d2t is None else {**tensors, "d2t": d2t})
    with pytest.raises(InputError, match=reason):
        load_pair(pair / "target", folder)


def test_a_head_left_out_is_not_the_targets(pair: Path, tmp_path: Path) -> None:
    folder = write_speculators(pair, tmp_path)
    write(folder, speculators_config(), {k: t for k, t in tensors_of(folder).items() if k != "lm_head.weight"})
    with pytest.raises(InputError, match=r"tensor lm_head\.weight is missing"):
        load_pair(pair / "target", folder)
