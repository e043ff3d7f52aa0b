"""A short sweep over drafters: one factor at a time around a base, with the same texts, order and blocks seen.

    python scripts/sweep.py RUN --prompts gsm8k_train.jsonl mbpp_train.jsonl --eval-prompts gsm8k.jsonl mbpp.jsonl

RUN holds everything and is gone on from: the answers, the features, and a folder for each variant with its checkpoint,
its log and, when it is finished, result.json. table.md and sweep.png are made from those.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bridge.views import Params
from torch_dflash.errors import InputError
from torch_dflash.pair import Pair, load_pair
from torch_dflash.train.answers import AnswerPlan, write_answers
from torch_dflash.train.batches import Batch, BatchPlan, Data, Order
from torch_dflash.train.checkpoint import write_atomically
from torch_dflash.train.evaluate import HeldOut, HeldOutPlan
from torch_dflash.train.features import FeatureStore, MappedStore, cache_features
from torch_dflash.train.loop import LOG, run, train
from torch_dflash.train.loss import block_hidden
from torch_dflash.train.objective import Frozen, Teacher, labels_behind
from torch_dflash.train.pipeline import TEACHER_SIZE
from torch_dflash.train.recipe import DrafterPlan, Recipe
from torch_dflash.train.records import read_answers, read_prompts
from torch_dflash.train.start import make_trainer, settled_config
from torch_dflash.train.texts import make_answers, prepare
from torch_dflash.train.trainer import Trainer, TrainPlan, TrainState
from torch_dflash.train.warm_start import default_taps

TIMED_STEPS = 8
SEEN = 7  # positions that all block sizes have


@dataclass(frozen=True)
class Variant:
    """What differs."""

    name: str = "base"
    layers: int = 3
    block_size: int = 8
    taps: int = 4
    weights: str = "exponential"
    distill: float = 0.0
    seed: int = 0


def variants(base: Variant) -> list[Variant]:
    """The base, the base with another seed, which shows the noise, and one change at a time."""
    some = [base, replace(base, name="base, seed 1", seed=1)]
    some.append(replace(base, name="D-PACE weights", weights="dynamic"))
    some.append(replace(base, name="distill 0.5", distill=0.5))
    some += [replace(base, name=f"{count} layers", layers=count) for count in (2, 4) if count != base.layers]
    some += [replace(base, name=f"B {size}", block_size=size) for size in (16,) if size != base.block_size]
    some += [replace(base, name=f"{count} taps", taps=count) for count in (3, 5) if count != base.taps]
    some += [replace(base, name=f"{count} layers", layers=count) for count in (5,) if count != base.layers]
    return some


@dataclass(frozen=True)
class Selected:
    """Some of the taps of a store: features of all tap sets are computed in one pass."""

    store: MappedStore
    columns: np.ndarray

    def gather(self, offsets: np.ndarray, width: int) -> np.ndarray:
        return self.store.gather(offsets, width)[..., self.columns]

    def teacher(self, offsets: np.ndarray, width: int) -> Teacher:
        return self.store.teacher(offsets, width)


def every_tap(pair: Pair, every: list[Variant]) -> tuple[int, ...]:
    """All layers that some variant taps."""
    return tuple(sorted({tap for each in every for tap in default_taps(pair.target.config.num_layers, each.taps)}))


def selected(pair: Pair, store: MappedStore, every: list[Variant], variant: Variant) -> Selected:
    """The features of a variant, out of those of every variant."""
    size, held = pair.target.config.block.hidden_size, every_tap(pair, every)
    at = [held.index(tap) for tap in every_tap(pair, [variant])]
    return Selected(store, np.concatenate([np.arange(size) + each * size for each in at]))


def measure(pair: Pair, data: Data, every: list[Variant], variant: Variant, args: argparse.Namespace) -> dict[str, Any]:
    """Train one variant and decode the held-out prompts with it."""
    folder = args.run / variant.name.replace(" ", "-").replace(",", "")
    folder.mkdir(exist_ok=True)
    if (folder / "result.json").exists():
        return json.loads((folder / "result.json").read_text())
    config = settled_config(pair, data, DrafterPlan(variant.layers, variant.block_size, variant.taps))
    all_taps = cache_features(pair.target, pair.params["target"], every_tap(pair, every), data, args.run, TEACHER_SIZE)
    store = selected(pair, all_taps, every, variant)
    plan = TrainPlan(steps=args.steps, weights=variant.weights, distill=variant.distill, seed=variant.seed)
    trainer, state = make_trainer(config, pair.params["target"], data, plan)
    order = Order(data, BatchPlan(args.rows, args.anchors, args.max_tokens, variant.seed))
    groups = {path.stem: read_prompts(path)[: args.eval_count] for path in args.eval_prompts}
    held_out = HeldOut(pair, HeldOutPlan(args.steps, groups, args.eval_tokens))
    state = run(trainer, state, order, store, folder, args.steps, held_out)
    lines = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    unseen, unseen_store = held_out_texts(pair, args.run / "held-out", every, args)
    result = asdict(variant) | {
        "steps": args.steps,
        "blocks": args.steps * args.rows * args.anchors,
        "parameters": sum(value.size for value in state.params.values()),
        "training_tau": [line["tau"] for line in lines if "tau" in line][-1],
        "held_out": lines[-1]["held_out"],
        "foresight": foresight(trainer, state.params, unseen, selected(pair, unseen_store, every, variant)),
        "cpu_seconds_per_step": step_seconds(trainer, state, order, store),
    }
    write_atomically(folder / "result.json", json.dumps(result).encode())
    return result


def held_out_texts(
    pair: Pair, folder: Path, every: list[Variant], args: argparse.Namespace
) -> tuple[Data, MappedStore]:
    """The target's answers to the held-out prompts, with the features of all tap sets."""
    folder.mkdir(exist_ok=True)
    prompts = [prompt for path in args.eval_prompts for prompt in read_prompts(path)[: args.eval_count]]
    plan = AnswerPlan(8, args.eval_tokens, max_prompt_tokens=args.max_tokens - args.eval_tokens)
    write_answers(pair, prompts, folder / "answers.jsonl", plan)
    data = prepare(read_answers(folder / "answers.jsonl"), args.max_tokens)
    return data, cache_features(pair.target, pair.params["target"], every_tap(pair, every), data, folder)


def foresight(trainer: Trainer, params: Params, data: Data, store: Selected) -> dict[str, float]:
    """Teacher-forced figures, less noisy than tau: every position of the held-out answers is an anchor once.

    loss: -log of the probability of the right token, of the whole vocabulary, a mean with the base's weights
    exp(-(k-1)/4) over k = 1..SEEN, whatever B is. tau: what a step would keep, at most 1 + SEEN.
    """

    def one(params: Params, frozen: Frozen, features: Array, batch: Batch) -> tuple[Array, Array, Array]:
        drafter = trainer.drafter
        hidden = block_hidden(drafter, params, frozen.embedding, features, batch.token_ids, batch.anchors)
        labels, inside = labels_behind(batch, SEEN)
        logits = (hidden[:, :, 1 : 1 + SEEN] @ frozen.head.T).astype(jnp.float32)
        loss = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        weights = inside * jnp.exp(-jnp.arange(SEEN) / 4)
        kept = jnp.cumprod((logits.argmax(axis=-1) == labels) & inside, axis=-1).sum(axis=-1)
        return (loss * weights).sum(), weights.sum(), (batch.used * (1 + kept)).sum()

    compiled = jax.jit(one)
    cast = {name: value.astype(trainer.plan.compute) for name, value in params.items()} | trainer.buffers
    sums, width, anchors = np.zeros(3), data.token_ids.shape[1], int((data.lengths - data.first_anchor).max())
    for row in range(len(data.lengths)):
        at = data.first_anchor[row] + np.arange(anchors)
        used = at < data.lengths[row] - 1
        batch = Batch(data.token_ids[[row]], data.lengths[[row]], np.where(used, at, 0)[None], used[None])
        sums += np.array(compiled(cast, trainer.frozen, store.gather(data.offsets[[row]], width), batch))
    return {"loss": sums[0] / sums[1], "tau": sums[2] / int((data.lengths - 1 - data.first_anchor).sum())}


def step_seconds(trainer: Trainer, state: TrainState, order: Order, store: FeatureStore) -> float:
    """CPU seconds of this process for a step: the median of a few more steps, so that compilations do not count."""
    seconds, begin = [], time.process_time()
    for moved, _ in train(trainer, state, order, store, int(state.step) + TIMED_STEPS):
        jax.block_until_ready(moved)
        seconds.append(time.process_time() - begin)
        begin = time.process_time()
    return statistics.median(seconds)


def table(results: list[dict[str, Any]]) -> str:
    """Markdown."""
    sets = list(results[0]["held_out"])
    head = ["variant", "M parameters", "CPU s a step", "loss", "tau, forced", *(f"tau, {name}" for name in sets)]
    rows = [[*head, "mean"], ["---"] * (len(head) + 1)]
    for result in results:
        taus = [result["held_out"][name]["tau"] for name in sets]
        shown = [f"{figure:.3f}" for figure in result["foresight"].values()]
        shown += [f"{tau:.2f}" for tau in (*taus, sum(taus) / len(taus))]
        rows.append(
            [result["name"], f"{result['parameters'] / 1e6:.1f}", f"{result['cpu_seconds_per_step']:.2f}", *shown]
        )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def picture(results: list[dict[str, Any]], path: Path) -> None:
    """Held-out tau of each variant, and its teacher-forced loss against the cost of a step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [result["name"] for result in results]
    sets = list(results[0]["held_out"])
    for number, name in enumerate(sets):
        at = [row + 0.38 * (number - (len(sets) - 1) / 2) for row in range(len(results))]
        left.barh(at, [result["held_out"][name]["tau"] for result in results], height=0.36, label=name)
    left.set(title="held-out tau, decoding", xlim=(1, None))
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    left.legend(fontsize=8)
    for result in results:
        point = result["cpu_seconds_per_step"], result["foresight"]["loss"]
        right.plot(*point, "o", color="tab:blue")
        right.annotate(result["name"], point, (4, 3), textcoords="offset points", fontsize=7)
    right.set(title="held-out loss, teacher-forced", xlabel="CPU seconds a step", ylabel="-log p, k = 1..7")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("run", type=Path)
    add("--prompts", nargs="+", type=Path, required=True)
    add("--eval-prompts", nargs="+", type=Path, required=True)
    add("--target", default="default")
    add("--layers", type=int, default=3, help="of the base (default: %(default)s)")
    add("--block-size", type=int, default=8, help="of the base (default: %(default)s)")
    add("--taps", type=int, default=4, help="of the base (default: %(default)s)")
    add("--limit", type=int, default=400, help="answers")
    add("--max-new-tokens", type=int, default=160)
    add("--max-tokens", type=int, default=256, help="longer texts are cut")
    add("--steps", type=int, default=200)
    add("--rows", type=int, default=8)
    add("--anchors", type=int, default=16)
    add("--eval-count", type=int, default=8)
    add("--eval-tokens", type=int, default=64)
    add("--only", nargs="+", help="names of variants")
    try:
        sweep(parser.parse_args())
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def sweep(args: argparse.Namespace) -> None:
    """All variants, or those asked for. Raises InputError."""
    args.run.mkdir(parents=True, exist_ok=True)
    pair = load_pair(args.target, None, "bfloat16")
    own = AnswerPlan(8, args.max_new_tokens, max_prompt_tokens=args.max_new_tokens, limit=args.limit)
    answers = make_answers(pair, [read_prompts(path) for path in args.prompts], Recipe(answers=own), args.run)
    data = prepare(answers, args.max_tokens)
    print(f"{len(data.lengths)} texts, {data.num_tokens} tokens", flush=True)
    results = []
    every = variants(Variant(layers=args.layers, block_size=args.block_size, taps=args.taps))
    every = [variant for variant in every if not args.only or variant.name in args.only]
    for variant in every:
        results.append(measure(pair, data, every, variant, args))
        (args.run / "table.md").write_text(table(results))
        picture(results, args.run / "sweep.png")
    print(table(results))


if __name__ == "__main__":
    raise SystemExit(main())
