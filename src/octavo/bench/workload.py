"""Workloads: prompts and output lengths, read from a file or drawn from a seed.

Owns: the file form (a JSON list of requests, or a list of such lists that run one after another) and its checks;
prompts as lines of text; another first token for each pass. Does not: run anything, or know a tokenizer.
"""

from __future__ import annotations

import gzip
import json
import random
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.config.spelling import unknown
from octavo.errors import ConfigError

FIRST_ID = 100  # the first id of a salted prompt; lower ids may be special tokens
MAX_SALTS = 1000


@dataclass(frozen=True, slots=True)
class Item:
    """One request: its prompt and the number of tokens that it produces."""

    prompt_token_ids: array[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class BenchWorkload:
    """Groups of requests; a group starts when the one before has ended."""

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
        """Return the number of prompt tokens."""
        return sum(len(item.prompt_token_ids) for item in self.items)

    @property
    def num_output_tokens(self) -> int:
        """Return the number of tokens that will be produced."""
        return sum(item.max_tokens for item in self.items)

    @property
    def max_len(self) -> int:
        """Return the positions of the longest request."""
        return max(len(item.prompt_token_ids) + item.max_tokens for item in self.items)


def read_workload(path: Path) -> BenchWorkload:
    """Read a workload file, compressed if it ends in .gz. Raises ConfigError naming the file and the entry at fault."""
    try:
        data = path.read_bytes()
        content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except gzip.BadGzipFile:
        raise ConfigError(f"workload {path} is not a gzip file; give JSON, or compress it") from None
    except OSError as error:
        raise ConfigError(f"workload {path} cannot be read ({error.strerror}); give a JSON file") from None
    except ValueError as error:
        raise ConfigError(f"workload {path} is not JSON: {error}") from None
    if not isinstance(content, list) or not content:
        raise ConfigError(f"workload {path} must be a non-empty list of requests, or of groups of requests")
    groups = content if isinstance(content[0], list) else [content]
    return BenchWorkload(
        path.name, tuple(_read_group(group, f"workload {path}, group {index}") for index, group in enumerate(groups))
    )


def read_texts(path: Path) -> list[str]:
    """Read one prompt a line; empty lines are left out. Raises ConfigError."""
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
    """Return the same work with another first id, one for all prompts of a pass.

    No prefix of an earlier pass matches, and prompts that share a prefix still do, on any engine.
    """
    first = FIRST_ID + pass_number % MAX_SALTS
    groups = (
        tuple(Item(array("i", [first, *item.prompt_token_ids[1:]]), item.max_tokens) for item in group)
        for group in workload.groups
    )
    return replace(workload, groups=tuple(groups))


def _read_group(group: object, where: str) -> tuple[Item, ...]:
    if not isinstance(group, list) or not group:
        raise ConfigError(f"{where} must be a non-empty list of requests")
    return tuple(_read_item(item, f"{where}, request {index}") for index, item in enumerate(group))


def _read_item(item: object, where: str) -> Item:
    if not isinstance(item, Mapping):
        raise ConfigError(f"{where} must be an object with prompt_token_ids and max_tokens")
    for key in item.keys() - {"prompt_token_ids", "max_tokens"}:
        raise ConfigError(f"{where}: {unknown('key', str(key), ('prompt_token_ids', 'max_tokens'))}")
    ids, count = item.get("prompt_token_ids"), item.get("max_tokens")
    if not isinstance(ids, list) or not ids or not all(isinstance(token, int) and token >= 0 for token in ids):
        raise ConfigError(f"{where}: prompt_token_ids must be a non-empty list of token ids")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"{where}: max_tokens is {count!r}; give a whole number of at least 1")
    return Item(array("i", ids), count)
