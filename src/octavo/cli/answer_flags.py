"""The flags that say how an answer is sampled, and the sampling parameters made from them.

Owns: what `octavo run`, `chat` and `generate` have in common. Does not: answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from octavo.cli.flags import whole
from octavo.core.request import SamplingParams, sampling_defaults

MAX_TOKENS = 512
_GIVEN = ("temperature", "top_p", "top_k")


def add_answer_arguments(group: argparse._ArgumentGroup, max_tokens: int | None = MAX_TOKENS) -> None:
    """Add the sampling flags; `max_tokens` is the default, None for as many tokens as fit."""
    most = max_tokens if max_tokens is not None else "as many as fit"
    flags = ("--max-tokens", "--n-predict", "-n")
    group.add_argument(*flags, type=whole, default=max_tokens, metavar="N", help=f"tokens at most [{most}]")
    group.add_argument("--temperature", "--temp", type=float, metavar="X", help="0 = greedy [the model's, else 1]")
    group.add_argument("--top-p", type=float, metavar="X", help="nucleus [the model's, else 1]")
    group.add_argument("--top-k", type=int, metavar="N", help="most likely tokens [the model's, else all]")
    group.add_argument("--system", metavar="TEXT", help="system message")
    group.add_argument("--quiet", "-q", action="store_true", help="no progress and no numbers on stderr")


def sampling_params(args: argparse.Namespace, generation: Mapping[str, float]) -> SamplingParams:
    """Return the parameters given by flags, else by the model's generation config, else the defaults.

    Raises InvalidRequestError.
    """
    given = {name: value for name in _GIVEN if (value := getattr(args, name)) is not None}
    return SamplingParams(**{**sampling_defaults(generation), **given, "max_tokens": args.max_tokens})
