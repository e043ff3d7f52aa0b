"""The arguments of the commands that say how tokens are chosen and where a text stops."""

import argparse
from typing import TYPE_CHECKING

from torch_dflash.errors import InputError

if TYPE_CHECKING:
    from torch_dflash.options import Sampling

FILTERS = ("top_k", "top_p", "min_p")
NUMBERS = (
    ("temperature", float, "T", "0, the default, is greedy"),
    ("top_k", int, "K", "draw among the K likeliest tokens"),
    ("top_p", float, "P", "draw among the likeliest tokens that have P of the probability"),
    ("min_p", float, "P", "draw among tokens at least P times as likely as the likeliest"),
    ("seed", int, "N", "the same seed gives the same text; a new one is drawn without it"),
    ("repetition_penalty", float, "X", "divide logits of what prompt and text hold already (1: off)"),
    ("presence_penalty", float, "X", "lower logits of what the text holds already (0: off)"),
    ("frequency_penalty", float, "X", "the same for each time that it holds it (0: off)"),
)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them, in a group of their own."""
    group = parser.add_argument_group("choice of tokens")
    for name, kind, metavar, text in NUMBERS:
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)
    group.add_argument("--logprobs", action="store_true", help="give each token's log-probability in JSON")
    stops = parser.add_argument_group("end of the text")
    stops.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; may be repeated")
    stops.add_argument("--stop-token-id", action="append", default=[], type=int, metavar="ID", help="end with token ID")
    stops.add_argument("--ignore-eos", action="store_true", help="go on behind the model's own end of text")


def sampling_of(arguments: argparse.Namespace) -> "Sampling":
    """What they say. Raises InputError."""
    from torch_dflash.options import Sampling

    given = {name: getattr(arguments, name) for name, *_ in NUMBERS if getattr(arguments, name) is not None}
    for name in FILTERS:
        if name in given and not given.get("temperature"):
            option = f"--{name.replace('_', '-')}"
            raise InputError(f"{option} {given[name]} changes nothing at temperature 0: give --temperature too")
    return Sampling(**given, logprobs=arguments.logprobs)
