"""Training DFlash 2's selector: its gradient, that nothing else moves, and that it learns.

Letters: R rows, A anchors, K drafts, C candidates.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import BYTES_PAIR, Loaded, golden_pair, second, write_drafter
from safetensors.numpy import load_file, save_file
from test_train_command import run_in, some_answers
from test_train_loop import HELD_OUT, TRAINING_PROMPTS, answers_of
from test_train_loss import ANCHORS, EXPONENTIAL, LENGTHS, USED, batch_of, eager_block, features_of, frozen_of

from bridge.views import Params, take_params
from torch_dflash import cli, generate, load_pair
from torch_dflash.config import Convolution, Selector
from torch_dflash.config_reader import read_drafter_config
from torch_dflash.models.drafter import Drafter
from torch_dflash.pair import load_drafter
from torch_dflash.train.batches import BatchPlan, Order, make_data
from torch_dflash.train.evaluate import figures
from torch_dflash.train.export import export
from torch_dflash.train.features import device_features
from torch_dflash.train.loop import train
from torch_dflash.train.loss import block_hidden, block_loss, lower_drafter, places_among, selector_loss
from torch_dflash.train.objective import ABSENT, Objective, Subset, Teacher
from torch_dflash.train.selector import PART, start_maps, stillness, tables, with_selector
from torch_dflash.train.start import trained_already, trainer_of
from torch_dflash.train.trainer import TrainPlan
from torch_dflash.train.warm_start import widened

SELECTOR = Selector(rank=5, top_k=4)


def second_of(tiny: Loaded) -> tuple[Any, Drafter, Params]:
    """The tiny v1 drafter with a selector, and maps of which none is zero."""
    config = with_selector(tiny.config, SELECTOR)
    _, first = load_drafter(tiny.folder / "draft", torch.float32)
    maps = start_maps(SELECTOR, 32, 0)
    rng = np.random.default_rng(8)
    moved = {name: value + jnp.asarray(rng.standard_normal(value.shape), jnp.float32) for name, value in maps.items()}
    return config, widened(first, config), moved


def eager_selector_loss(
    tiny: Loaded, drafter: Drafter, features: torch.Tensor, objective: Objective, allowed: list[int]
) -> torch.Tensor:
    """Block by block for torch's own autograd: the same candidates, scores and weights. allowed: the subset's ids."""
    ids = torch.from_numpy(np.array(batch_of(12).token_ids)).long()
    total, divisor, still = torch.zeros(()), 0.0, []
    for row, anchor in zip(*np.nonzero(USED), strict=True):
        at, end = int(ANCHORS[row, anchor]), int(LENGTHS[row])
        noise = torch.tensor([[int(ids[row, at]), *[tiny.config.mask_token_id] * 3]])
        hidden = eager_block(drafter, features[row], tiny.target.embed(noise), at)[:, 1:]
        losses, right = {}, []
        for k in range(3):
            near = tiny.target.logits(hidden)[0, k, allowed].topk(SELECTOR.top_k)
            near_ids = torch.tensor(allowed)[near.indices]
            before = torch.tensor([[[int(ids[row, min(at + k, 11)])]]])
            edges = drafter.edges(hidden[:, k : k + 1], before, near_ids[None, None])[0, 0, 0]
            if k == 0:
                still.append((edges - edges.mean()).pow(2).mean())
            scores = dict(zip(near_ids.tolist(), (near.values + edges).log_softmax(-1), strict=True))
            label = int(ids[row, min(at + k + 1, 11)])
            counts = at + k + 1 < end and label in scores
            right.append(float(scores[label].detach().exp()) if counts else None)
            if counts:
                soft = soft_loss(scores, *taught_at(row, at + k), -scores[label])
                losses[k] = objective.distill * soft - (1 - objective.distill) * scores[label]
        weights = eager_weights(objective, right)
        total = total + sum(weights[k] * loss for k, loss in losses.items())
        divisor += 1 if objective.weights == "dynamic" else sum(weights)
    return total / divisor + torch.stack(still).mean()


def taught_at(row: int, at: int) -> tuple[list[int], list[float]]:
    """What the teacher says behind token `at`: ids and log-probabilities, coded by their place."""
    return [(5 * row + 3 * at + n) % 12 for n in range(3)], [-0.3 - 0.1 * row - 0.2 * n * at for n in range(3)]


def soft_loss(scores: dict[int, torch.Tensor], ids: list[int], log_probs: list[float], hard: torch.Tensor):
    """Cross-entropy against those of the teacher's tokens that are candidates, or the hard one where none is."""
    known = {token: log_prob for token, log_prob in zip(ids, log_probs, strict=True) if token in scores}
    if not known:
        return hard
    shares = torch.tensor(list(known.values())).softmax(0)
    return -sum(share * scores[token] for share, token in zip(shares, known, strict=True))


def eager_weights(objective: Objective, right: list[float | None]) -> list[float]:
    """Of the guesses of one anchor; right: the probability of the right token, None where there is nothing to learn."""
    if objective.weights == "exponential":
        return [0.0 if p is None else float(np.exp(-k / objective.gamma)) for k, p in enumerate(right)]
    reached = np.cumprod([0.5 + 0.5 * (p or 0.0) for p in right])
    worth = [0.0 if p is None else float(r) for r, p in zip(reached, right, strict=True)]
    return [0.0 if p is None else sum(worth[k:]) for k, p in enumerate(right)]


SHUFFLED = [9, 0, 3, 7, 1, 11, 5, 4]


@pytest.mark.parametrize(
    ("objective", "allowed"),
    [(EXPONENTIAL, list(range(12))), (Objective("dynamic", 2.0, 0.5), SHUFFLED)],
    ids=["all ids", "shipped recipe, subset"],
)
def test_gradient_is_that_of_eager_torch(tiny: Loaded, objective: Objective, allowed: list[int]) -> None:
    """Of the tables, and through them of the maps."""
    config, module, maps = second_of(tiny)
    features, frozen = features_of(tiny), frozen_of(tiny)
    made = tables(maps, frozen.embedding)
    eager = widened(module, config)
    eager.load_state_dict({name: torch.from_numpy(np.array(v)) for name, v in made.items()}, strict=False)
    chosen = {name: p for name, p in eager.named_parameters() if name.startswith(PART)}
    assert chosen.keys() == made.keys()
    for parameter in chosen.values():
        parameter.requires_grad_(True)
    wanted = eager_selector_loss(tiny, eager, torch.from_numpy(features), objective, allowed)
    wanted.backward()
    lowered, params = lower_drafter(module, config), take_params(module)
    said = [[taught_at(row, at) for at in range(12)] for row in range(2)]
    teacher = Teacher(*(jnp.array([[at[part] for at in row] for row in said]) for part in (0, 1)))
    index = jnp.full(12, ABSENT).at[jnp.array(allowed)].set(jnp.arange(len(allowed)))
    subset = None if len(allowed) == 12 else Subset(jnp.array(allowed), index)
    data = frozen, jnp.asarray(features), batch_of(12), subset, teacher

    def of_tables(made: Params) -> jax.Array:
        return selector_loss(lowered, objective, params | made, *data)[0]

    value, gradient = jax.jit(jax.value_and_grad(of_tables))(made)
    np.testing.assert_allclose(value, wanted.item(), rtol=1e-5)
    for name, parameter in chosen.items():
        assert parameter.grad is not None and parameter.grad.abs().max() > 1e-3
        np.testing.assert_allclose(gradient[name], parameter.grad.numpy(), rtol=1e-3, atol=1e-5, err_msg=name)
    through = jax.jit(jax.grad(lambda maps: of_tables(tables(maps, frozen.embedding))))(maps)
    rows = torch.tensor(np.array(frozen.embedding))
    rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True))
    for kind in ("predecessor", "successor"):
        grad = chosen[f"{PART}{kind}_codebook"].grad
        np.testing.assert_allclose(through[f"{PART}{kind}_map"], (rows.T @ grad).numpy(), rtol=1e-3, atol=1e-4)
    place, directions = (torch.tensor(np.array(maps[PART + name])) for name in ("place_map", "directions"))
    grad = chosen[f"{PART}hidden_projection.weight"].grad
    for name, wanted in (("place_map", grad @ directions.T), ("directions", place.T @ grad)):
        np.testing.assert_allclose(through[PART + name], wanted.numpy(), rtol=1e-3, atol=1e-4)


def test_bfloat16_tables_have_a_gradient(tiny: Loaded) -> None:
    """Their rows are read as integers on a CPU, through which no gradient flows by itself."""
    config, module, maps = second_of(tiny)
    lowered, params = lower_drafter(module, config), take_params(module)
    features, frozen = jnp.asarray(features_of(tiny)), frozen_of(tiny)

    def loss(made: Params, dtype: Any) -> jax.Array:
        cast = {name: value.astype(dtype) for name, value in made.items()}
        return selector_loss(lowered, EXPONENTIAL, params | cast, frozen, features, batch_of(12), None)[0]

    made = tables(maps, frozen.embedding)
    narrow, wide = (jax.jit(jax.grad(lambda made, d=d: loss(made, d)))(made) for d in (jnp.bfloat16, jnp.float32))
    for name, value in wide.items():
        assert float(jnp.abs(narrow[name] - value).max()) < 0.05 * float(jnp.abs(value).max())


def test_a_joint_loss_is_the_sum(tiny: Loaded) -> None:
    """Of the drafter's own and the selector's; its measures are the selector's."""
    config, module, maps = second_of(tiny)
    lowered = lower_drafter(module, config)
    frozen = frozen_of(tiny)
    params = take_params(module) | tables(maps, frozen.embedding)
    data = params, frozen, jnp.asarray(features_of(tiny)), batch_of(12), None
    alone = block_loss(replace(lowered, edges=None), EXPONENTIAL, *data)[0]
    chosen, measures = selector_loss(lowered, EXPONENTIAL, *data)
    both, seen = block_loss(lowered, EXPONENTIAL, *data)
    np.testing.assert_allclose(both, alone + chosen, rtol=1e-6)
    np.testing.assert_array_equal(seen.acceptance, measures.acceptance)
    np.testing.assert_allclose(seen.loss, both)


def test_places_and_stillness() -> None:
    ids = jnp.array([[7, 3, 9]])
    assert places_among(jnp.array([[9, 7, 4]]), ids).tolist() == [[2, 0, ABSENT]]
    edges = jnp.array([[[1.0, 3.0], [5.0, 5.0], [0.0, 100.0]]])
    assert float(stillness(edges, jnp.array([[True, True, False]]))) == pytest.approx(0.5)


def test_a_new_selector_changes_nothing() -> None:
    """And it is all that training can reach; the exported folder is a DFlash 2 drafter."""
    pair = golden_pair("trained-bytes")
    config, first = load_drafter(BYTES_PAIR / "draft", torch.float32)
    wider = with_selector(config, SELECTOR)
    assert wider.convolution == Convolution(1, 128)
    plan = TrainPlan(selector=SELECTOR, compute="float32")
    data = make_data(some_answers(), 64)
    trainer, state = trainer_of(widened(first, wider), wider, pair.params["target"], data, plan, None, True)
    assert all(name.startswith(PART) for name in state.params)
    second = replace(
        pair, drafter=trainer.drafter, params=pair.params | {"drafter": trainer.whole(state.params)}, compiled=set()
    )
    old, new = (generate(p, HELD_OUT, 24, trace=True) for p in (pair, second))
    assert [list(r.trace or ()) for r in old] == [list(r.trace or ()) for r in new]


def test_the_command_adds_a_selector(tmp_path: Path) -> None:
    """All else stays, bit for bit in bfloat16."""
    shape = ["--start-from", str(BYTES_PAIR / "draft"), "--selector-rank", "6", "--selector-top-k", "3"]
    assert cli.main([*run_in(tmp_path / "run", some_answers(), shape), "--learning-rate", "0.01"]) == 0
    folder = tmp_path / "run" / "drafter"
    config = read_drafter_config(folder)
    assert config == replace(
        read_drafter_config(BYTES_PAIR / "draft"), selector=Selector(6, 3), convolution=Convolution(1, 128)
    )
    before, after = load_file(BYTES_PAIR / "draft" / "model.safetensors"), load_file(folder / "model.safetensors")
    new = after.keys() - before.keys()
    assert {name for name in new if not name.startswith("layers.")} == {
        f"{PART}{name}" for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
    }
    of_layers = {name.split(".", 2)[2] for name in new if name.startswith("layers.")}
    kernels = ("base_kernel", "kernel_projection.weight")
    assert of_layers == {f"{conv}.{name}" for conv in ("attention_conv", "mlp_conv") for name in kernels}
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value.astype(after[name].dtype), err_msg=name)
    assert np.abs(after[f"{PART}successor_codebook"].astype(np.float32)).max() > 0
    load_pair(BYTES_PAIR / "target", folder)


def test_a_drafter_that_has_one_is_trained_with_it_or_gets_another(tmp_path: Path) -> None:
    """--start-from a DFlash 2 drafter: everything moves; with --selector-rank nothing but the selector, which does not
    depend on the one that was there."""
    shape = ["--start-from", str(BYTES_PAIR / "draft"), "--selector-rank", "6"]
    assert cli.main([*run_in(tmp_path / "one", some_answers(), shape), "--learning-rate", "0.01"]) == 0
    made = tmp_path / "one" / "drafter"
    assert cli.main(run_in(tmp_path / "two", some_answers(), ["--start-from", str(made)])) == 0
    old, new = (load_file(folder / "model.safetensors") for folder in (made, tmp_path / "two" / "drafter"))
    for name in (
        f"{PART}successor_codebook",
        "layers.0.mlp.up_proj.weight",
        "layers.1.mlp_conv.kernel_projection.weight",
    ):
        assert (old[name] != new[name]).any(), name
    weights = []
    for name, start in (("three", made), ("four", tmp_path / "three" / "drafter")):
        again = run_in(tmp_path / name, some_answers(), ["--start-from", str(start), "--selector-rank", "6"])
        assert cli.main([*again, "--learning-rate", "0.01"]) == 0
        weights.append((tmp_path / name / "drafter" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != (made / "model.safetensors").read_bytes()


def test_a_selector_is_not_continued_on_other_weights(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Its checkpoint does not hold the drafter, which is read again from --start-from."""
    draft = shutil.copytree(BYTES_PAIR / "draft", tmp_path / "draft")
    command = run_in(tmp_path / "run", some_answers(), ["--start-from", str(draft), "--selector-rank", "6"])
    assert cli.main(command) == 0
    weights = load_file(draft / "model.safetensors")
    save_file(weights | {"norm.weight": weights["norm.weight"] * 2}, draft / "model.safetensors")
    assert cli.main(command) == 2
    printed = capsys.readouterr().err
    assert f"was trained on top of other weights than those of --start-from {draft}; put those back" in printed
    assert "Traceback" not in printed


def test_more_candidates_than_tokens(tiny: Loaded, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Refused for a target with fewer tokens; where the loss of a step runs over fewer, all of them are candidates."""
    shape = ["--layers", "1", "--taps", "2", "--block-size", "4", "--selector-rank", "6", "--selector-top-k", "265"]
    command = run_in(tmp_path / "run", some_answers(), shape)
    answers = tmp_path / "run" / "answers.jsonl"
    answers.unlink()
    for options, message in (
        ([], "--selector-top-k is 265: the target's vocab_size is 264, use at most that"),
        (
            ["--selector-rank", "129", "--selector-top-k", "4"],
            "--selector-rank is 129: the target's hidden_size is 128",
        ),
    ):
        assert cli.main([*command, *options]) == 2
        assert message in capsys.readouterr().err
        assert not answers.exists()  # found before any is written
    config, module, maps = second_of(tiny)
    lowered, frozen = lower_drafter(module, config), frozen_of(tiny)
    params = take_params(module) | tables(maps, frozen.embedding)
    few = Subset(jnp.array([1, 4, 7]), jnp.full(12, ABSENT).at[jnp.array([1, 4, 7])].set(jnp.arange(3)))
    loss, _ = selector_loss(lowered, EXPONENTIAL, params, frozen, jnp.asarray(features_of(tiny)), batch_of(12), few)
    assert np.isfinite(loss)


def test_a_new_drafter_may_have_one(tmp_path: Path) -> None:
    shape = ["--layers", "1", "--taps", "2", "--block-size", "4", "--selector-rank", "6"]
    assert cli.main(run_in(tmp_path / "run", some_answers(), shape)) == 0
    config = read_drafter_config(tmp_path / "run" / "drafter")
    assert config.selector == Selector(6, 16) and config.block_size == 4


def test_a_selector_learns(tmp_path: Path) -> None:
    """The byte pair's drafter keeps more of what it drafts, on prompts that were not trained on."""
    pair = golden_pair("trained-bytes")
    config, first = trained_already(str(BYTES_PAIR / "draft"), pair.target.config)
    selector = Selector(16, 8)
    wider, plan = (
        with_selector(config, selector),
        TrainPlan(steps=80, learning_rate=3e-3, weights="dynamic", selector=selector, compute="float32"),
    )
    data, params = make_data(answers_of(pair, TRAINING_PROMPTS, 96, sampled=12), 128), pair.params["target"]
    trainer, state = trainer_of(widened(first, wider), wider, params, data, plan, None, True)
    store = device_features(pair.target, params, config.target_layer_ids, data)
    *_, (state, _) = train(trainer, state, Order(data, BatchPlan(rows=8, anchors=12, max_tokens=128)), store, 80)
    export(wider, trainer.whole(state.params), tmp_path)
    learnt = load_pair(BYTES_PAIR / "target", tmp_path)
    taus = [figures("held out", generate(p, HELD_OUT, 96)).tau for p in (pair, learnt)]
    assert taus[1] > 1.05 * taus[0], taus


def test_a_drafter_with_wider_kernels_is_trained_block_by_block(tmp_path: Path, tiny: Loaded) -> None:
    """In training the blocks of a text lie side by side; a convolution must not reach into the one before."""
    write_drafter(tmp_path, **second(input_embedding_scale=1.0, output_multiplier=1.0, final_logit_softcapping=None))
    config, module = load_drafter(tmp_path, torch.float32)
    _, eager = load_drafter(tmp_path, torch.float32)
    features, batch = features_of(tiny), batch_of(12)
    lowered, params = lower_drafter(module, config), take_params(module)
    hidden = block_hidden(
        lowered, params, frozen_of(tiny).embedding, jnp.asarray(features), batch.token_ids, batch.anchors
    )
    for row, anchor in zip(*np.nonzero(USED), strict=True):
        at = int(ANCHORS[row, anchor])
        noise = torch.tensor([[int(batch.token_ids[row, at]), *[config.mask_token_id] * 3]])
        alone = eager_block(eager, torch.from_numpy(features[row]), tiny.target.embed(noise), at)
        np.testing.assert_allclose(hidden[row, anchor], alone[0].detach(), atol=2e-5)
