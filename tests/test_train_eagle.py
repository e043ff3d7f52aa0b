"""Training an EAGLE-3 head: the gradient, that it is the decoding head that is trained, and one that really learns.

Letters: R rows, T text length, X feature width, D hidden size.
"""

from argparse import ArgumentParser
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from helpers import BYTES_PAIR, golden_pair, write_target
from safetensors.numpy import load_file
from test_eagle3 import DEPTH, PUBLIC_SHAPES, write_head
from test_train_loop import HELD_OUT, TRAINING_PROMPTS, answers_of
from test_train_loss import ANCHORS, LENGTHS, USED, batch_of, teacher_of
from torch import Tensor

from bridge.views import Params, take_params
from torch_dflash import Pair, cli, generate, load_pair
from torch_dflash.block import LIKELIEST
from torch_dflash.decode import make_state
from torch_dflash.errors import InputError
from torch_dflash.models.eagle3 import Eagle3
from torch_dflash.models.target import Target
from torch_dflash.pair import load_eagle3, load_target
from torch_dflash.propose_eagle import Eagle3Functions, lower_eagle3
from torch_dflash.reference_eagle import head_pass
from torch_dflash.state import Capacity
from torch_dflash.train.batches import Batch, BatchPlan, Order, make_data
from torch_dflash.train.command import add_arguments, recipe_of
from torch_dflash.train.eagle_loss import GAMMA, chain_hidden, chain_loss
from torch_dflash.train.evaluate import figures
from torch_dflash.train.export import export
from torch_dflash.train.features import device_features, signal_function
from torch_dflash.train.loop import train
from torch_dflash.train.objective import Frozen, Objective
from torch_dflash.train.recipe import Eagle3Plan
from torch_dflash.train.records import Answer
from torch_dflash.train.start import start
from torch_dflash.train.texts import frequent_ids
from torch_dflash.train.trainer import TrainPlan
from torch_dflash.train.warm_start_eagle import head_config

PASSES = 3
EXPONENTIAL = Objective("exponential", GAMMA)
TAPS = (0, 2, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target of eight layers with 12 ids, and a random head with rows for 9 of them."""
    made = tmp_path_factory.mktemp("train-eagle")
    write_target(made / "target", num_hidden_layers=DEPTH)
    write_head(made / "head")
    return made


def modules_of(folder: Path) -> tuple[Target, Eagle3]:
    config, target = load_target(folder / "target", torch.float32)
    return target, load_eagle3(folder / "head", config, torch.float32)[1]


def lowered_of(folder: Path) -> tuple[Eagle3Functions, Params]:
    target, _ = load_target(folder / "target", torch.float32)
    config, head = load_eagle3(folder / "head", target, torch.float32)
    return lower_eagle3(head, config), take_params(head)


def features_of(head: Eagle3) -> np.ndarray:
    return np.random.default_rng(4).standard_normal((2, 12, head.fc.in_features)).astype(np.float32)


def eager_logits(target: Target, head: Eagle3, features: Tensor, ids: Tensor, anchor: int, count: int) -> Tensor:
    """[count,V'] of one chain by itself: every pass reads the whole text and its own earlier outputs again."""
    hidden, guesses = head.fuse(features[None, :anchor]), []
    for k in range(count):
        out = head_pass(head, target.embed(ids[None, 1 : anchor + 1 + k]), hidden)
        hidden = torch.cat([hidden, out[:, -1:]], dim=1)
        guesses.append(head.logits(out[0, -1]))
    return torch.stack(guesses)


def eager_weights(objective: Objective, right: list[float], known: list[bool]) -> list[float]:
    """Of the passes of one chain; right: how probable the head finds each label."""
    if objective.weights == "exponential":
        return [0.8**k * has_row for k, has_row in enumerate(known)]
    reached = np.cumprod([0.5 * share + 0.5 for share in right]) * known
    return [float(reached[k:].sum()) * has_row for k, has_row in enumerate(known)]


def eager_guess(
    log_probs: Tensor, label: int, taught: dict[int, float], rows: dict[int, int], distill: float
) -> Tensor:
    """The loss of one guess [V'] whose label has a row. taught: the teacher's tokens and their log-probabilities."""
    hard = -log_probs[rows[label]]
    with_row = {token: share for token, share in taught.items() if token in rows}
    if not with_row:
        return hard
    shares = torch.tensor(list(with_row.values())).softmax(dim=0)
    soft = -(shares * log_probs[[rows[token] for token in with_row]]).sum()
    return (1 - distill) * hard + distill * soft


def eager_loss(target: Target, head: Eagle3, features: Tensor, batch: Batch, objective: Objective) -> Tensor:
    """The same loss, one chain after the other, for torch's own autograd."""
    ids = torch.from_numpy(np.array(batch.token_ids)).long()
    rows = {row + int(offset): row for row, offset in enumerate(head.d2t)}
    teacher_ids, teacher_shares = (np.array(held) for held in jax.tree.leaves(teacher_of(12)))
    total, divisor = torch.zeros(()), 0.0
    for row, number in zip(*np.nonzero(USED), strict=True):
        anchor = int(ANCHORS[row, number])
        labels = ids[row, anchor + 1 : min(anchor + 1 + PASSES, int(LENGTHS[row]))].tolist()
        log_probs = eager_logits(target, head, features[row], ids[row], anchor, len(labels)).log_softmax(dim=-1)
        known = [label in rows for label in labels]
        right = [float(log_probs[k, rows[x]].detach().exp()) if known[k] else 0.0 for k, x in enumerate(labels)]
        weights = eager_weights(objective, right, known)
        for k, label in enumerate(labels):
            if known[k]:
                at = row, anchor + k
                taught = dict(zip(teacher_ids[at].tolist(), teacher_shares[at].tolist(), strict=True))
                total = total + weights[k] * eager_guess(log_probs[k], label, taught, rows, objective.distill)
        divisor += sum(weights) if objective.weights == "exponential" else 1
    return total / divisor


@pytest.mark.parametrize("objective", [EXPONENTIAL, Objective("dynamic", GAMMA), Objective("exponential", GAMMA, 0.3)])
def test_gradient_is_that_of_eager_torch(folder: Path, objective: Objective) -> None:
    """Of a batch some of whose labels have no row."""
    target, head = modules_of(folder)
    batch, features = batch_of(12), features_of(head)
    wanted = eager_loss(target, head.requires_grad_(True), torch.from_numpy(features), batch, objective)
    wanted.backward()
    lowered, params = lowered_of(folder)
    trained, d2t = {n: v for n, v in params.items() if n != "d2t"}, {"d2t": params["d2t"]}
    frozen = Frozen(jnp.asarray(target.embed_tokens.weight.detach().numpy()), None)

    def loss(trained: Params) -> jax.Array:
        data = jnp.asarray(features), batch, None, teacher_of(12) if objective.distill else None
        return chain_loss(lowered, objective, PASSES, trained | d2t, frozen, *data)[0]

    value, gradient = jax.jit(jax.value_and_grad(loss))(trained)
    np.testing.assert_allclose(value, wanted.item(), rtol=1e-5)
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None
        np.testing.assert_allclose(gradient[name], parameter.grad.numpy(), rtol=1e-3, atol=1e-5, err_msg=name)


def test_padding_and_unused_anchors_change_nothing(folder: Path) -> None:
    _, head = modules_of(folder)
    batch, features = batch_of(12), features_of(head)
    lowered, params = lowered_of(folder)
    frozen = Frozen(load_pair(folder / "target", None).params["target"]["embed_tokens.weight"], None)
    spoiled = replace(batch, token_ids=batch.token_ids.at[1, 7:].set(3), anchors=batch.anchors.at[1, 2].set(0))
    garbage = features.copy()
    garbage[1, 7:] = 1e3
    loss = jax.jit(partial(chain_loss, lowered, EXPONENTIAL, PASSES))
    one, first = loss(params, frozen, jnp.asarray(features), batch, None)
    two, second = loss(params, frozen, jnp.asarray(garbage), spoiled, None)
    np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(first.tau, second.tau)


def test_a_label_without_a_row_is_a_wrong_guess_and_no_loss(folder: Path) -> None:
    """The head has no row for 2: where it comes, the step ends."""
    lowered, params = lowered_of(folder)
    frozen = Frozen(load_pair(folder / "target", None).params["target"]["embed_tokens.weight"], None)
    features = jnp.asarray(features_of(modules_of(folder)[1]))
    batch = replace(batch_of(12), token_ids=jnp.full((2, 12), 2, jnp.int32))
    loss = jax.jit(partial(chain_loss, lowered, EXPONENTIAL, PASSES))
    value, measures = loss(params, frozen, features, batch, None)
    assert (value, measures.tau) == (0, 1)
    np.testing.assert_array_equal(measures.accuracy, np.zeros(PASSES))


def test_training_sees_the_passes_that_decoding_sees(folder: Path) -> None:
    """Text, features, embeddings, positions, earlier outputs: on a text that goes on as the head drafts, the logits of
    pass k are those from which the proposer took draft k + 1."""
    pair = load_pair(folder / "target", folder / "head")
    assert isinstance(pair.drafter, Eagle3Functions)
    seen: list[np.ndarray] = []

    def recorded(params: Params, hidden: Any) -> Any:
        logits = head.logits(params, hidden)
        jax.debug.callback(lambda value: seen.append(np.asarray(value)), logits, ordered=True)
        return logits

    head, (target, params) = pair.drafter, (pair.target, pair.params)
    proposer = replace(pair.proposer("eagle3", 4), head=replace(head, logits=recorded))
    text, anchors = np.random.default_rng(1).integers(0, 12, 24), (5, 11, 17)
    features_at = signal_function(target, head.config.target_layer_ids)
    prefill, propose = jax.jit(proposer.prefill), jax.jit(partial(proposer.draft, guess=LIKELIEST))
    for anchor in anchors:
        ids = jnp.asarray(text[None], jnp.int32)
        features = features_at(params["target"], ids)[0]
        state = make_state(target, proposer, Capacity.whole(1, 1, 32), pair.dtype)
        tables, zero, num_new = jnp.array([[1]], jnp.int32), jnp.array([0], jnp.int32), jnp.array([anchor], jnp.int32)
        draft = prefill(params, state.draft, tables, features, jnp.roll(ids, -1, axis=1), zero, num_new)
        state = replace(state, draft=draft, anchor=ids[0, anchor : anchor + 1], committed_len=num_new, budget=zero + 9)
        seen.clear()
        drafts = propose(params, state, tables)[0][0]
        jax.effects_barrier()
        ids = ids.at[0, anchor + 1 : anchor + 5].set(drafts)
        batch = Batch(ids, jnp.array([24]), jnp.array([[anchor]]), jnp.array([[True]]))
        embedding = params["target"]["embed_tokens.weight"]
        hidden = jax.jit(partial(chain_hidden, head, num_passes=4))(params["drafter"], embedding, features, batch)
        trained = jax.jit(head.logits)(params["drafter"], hidden[0, 0])
        np.testing.assert_allclose(trained, np.concatenate(seen), rtol=1e-4, atol=1e-5)
        guesses = head.target_ids(params["drafter"], trained.argmax(axis=-1).astype(jnp.int32))
        assert guesses.tolist() == drafts.tolist()


def test_a_byte_level_head_learns_and_is_read_back(tmp_path: Path) -> None:
    """Exported under yuhuili's names; what is loaded proposes what was trained."""
    pair = golden_pair("trained-bytes")
    data = make_data(answers_of(pair, TRAINING_PROMPTS, 96, sampled=12), 128)
    plan = TrainPlan(steps=80, learning_rate=2e-3, compute="float32", ttt_length=PASSES)
    trainer, state = start(pair, data, Eagle3Plan(draft_vocab_size=60, taps=TAPS), plan)
    untrained = {name: value.copy() for name, value in (state.params | trainer.buffers).items()}
    order = Order(data, BatchPlan(rows=8, anchors=12, max_tokens=128))
    store = device_features(pair.target, pair.params["target"], TAPS, data)
    *_, (state, _) = train(trainer, state, order, store, plan.steps)
    export(trainer.drafter.config, state.params | trainer.buffers, tmp_path)

    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == PUBLIC_SHAPES.keys() | {"t2d"}
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (np.int64, bool)
    kept = np.arange(len(tensors["d2t"])) + tensors["d2t"]
    assert np.flatnonzero(tensors["t2d"]).tolist() == kept.tolist() == frequent_ids(data, 60).tolist()
    learnt = load_pair(BYTES_PAIR / "target", tmp_path)
    assert isinstance(learnt.drafter, Eagle3Functions)
    assert learnt.drafter.config == trainer.drafter.config
    rounded = {n: v.astype(ml_dtypes.bfloat16).astype(jnp.float32) for n, v in state.params.items()} | trainer.buffers
    own = replace(learnt, drafter=trainer.drafter, params=learnt.params | {"drafter": rounded}, compiled=set())
    before = replace(learnt, params=learnt.params | {"drafter": untrained})
    read, trained, fresh = (generate(p, HELD_OUT, 64, trace=True) for p in (learnt, own, before))
    assert [result.trace for result in read] == [result.trace for result in trained]
    assert figures("before", fresh).tau < 1.3
    assert figures("learnt", read).tau > 1.9


def test_arguments_make_a_recipe() -> None:
    """The unrolling is part of what a checkpoint must agree with; a DFlash drafter's has none."""
    parser = ArgumentParser()
    add_arguments(parser)
    prompts = ["a.jsonl", "--out", "run"]
    recipe = recipe_of(parser.parse_args([*prompts, "--method", "eagle3"]))
    assert (recipe.drafter, recipe.training) == (Eagle3Plan(), TrainPlan(ttt_length=7))
    own = ["--ttt-length", "3", "--draft-vocab-size", "99", "--tap-layers", "0", "2", "4"]
    recipe = recipe_of(parser.parse_args([*prompts, "--method", "eagle3", *own]))
    assert (recipe.drafter, recipe.training) == (Eagle3Plan(99, TAPS), TrainPlan(ttt_length=3))
    assert recipe_of(parser.parse_args(prompts)).training == TrainPlan()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "eagle3", "--layers", "3"], "--layers is 3: it has no meaning for --method eagle3, leave it out"),
        (["--method", "eagle3", "--block-size", "8"], "--block-size is 8: it has no meaning for --method eagle3"),
        (["--method", "eagle3", "--taps", "3"], "--taps is 3: it has no meaning for --method eagle3"),
        (["--method", "eagle3", "--mask-token-id", "0"], "--mask-token-id is 0: it has no meaning for --method eagle3"),
        (["--ttt-length", "7"], "--ttt-length is 7: it has no meaning for --method dflash, leave it out"),
        (["--draft-vocab-size", "9"], "--draft-vocab-size is 9: it has no meaning for --method dflash"),
        (["--method", "eagle3", "--ttt-length", "0"], "--ttt-length is 0: use an integer >= 1"),
        (["--method", "eagle3", "--draft-vocab-size", "0"], "--draft-vocab-size is 0: use an integer >= 1"),
        (["--method", "medusa"], "invalid choice: 'medusa'"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture, arguments: list[str], message: str
) -> None:
    assert cli.main(["train", "prompts.jsonl", "--out", str(tmp_path / "run"), *arguments]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_taps_that_do_not_fit_are_refused() -> None:
    pair: Pair = golden_pair("trained-bytes")
    target = pair.target.config
    assert head_config(replace(target, num_layers=30), (), 9).target_layer_ids == (1, 14, 26)
    for taps, shown in (((), "1 2 2"), ((0, 1), "0 1"), ((0, 2, 6), "0 2 6"), ((0, 2, 2), "0 2 2")):
        with pytest.raises(InputError, match=f"--tap-layers {shown}: an EAGLE-3 head taps 3 different layers 0..5"):
            head_config(target, taps, 9)


def test_rows_are_the_answers_most_frequent_ids() -> None:
    """Not the prompts'; of equally frequent ones the lower; none that does not occur."""
    data = make_data([Answer(0, (1, 1, 1, 1), (7, 5, 5, 9, 3)), Answer(1, (1, 1), (9, 5, 9, 8), num_sampled=1)], 16)
    assert frequent_ids(data, 3).tolist() == [3, 5, 9]
    assert frequent_ids(data, 99).tolist() == [3, 5, 7, 8, 9]
