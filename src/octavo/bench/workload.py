"""Workloads: prompts and output lengths, read from a file or drawn from a seed.

Owns: groups of requests (groups run one after another); prompts as lines of text; a different first token per pass.
Does not: parse JSON workload files (simulator.workloads.traces does), run anything, or know a tokenizer.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.errors import ConfigError
from octavo.simulator.workloads.traces import read_token_file

FIRST_ID = 100  # the first id of a salted prompt; lower ids may be special tokens
MAX_SALTS = 1000


@dataclass(frozen=True, slots=True)
class Item:
    """One request: its prompt and its number of output tokens."""

    prompt_token_ids: array[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class BenchWorkload:
    """Groups of requests; a group starts after the previous group has ended."""

    name: str
    groups: tuple[tuple[Item, ...], ...]

    @property
    def items(self) -> list[Item]:
        """Return the requests of all groups."""
        return [item for group in self.groups for item in group]

    @property
    def num_requests(self) -> int:
        """Return the number of requests."""
        return len(self.items)

    @property
    def num_prompt_tokens(self) -> int:
        """Return the number of prompt tokens of all requests."""
        return sum(len(item.prompt_token_ids) for item in self.items)

    @property
    def num_output_tokens(self) -> int:
        """Return the number of output tokens of all requests."""
        return sum(item.max_tokens for item in self.items)

    @property
    def max_len(self) -> int:
        """Return the number of positions of the longest request."""
        return max(len(item.prompt_token_ids) + item.max_tokens for item in self.items)


def read_workload(path: Path) -> BenchWorkload:
    """Read a workload file; .gz files are decompressed. Raises ConfigError naming the file and the entry at fault."""
    groups = (
        tuple(Item(array("i", request.prompt_token_ids), request.max_tokens) for request in group)
        for group in read_token_file(path)
    )
    return BenchWorkload(path.name, tuple(groups))


def read_texts(path: Path) -> list[str]:
    """Read one prompt per line; skip empty lines. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"--text {path} cannot be read ({reason}); give a file with one prompt a line") from None
    texts = [line.strip() for line in lines if line.strip()]
    if not texts:
        raise ConfigError(f"--text {path} has no lines; give a file with one prompt a line")
    return texts


def draw_workload(num_requests: int, num_prompt: int, num_output: int, vocab_size: int, seed: int) -> BenchWorkload:
    """Return random prompts of one length; equal arguments give equal prompts on every machine and Python version."""
    draw = random.Random(seed)
    items = (
        Item(array("i", (int(draw.random() * vocab_size) for _ in range(num_prompt))), num_output)
        for _ in range(num_requests)
    )
    return BenchWorkload(f"random-{num_requests}x{num_prompt}+{num_output}-seed{seed}", (tuple(items),))


def salted(workload: BenchWorkload, pass_number: int) -> BenchWorkload:
    """Return the workload with all prompts' first token id replaced by an id that depends on the pass.

    On any engine, prompts share no prefix with an earlier pass, and prompts of one pass still share their prefixes.
    """
    first = FIRST_ID + pass_number % MAX_SALTS
    groups = (
        tuple(Item(array("i", [first, *item.prompt_token_ids[1:]]), item.max_tokens) for item in group)
        for group in workload.groups
    )
    return replace(workload, groups=tuple(groups))
