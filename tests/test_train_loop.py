"""Training runs: bit-exact resume, full disks, meshes, export, and a byte-level drafter that really learns."""

import errno
import json
import os
from argparse import ArgumentParser
from dataclasses import asdict, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import BYTES_PAIR, golden_pair
from safetensors.numpy import load_file
from test_dispatch import compilations

from torch_dflash import Result, generate, load_pair
from torch_dflash.config import Selector
from torch_dflash.config_reader import read_drafter_config
from torch_dflash.errors import InputError
from torch_dflash.metrics import Stats, tau
from torch_dflash.pair import Pair
from torch_dflash.train import checkpoint
from torch_dflash.train.batches import BatchPlan, Order, make_data
from torch_dflash.train.bulk import BulkPlan, Opening, bulk_answers
from torch_dflash.train.checkpoint import load_state, save_state
from torch_dflash.train.command import add_arguments, recipe_of
from torch_dflash.train.evaluate import HeldOut, HeldOutPlan, figures, make_held_out
from torch_dflash.train.export import export
from torch_dflash.train.features import FeatureStore, device_features
from torch_dflash.train.loop import CHECKPOINT, LOG, run, train, trim_log
from torch_dflash.train.plot import held_out_curves, plot_log
from torch_dflash.train.records import Answer
from torch_dflash.train.start import gamma_of, make_trainer
from torch_dflash.train.texts import free_mask_id
from torch_dflash.train.trainer import Trainer, TrainPlan, TrainState
from torch_dflash.train.warm_start import drafter_config

MASK = 257
TAPS = (1, 3)
TRAINING_PROMPTS = [
    f"def {verb}_{noun}(" for verb in ("get", "set", "add", "make", "is") for noun in ("name", "x", "item")
]
HELD_OUT = ["def remove_node(", "class Reader(", "def test_parse(self"]


def answers_of(pair: Pair, prompts: list[str], length: int, sampled: int = 0) -> list[Answer]:
    """Answers to each prompt, eight of them with openings of their own."""
    some = [Opening(i, tuple(p.encode()), sampled * min(n, 1)) for i, p in enumerate(prompts) for n in range(8)]
    plan = BulkPlan(len(some), 24, length)
    return [a for batch in bulk_answers(pair.target, pair.params["target"], some, plan, (256,), 0) for a in batch]


def trainer_of(
    pair: Pair, answers: list[Answer], plan: TrainPlan, batches: BatchPlan
) -> tuple[Trainer, TrainState, Order, FeatureStore]:
    data, params = make_data(answers, batches.max_tokens), pair.params["target"]
    config = drafter_config(pair.target.config, 2, 8, MASK, TAPS)
    trainer, state = make_trainer(config, params, data, plan)
    return trainer, state, Order(data, batches), device_features(pair.target, params, TAPS, data)


@pytest.fixture(scope="module")
def small() -> tuple[Trainer, TrainState, Order, FeatureStore]:
    """A run that costs little. Tests must not donate its state: they copy."""
    pair = golden_pair("trained-bytes")
    rng = np.random.default_rng(0)
    answers = [Answer(i, (40, 41), tuple(int(x) for x in rng.integers(97, 105, 30))) for i in range(12)]
    plan = TrainPlan(steps=6, negatives=4, log_every=2, save_every=3, compute="float32")
    return trainer_of(pair, answers, plan, BatchPlan(rows=2, anchors=3, max_tokens=64))


def copy(state: TrainState) -> TrainState:
    return jax.tree.map(lambda x: x.copy(), state)


def assert_same(one: TrainState, two: TrainState) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_killed_run_goes_on_bit_for_bit(small, tmp_path: Path):
    trainer, state, order, store = small
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    wanted = run(trainer, copy(state), order, store, whole, 6)
    run(trainer, copy(state), order, store, killed, 6)
    for number, (held, _) in enumerate(train(trainer, copy(state), order, store, 6), 1):
        if number == 3:  # as if killed between step 4's log line and the next checkpoint
            save_state(killed / CHECKPOINT, held, {"step": 3, "plan": asdict(trainer.plan)})
            break
    assert_same(run(trainer, copy(state), order, store, killed, 6), wanted)
    assert_same(load_state(killed / CHECKPOINT, state)[0], wanted)
    logs = [[json.loads(line) | {"seconds": 0} for line in (f / LOG).read_text().splitlines()] for f in (whole, killed)]
    assert logs[0] == logs[1]
    assert [line["step"] for line in logs[0]] == [2, 3, 4, 6]
    unlike = replace(
        copy(state), step=state.step + 3
    )  # what no training came to: a run from the start would not see it
    save_state(killed / CHECKPOINT, unlike, {"step": 3, "plan": asdict(trainer.plan)})
    other = run(trainer, copy(state), order, store, killed, 6)
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(wanted), strict=True))


def test_a_full_disk_leaves_the_checkpoint_before(small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer, state, order, store = small
    save_state(tmp_path / CHECKPOINT, state, {"step": 0, "plan": asdict(trainer.plan)})
    before = (tmp_path / CHECKPOINT).read_bytes()

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(InputError, match=r"step 3 cannot be written \(No space left"):
        run(trainer, copy(state), order, store, tmp_path, 6)
    assert (tmp_path / CHECKPOINT).read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {CHECKPOINT, LOG}


@pytest.fixture(scope="module")
def watched(small, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, HeldOut, TrainState]:
    """The small run with two held-out sets, decoded at steps 4 and 6."""
    trainer, state, order, store = small
    plan = HeldOutPlan(4, {"some": HELD_OUT[:2], "other": HELD_OUT[1:]}, 12)
    held_out = make_held_out(replace(golden_pair("trained-bytes"), drafter=None, compiled=set()), plan)
    assert held_out is not None
    folder = tmp_path_factory.mktemp("watched")
    return folder, held_out, run(trainer, copy(state), order, store, folder, 6, held_out)


def test_held_out_figures_are_those_of_decoding(small, watched):
    """The last ones in the log are what the drafter of the last step does."""
    trainer, _, _, _ = small
    folder, held_out, state = watched
    lines = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    kinds = [(line["step"], "held_out" in line) for line in lines]
    assert kinds == [(2, False), (3, False), (4, False), (4, True), (6, False), (6, True)]
    pair = golden_pair("trained-bytes")
    params = {name: np.asarray(value) for name, value in (state.params | trainer.buffers).items()}
    fresh = replace(pair, drafter=trainer.drafter, params=pair.params | {"drafter": jax.tree.map(jnp.asarray, params)})
    for name, prompts in held_out.plan.groups.items():
        wanted = figures(name, generate(fresh, prompts, 12))
        assert lines[-1]["held_out"][name] == json.loads(json.dumps(asdict(wanted)))
        assert wanted.new_tokens == 12 * len(prompts)
    assert len(lines[0]["acceptance"]) == 7
    assert lines[0]["tau"] == pytest.approx(1 + sum(lines[0]["acceptance"]), abs=1e-3)


def test_evaluation_compiles_once(small, watched):
    """Another step's parameters run through what is compiled."""
    trainer, _, _, _ = small
    _, held_out, state = watched
    params = {name: np.asarray(value) / 2 for name, value in state.params.items()} | trainer.buffers
    with compilations() as seen:
        held_out(trainer.drafter, params)
    assert seen == []


def test_a_held_out_prompt_must_fit(small):
    pair = golden_pair("trained-bytes")
    long = "x" * (pair.target.config.context_limit + 1)
    with pytest.raises(InputError, match=r"held-out prompt of some has \d+ tokens"):
        make_held_out(pair, HeldOutPlan(4, {"some": [long]}))


def test_damaged_and_foreign_checkpoints_are_named(small, tmp_path: Path):
    trainer, state, order, store = small
    path = tmp_path / CHECKPOINT
    path.write_bytes(b"nothing")
    with pytest.raises(InputError, match="is damaged"):
        load_state(path, state)
    save_state(path, {"other": np.zeros(3)}, {})
    with pytest.raises(InputError, match="belongs to another drafter"):
        load_state(path, state)
    narrow = replace(state, params=state.params | {"fc.weight": state.params["fc.weight"][:, 1:]})
    save_state(path, narrow, {})
    with pytest.raises(InputError, match="belongs to another drafter"):
        load_state(path, state)
    save_state(path, state, {"step": 0, "plan": asdict(replace(trainer.plan, weights="dynamic", save_every=1))})
    with pytest.raises(InputError, match=r"trained with weights dynamic \(now exponential\); use the same options"):
        run(trainer, state, order, store, tmp_path, 6)


def test_a_half_written_log_line_is_dropped(tmp_path: Path):
    path = tmp_path / LOG
    path.write_text('{"step": 2}\n{"step": 4}\n{"step": 6, "lo')
    trim_log(path, 3)
    assert path.read_text() == '{"step": 2}\n'


def test_an_exported_drafter_has_z_labs_names_and_loads(small, tmp_path: Path):
    trainer, state, _, _ = small
    config = trainer.drafter.config
    export(config, state.params, tmp_path, 256)
    assert read_drafter_config(tmp_path) == config
    tensors = load_file(tmp_path / "model.safetensors")
    block = [
        *(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")),
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    ]
    names = {"fc.weight", "hidden_norm.weight", "norm.weight"} | {f"layers.{i}.{n}" for i in range(2) for n in block}
    assert tensors.keys() == names == load_file(BYTES_PAIR / "draft" / "model.safetensors").keys()
    for name, value in tensors.items():
        assert value.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(value, np.asarray(state.params[name]).astype(ml_dtypes.bfloat16))
    held = load_pair(BYTES_PAIR / "target", tmp_path).params["drafter"]
    assert held.keys() == state.params.keys() | trainer.buffers.keys()


def test_a_byte_level_drafter_learns(tmp_path: Path):
    pair = golden_pair("trained-bytes")
    answers = answers_of(pair, TRAINING_PROMPTS, 96, sampled=12)
    plan = TrainPlan(steps=110, learning_rate=2e-3, negatives=64, compute="float32")
    trainer, state, order, store = trainer_of(pair, answers, plan, BatchPlan(rows=8, anchors=12, max_tokens=128))
    untrained = {name: value.copy() for name, value in (state.params | trainer.buffers).items()}
    *_, (state, _) = train(trainer, state, order, store, plan.steps)
    export(trainer.drafter.config, state.params, tmp_path)
    learnt = load_pair(BYTES_PAIR / "target", tmp_path)
    before = replace(learnt, params=learnt.params | {"drafter": untrained})
    taus = [figures("held out", generate(p, HELD_OUT, 64)).tau for p in (before, learnt)]
    assert taus[0] < 1.5
    assert taus[1] > 2.0


def test_figures_count_as_the_glossary_says():
    def result(new_tokens: int, steps: int, histogram: tuple[int, ...]) -> Result:
        each = Stats(5, new_tokens, steps, tau(new_tokens, steps), histogram, 0, 0, 0, 0)
        return Result((1,) * new_tokens, None, "length", each, None, None, None)

    got = figures("set", [result(7, 3, (1, 1, 1)), result(5, 1, (0, 0, 1)), result(1, 0, (0, 0, 0))])
    assert (got.prompts, got.new_tokens, got.steps) == (3, 12, 4)
    assert got.tau == (6 + 4) / 4
    assert got.mean_tau == (6 / 3 + 4 / 1) / 2
    assert got.acceptance == (3 / 4, 2 / 4)


def test_mask_token_must_be_free():
    pair = golden_pair("trained-bytes")
    data = make_data([Answer(0, (1, 2), (3, 4, 5))], 16)
    assert free_mask_id(pair, data) not in (1, 2, 3, 4, 5, 256)
    every = make_data([Answer(0, (1, 2), tuple(range(256, 264)))], 16)
    with pytest.raises(InputError, match="--mask-token-id"):
        free_mask_id(pair, every)
    with pytest.raises(InputError, match="outside the vocabulary"):
        drafter_config(pair.target.config, 2, 8, 264, TAPS)


def test_arguments_make_a_recipe():
    parser = ArgumentParser()
    add_arguments(parser)
    recipe = recipe_of(parser.parse_args(["a.jsonl", "--out", "run", "--block-size", "16", "--accelerator"]))
    assert recipe.drafter.block_size == 16
    assert recipe.training == replace(TrainPlan(), negatives=None)
    assert gamma_of(16) == 7
    assert gamma_of(8) == 4


def test_the_picture_of_a_run(watched, tmp_path: Path):
    folder, _, _ = watched
    lines = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    curves = held_out_curves(lines)
    assert {name: [step for step, _ in curve] for name, curve in curves.items()} == {"some": [4, 6], "other": [4, 6]}
    assert curves["some"][-1][1] == lines[-1]["held_out"]["some"]["tau"]
    plot_log(folder / LOG, tmp_path / "log.png")
    assert (tmp_path / "log.png").read_bytes().startswith(b"\x89PNG")


def test_the_shipped_drafter_is_whole():
    folder = BYTES_PAIR.parent / "smollm2-135m-dflash"
    config = read_drafter_config(folder)
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (8, 16, (1, 10, 18, 27))
    tensors = load_file(folder / "model.safetensors")
    assert config.selector == Selector(rank=64, top_k=16)
    assert len(tensors) == 3 + 3 + (11 + 4) * len(config.layers)
    assert (folder / "model.safetensors").stat().st_size < 40e6
    assert all(np.isfinite(value.astype(np.float32)).all() for value in tensors.values())
