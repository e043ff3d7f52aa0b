"""The arguments of the commands that say which models run, and how."""

import argparse
from typing import TYPE_CHECKING

from torch_dflash.errors import InputError

# jax, torch and transformers take seconds to import: `--help` and bad arguments must not wait for them.
if TYPE_CHECKING:
    from torch_dflash.pair import Pair

SHIPPED = ("default", "bytes")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which models run, how, and by which method."""
    group = add_pair_arguments(parser)
    group.add_argument("--method", choices=("dflash", "eagle3", "plain"), help="plain: the target alone, the baseline")


def add_pair_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Declare which models run, and how: what all commands that write text share. Returns the group of these."""
    group = parser.add_argument_group("models and how they run")
    add = group.add_argument
    add("--target", default="default", help="folder, Hugging Face hub id, default (SmolLM2-135M-Instruct) or bytes")
    add("--draft", default=None, help="drafter: folder, hub id, default or bytes; none decodes plainly")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="at most N tokens (default 128)")
    add("--block-size", type=int, metavar="B", help="block of the drafter, anchor included, if smaller than trained")
    add("--num-drafts", metavar="K", help="use K of the block's B-1 drafts in each step; auto: as many as pay")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="float32 (default) is exact")
    add("--tp", type=int, default=1, metavar="N", help="spread the models over N devices (by head, width, vocabulary)")
    add("--dp", type=int, default=1, metavar="N", help="spread the requests over N groups of such devices")
    add("--steps-per-dispatch", type=int, default=4, metavar="N", help="steps on the device between two reads (4)")
    add("--no-chat", action="store_true", help="do not apply the chat template of a chat model")
    return group


def use_compilation_cache() -> None:
    """Compiled programs are kept in the user's cache, so that only the first run waits for the compiler."""
    import jax

    from torch_dflash.default_model import cache_root

    jax.config.update("jax_compilation_cache_dir", str(cache_root() / "torch-dflash" / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def load(arguments: argparse.Namespace, draft: str | None) -> "Pair":
    """The target that the arguments name with a drafter, mostly `draft_name`; None loads none."""
    from torch_dflash.pair import load_pair
    from torch_dflash.sharding import platform_over

    platform, block_size = platform_over(arguments.tp, arguments.dp), arguments.block_size
    return load_pair(arguments.target, draft, arguments.dtype, block_size=block_size, platform=platform)


def num_drafts_of(arguments: argparse.Namespace) -> int | str | None:
    """--num-drafts as `generate` takes it. Raises InputError."""
    given = arguments.num_drafts
    if given in (None, "auto"):
        return given
    try:
        return int(given)
    except ValueError:
        raise InputError(f"--num-drafts is {given!r}: use a number of drafts, or auto") from None


def draft_name(arguments: argparse.Namespace) -> str | None:
    """The drafter to load: the one that belongs to a shipped target, or what --draft says. None loads none."""
    if arguments.method == "plain" or arguments.draft == "none":
        return None
    if arguments.draft is None and arguments.target in SHIPPED:
        return arguments.target
    if arguments.draft is None:
        raise InputError("--draft is missing: name the drafter of this target, or none to decode plainly")
    return arguments.draft
