"""Every layout of the same drafter gives the same proposals; a reduced head of its own equals full recomputation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Loaded, load, prompt_of
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
from torch_dflash.config import DraftLayer
from torch_dflash.config_reader import read_drafter_config
from torch_dflash.pair import load_drafter
from torch_dflash.train.loss import lower_drafter

PROMPTS = [prompt_of(n) for n in (5, 17, 70)]
NEW = 16
REDUCED = [0, 2, 3, 5, 7, 8, 9, 11]
BOTH_WAYS = {"is_causal": False, "use_sliding_window": True, "sliding_window": 6}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 6}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("layouts"))


def rounds(pair: Pair) -> list[Any]:
    return [result.trace for result in generate(pair, PROMPTS, NEW, trace=True, ignore_eos=True)]


def loaded(pair: Path, folder: Path) -> Loaded:
    """The pair's target with the drafter in `folder`."""
    (folder.parent / "target").symlink_to(pair / "target")
    return load(folder.parent)


def check_reference(case: Loaded) -> list[Any]:
    """Production equals the oracle in every round; returns the rounds."""
    ours = rounds(case.pair)
    for prompt, trace in zip(PROMPTS, ours, strict=True):
        assert trace == reference.dflash(case.target, case.drafter, case.config, prompt, NEW)[1]
        assert len(trace) >= 3
    return ours


@pytest.fixture(scope="module")
def expected(pair: Path) -> list[Any]:
    return rounds(load_pair(pair / "target", pair / "draft"))


@pytest.mark.parametrize("layout", [write_muse, write_model_optimizer, write_speculators])
def test_same_weights_in_another_layout(layout: Any, pair: Path, expected: list[Any], tmp_path: Path) -> None:
    assert rounds(load_pair(pair / "target", layout(pair, tmp_path))) == expected


def test_windows_of_the_layouts(tmp_path: Path) -> None:
    """One window in four spellings. Muse's counts its edge in."""
    zlab = write_pair(tmp_path / "pair", layer_types=["sliding_attention"] * 2, **BOTH_WAYS)
    expected = rounds(load_pair(zlab / "target", zlab / "draft"))
    assert expected != rounds(load_pair(zlab / "target", write_muse(zlab, tmp_path / "unbounded")))
    sliding = {"layer_types": ["sliding_attention"] * 2}
    folders = [
        write_muse(zlab, tmp_path / "muse", sliding_window=5, **sliding),
        write_model_optimizer(zlab, tmp_path / "optimizer", use_swa=True, swa_window_size=6, causal=False),
        write_speculators(zlab, tmp_path / "speculators", sliding_window_non_causal=True),
    ]
    config = speculators_config(sliding_window_non_causal=True)
    config["transformer_layer_config"] |= {**sliding, "use_sliding_window": True, "sliding_window": 6}
    write(folders[2], config, tensors_of(folders[2]))
    for folder in folders:
        assert read_drafter_config(folder).layers == (DraftLayer(causal=False, window=6),) * 2
        assert rounds(load_pair(zlab / "target", folder)) == expected


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


@pytest.mark.parametrize("own_embedding", [False, True])
def test_a_reduced_head_equals_full_recomputation(own_embedding: bool, pair: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    head = torch.randn(len(REDUCED), 32, generator=generator)
    embedding = torch.randn(12, 32, generator=generator) if own_embedding else None
    case = loaded(pair, write_speculators(pair, tmp_path / "draft", rows=REDUCED, head=head, embedding=embedding))
    ours = check_reference(case)
    proposed = {token for trace in ours for entry in trace for token in entry.proposed}
    assert len(proposed) > 3 and proposed <= set(REDUCED)
    assert ("embed_tokens.weight" in case.pair.params["drafter"]) is own_embedding
    assert case.pair.params["drafter"]["lm_head.weight"].shape == (8, 32)


def test_the_head_of_the_target_never_replaces_its_own(pair: Path, expected: list[Any], tmp_path: Path) -> None:
    """Full vocabulary, other weights: other proposals, those of the oracle."""
    head = torch.randn(12, 32, generator=torch.Generator().manual_seed(4))
    assert check_reference(loaded(pair, write_speculators(pair, tmp_path / "draft", head=head))) != expected


def test_rows_stand_for_the_ids_that_d2t_gives(pair: Path, tmp_path: Path) -> None:
    """Rows may be shuffled with d2t; d2t alone renames every proposal of a first round."""
    shuffled = [REDUCED[i] for i in (3, 0, 7, 5, 1, 6, 2, 4)]
    head = torch.randn(8, 32, generator=torch.Generator().manual_seed(5))
    order = [REDUCED.index(token) for token in shuffled]
    plain = rounds(load_pair(pair / "target", write_speculators(pair, tmp_path / "a", rows=REDUCED, head=head)))
    both = write_speculators(pair, tmp_path / "b", rows=shuffled, head=head[order])
    renamed = write_speculators(pair, tmp_path / "c", rows=shuffled, head=head)
    assert rounds(load_pair(pair / "target", both)) == plain
    names = dict(zip(REDUCED, shuffled, strict=True))
    for ours, theirs in zip(rounds(load_pair(pair / "target", renamed)), plain, strict=True):
        assert list(ours[0].proposed) == [names[token] for token in theirs[0].proposed]


def test_the_embedding_may_be_left_out(pair: Path, expected: list[Any], tmp_path: Path) -> None:
    folder = write_speculators(pair, tmp_path)
    tensors = {name: t for name, t in tensors_of(folder).items() if name != "embed_tokens.weight"}
    write(folder, speculators_config(), tensors)
    assert rounds(load_pair(pair / "target", folder)) == expected


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
