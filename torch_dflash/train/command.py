"""The arguments of `torch-dflash train`, and what it does with them."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_dflash.config import Selector
from torch_dflash.config_dflash2 import MOST_CANDIDATES
from torch_dflash.errors import InputError, checked_integer
from torch_dflash.train.answers import AnswerPlan
from torch_dflash.train.batches import BatchPlan
from torch_dflash.train.evaluate import HeldOutPlan
from torch_dflash.train.recipe import DrafterPlan, Eagle3Plan, Recipe
from torch_dflash.train.records import read_prompts
from torch_dflash.train.trainer import TrainPlan

COUNTS = (
    *("max_prompt_tokens", "max_new_tokens", "answer_rows", "rounds"),
    *("steps", "rows", "anchors", "save_every", "eval_count", "mesh"),
)
# Options of one method: what they set is not in the other. None where they are not given.
ONLY = {
    "dflash": ("layers", "block_size", "taps", "mask_token_id", "start_from", "selector_rank", "selector_top_k"),
    "eagle3": ("draft_vocab_size", "ttt_length"),
}
_SHAPE = ("layers", "block_size", "taps", "mask_token_id")  # --start-from has its own
_SIZES = ("layers", "block_size", "taps", "draft_vocab_size", "ttt_length")
TTT_LENGTH = 7  # of EAGLE's public training code
SELECTOR_TOP_K = 16  # of z-lab's checkpoints


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the subcommand; the defaults suit one CPU core, those for an accelerator are in the README."""
    add = parser.add_argument
    add("prompts", nargs="+", type=Path, metavar="PROMPTS", help='files of JSON lines, {"turns": [text, ...]}')
    add("--target", default="default", help="folder, hub id, or a shipped name (default: %(default)s)")
    add("--out", type=Path, required=True, help="folder of the run; an interrupted run goes on from it")
    add("--method", choices=tuple(ONLY), default="dflash", help="what is trained (default: %(default)s)")
    _add_shapes(parser)
    add("--limit", type=int, help="answer only so many prompts")
    longest = "longer prompts are left out, chat template included (default: %(default)s)"
    add("--max-prompt-tokens", type=int, default=256, help=longest)
    add("--max-new-tokens", type=int, default=256, help="longest answer (default: %(default)s)")
    add(
        "--sampled",
        type=float,
        metavar="SHARE",
        help=f"share of answers drawn at temperature 1 (default: 0; of later rounds {AnswerPlan.later_sampled})",
    )
    add("--answer-rows", type=int, default=32, help="answers written at a time (default: %(default)s)")
    add("--bulk", action="store_true", help="answers in batches of --answer-rows, quicker for hundreds of them")
    add("--accelerator", action="store_true", help="--bulk, features in device memory, loss over all ids")
    add("--invent", type=int, default=0, help="with --bulk: try so many prompts of the target's own")
    rounds = "with --bulk: answers to each prompt, after the first with varied openings"
    add("--rounds", type=int, default=1, help=rounds)
    add("--answer-tokens", type=float, default=float("inf"), help="with --bulk: stop answering at so many tokens")
    add("--steps", type=int, default=2000, help="training steps (default: %(default)s)")
    add("--train-seconds", type=float, help="instead of --steps: as many as fit, compilation included")
    add("--rows", type=int, default=16, help="texts of a step (default: %(default)s)")
    anchors = "positions of each text from which a step drafts (default: %(default)s)"
    add("--anchors", type=int, default=16, help=anchors)
    add("--learning-rate", type=float, default=6e-4, help="at its highest (default: %(default)s)")
    add("--gamma", type=float, help="decay of the loss weights (default: 4 for blocks of 8, 7 for 16, 4.5 for eagle3)")
    add(
        "--loss-weights",
        choices=("exponential", "dynamic"),
        default="exponential",
        help="of a block's positions: falling by --gamma, or D-PACE's, from what the drafter knows already "
        "(default: %(default)s)",
    )
    add(
        "--distill",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of the loss against the target's 8 likeliest tokens, beside its choice (default: %(default)s)",
    )
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of products (default: %(default)s)")
    add("--save-every", type=int, default=200, help="steps between checkpoints (default: %(default)s)")
    add("--eval-every", type=int, default=0, help="steps between real decoding of held-out prompts (default: never)")
    add("--eval-prompts", nargs="+", type=Path, default=(), metavar="FILE", help="held-out prompts, like PROMPTS")
    add("--eval-count", type=int, default=8, help="prompts of each of these files (default: %(default)s)")
    add("--eval-tokens", type=int, default=64, help="longest held-out answer (default: %(default)s)")
    add("--mesh", type=int, default=1, help="devices that share the rows of a step (default: %(default)s)")
    add("--seed", type=int, default=0)


def _add_shapes(parser: argparse.ArgumentParser) -> None:
    """What a drafter looks like; most of it is of one method."""
    add, dflash, head = parser.add_argument, DrafterPlan(), Eagle3Plan()
    add("--layers", type=int, help=f"dflash: drafter layers (default: {dflash.num_layers})")
    add("--block-size", type=int, help=f"dflash: tokens of a block, anchor included (default: {dflash.block_size})")
    add("--taps", type=int, help=f"dflash: tapped target layers (default: {dflash.num_taps})")
    start = "dflash: drafter to go on from, a folder, hub id or shipped name; its shape stays"
    add("--start-from", metavar="DRAFTER", help=start)
    rank = "dflash: with a new candidate selector of this rank, DFlash 2's; of --start-from all else stays"
    add("--selector-rank", type=int, metavar="N", help=rank)
    top_k = f"dflash: tokens of a position among which it chooses (default: {SELECTOR_TOP_K})"
    add("--selector-top-k", type=int, metavar="N", help=top_k)
    add("--tap-layers", type=int, nargs="+", default=(), help="which layers, instead of the method's own choice")
    add("--mask-token-id", type=int, help="dflash: default: the last special token that no text contains")
    rows = f"eagle3: rows of its head, the answers' most frequent tokens (default: {head.draft_vocab_size})"
    add("--draft-vocab-size", type=int, metavar="N", help=rows)
    passes = f"eagle3: passes that it is unrolled over, each on its own output (default: {TTT_LENGTH})"
    add("--ttt-length", type=int, metavar="N", help=passes)


def _drafter_plan(args: argparse.Namespace) -> DrafterPlan | Eagle3Plan:
    """The drafter's shape. Raises InputError for an option of the other method."""
    for method, names in ONLY.items():
        for name in names:
            option, value = f"--{name.replace('_', '-')}", vars(args)[name]
            if method != args.method and value is not None:
                raise InputError(f"{option} is {value}: it has no meaning for --method {args.method}, leave it out")
            if value is not None and name in _SHAPE and args.start_from is not None:
                raise InputError(f"{option} is {value}: the shape is that of --start-from, leave it out")
            if value is not None and name in _SIZES:
                least, why = (2, "the anchor and a draft") if name == "block_size" else (1, "")
                checked_integer(value, option, least, why=why)
    taps = tuple(args.tap_layers)
    if taps and args.start_from is not None:
        shown = " ".join(str(tap) for tap in taps)
        raise InputError(f"--tap-layers is {shown}: the taps are those of --start-from, leave it out")
    if args.method == "eagle3":
        return replace(Eagle3Plan(taps=taps), **_given(draft_vocab_size=args.draft_vocab_size))
    shape = {"num_layers": args.layers, "block_size": args.block_size, "num_taps": args.taps}
    return replace(DrafterPlan(taps=taps), **_given(**shape, mask_token_id=args.mask_token_id))


def _selector(args: argparse.Namespace) -> Selector | None:
    if args.selector_rank is not None:
        top_k = SELECTOR_TOP_K if args.selector_top_k is None else args.selector_top_k
        return Selector(
            checked_integer(args.selector_rank, "--selector-rank", 1),
            checked_integer(top_k, "--selector-top-k", 1, MOST_CANDIDATES),
        )
    if args.selector_top_k is not None:
        raise InputError(f"--selector-top-k is {args.selector_top_k}: it needs --selector-rank, or leave it out")
    return None


def _given(**values: int | None) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def recipe_of(args: argparse.Namespace) -> Recipe:
    """The arguments as a recipe. Raises InputError for those that are out of range or do not fit together."""
    _check_ranges(args)
    drafter = _drafter_plan(args)
    plan = AnswerPlan(args.answer_rows, args.max_new_tokens, args.max_prompt_tokens, args.seed, args.limit)
    if args.sampled is not None:
        plan = replace(plan, sampled=args.sampled, later_sampled=args.sampled)
    return Recipe(
        drafter=drafter,
        answers=plan,
        batches=BatchPlan(args.rows, args.anchors, seed=args.seed),
        training=TrainPlan(
            steps=args.steps,
            learning_rate=args.learning_rate,
            weights=args.loss_weights,
            gamma=args.gamma,
            distill=args.distill,
            start_from=args.start_from,
            selector=_selector(args),
            ttt_length=(args.ttt_length or TTT_LENGTH) if args.method == "eagle3" else None,
            negatives=None if args.accelerator else TrainPlan().negatives,
            compute=args.dtype,
            seed=args.seed,
            save_every=args.save_every,
        ),
        held_out=_held_out(args),
        mesh=args.mesh,
        invented=args.invent,
        bulk=args.bulk or args.accelerator,
        accelerator=args.accelerator,
        rounds=args.rounds,
        answer_tokens=args.answer_tokens,
        train_seconds=args.train_seconds,
    )


def _check_ranges(args: argparse.Namespace) -> None:
    """Raises InputError for numbers out of range and for options that need each other."""
    for name in COUNTS:
        checked_integer(vars(args)[name], f"--{name.replace('_', '-')}", 1)
    if args.limit is not None:
        checked_integer(args.limit, "--limit", 1)
    if not (args.bulk or args.accelerator) and (args.invent or args.rounds > 1 or args.answer_tokens < float("inf")):
        raise InputError("--invent, --rounds and --answer-tokens need --bulk or --accelerator")
    if args.loss_weights == "dynamic" and args.gamma is not None:
        raise InputError(f"--gamma is {args.gamma}: dynamic loss weights do not decay, leave it out")
    for name in ("learning_rate", "gamma", "train_seconds"):
        value = vars(args)[name]
        if value is not None and not 0 < value < float("inf"):
            raise InputError(f"--{name.replace('_', '-')} is {value}: use a finite number above 0")
    for name in ("distill", "sampled"):
        share = vars(args)[name]
        if share is not None and not 0 <= share <= 1:
            raise InputError(f"--{name} is {share}: use a share in 0..1")
    checked_integer(args.seed, "--seed", 0, 2**31 - 1)


def _held_out(args: argparse.Namespace) -> HeldOutPlan:
    """Reads the prompts."""
    if bool(args.eval_prompts) != (args.eval_every != 0):
        raise InputError("--eval-every and --eval-prompts need each other")
    every = checked_integer(args.eval_every, "--eval-every", 0)
    tokens = checked_integer(args.eval_tokens, "--eval-tokens", 2, why="the first comes from prefill")
    groups = {path.stem: read_prompts(path)[: args.eval_count] for path in args.eval_prompts}
    if len(groups) < len(args.eval_prompts):
        raise InputError("--eval-prompts: two files have the same name")
    return HeldOutPlan(every, groups, tokens)


def run(args: argparse.Namespace) -> int:
    """The subcommand. Raises InputError."""
    recipe, groups = recipe_of(args), [read_prompts(path) for path in args.prompts]
    from torch_dflash.train.pipeline import make_drafter  # JAX and torch take seconds to load

    try:
        drafter = make_drafter(args.target, groups, recipe, args.out)
    except OSError as error:
        raise InputError(f"--out {args.out}: {error}; what is written stays: mend that and run again") from None
    print(f"drafter: {drafter}")
    return 0


def main() -> int:
    """`python -m torch_dflash.train.command`"""
    parser = argparse.ArgumentParser(prog="torch-dflash train", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
