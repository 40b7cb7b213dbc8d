"""The prompts of an online bench, as token ids or text: from a file, from lengths, or from lines of text.

Owns: the choice and its checks, and changing ids so that no earlier pass's prefix helps. Does not: send.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.bench.workload import BenchWorkload, Item
from octavo.errors import ConfigError

FIRST_ID = 100  # the first id of a salted prompt; lower ids may be special tokens
MAX_SALTS = 1000


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts in groups, each with the number of its output tokens."""

    name: str
    groups: tuple[tuple[tuple[array[int] | str, int], ...], ...]

    @property
    def all(self) -> list[tuple[array[int] | str, int]]:
        """Return every prompt, in order."""
        return [prompt for group in self.groups for prompt in group]


def of_workload(workload: BenchWorkload) -> Prompts:
    """Return a workload's token ids as prompts."""
    groups = (tuple((item.prompt_token_ids, item.max_tokens) for item in group) for group in workload.groups)
    return Prompts(workload.name, tuple(groups))


def read_texts(path: Path, num_output: int) -> Prompts:
    """Read one prompt a line; empty lines are left out. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8"
        raise ConfigError(f"--text {path} cannot be read ({reason}); give a file with a prompt a line") from None
    texts = [line.strip() for line in lines if line.strip()]
    if not texts:
        raise ConfigError(f"--text {path} has no lines; give a file with a prompt a line")
    return Prompts(path.name, (tuple((text, num_output) for text in texts),))


def salted(workload: BenchWorkload, number: int) -> BenchWorkload:
    """Return the same work with another first id, one for all prompts of a pass.

    So no prefix of an earlier pass matches, and prompts that share a prefix still do, on every engine without its help.
    """
    first = FIRST_ID + number % MAX_SALTS
    groups = (tuple(_with_first(item, first) for item in group) for group in workload.groups)
    return replace(workload, groups=tuple(groups))


def _with_first(item: Item, first: int) -> Item:
    return Item(array("i", [first, *item.prompt_token_ids[1:]]), item.max_tokens)
