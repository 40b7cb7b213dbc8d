"""Workload files of `octavo bench offline` as arrivals: a JSON list of requests, or of groups that run in turn.

Owns: reading them; keys of 16-token blocks from the token ids, so that equal prompts share. Does not: run a model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

from octavo.config.spelling import unknown
from octavo.errors import ConfigError
from octavo.simulator.arrival import Arrival
from octavo.simulator.workloads.source import Notes, Source, Surroundings
from octavo.simulator.workloads.spec import Spec

KEY_TOKENS = 16
MAX_FILE = 1 << 30  # bytes


def token_file(spec: Spec, around: Surroundings) -> Source:
    """Return a file's requests, all at once, or at a `rate`; a group follows the longest answer of the group before."""
    path = Path(spec.path)
    rate = spec.number("rate") if "rate" in spec.options else 0.0
    spec.text_of("rate")

    def source(notes: Notes) -> Iterator[Arrival]:
        clock, now, index = around.rng(spec, "times"), 0.0, 0
        parent: int | None = None
        for group, items in enumerate(_read_groups(path)):
            longest: tuple[int, int | None] = (-1, None)
            for place, item in enumerate(items):
                ids, output = _read_item(item, f"{path}, group {group}, request {place}")
                time = now if parent is None else 0.0
                yield Arrival(time, len(ids), output, keys=_keys(ids), key_tokens=KEY_TOKENS, follows=parent)
                longest = max(longest, (output, index), key=lambda one: one[0])
                index += 1
                now += clock.expovariate(rate) if rate else 0.0
            parent = longest[1]

    return source


def _read_groups(path: Path) -> Sequence[Sequence[object]]:
    try:
        if path.stat().st_size > MAX_FILE:
            raise ConfigError(f"workload {path} is larger than {MAX_FILE} bytes; split it")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"workload {path} cannot be read ({error.strerror}); give a JSON file") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"workload {path} is no JSON: {error}") from None
    if not isinstance(content, list) or not content:
        raise ConfigError(f"workload {path} must be a non-empty list of requests, or of groups of requests")
    groups = content if isinstance(content[0], list) else [content]
    if not all(isinstance(group, list) for group in groups):
        raise ConfigError(f"workload {path} mixes requests and groups; give one or the other")
    return groups


def _read_item(item: object, where: str) -> tuple[list[int], int]:
    for key in item.keys() - {"prompt_token_ids", "max_tokens"} if isinstance(item, dict) else ():
        raise ConfigError(f"{where}: {unknown('key', str(key), ('prompt_token_ids', 'max_tokens'))}")
    ids = item.get("prompt_token_ids") if isinstance(item, dict) else None
    if not isinstance(ids, list) or not ids or not all(type(one) is int and 0 <= one < 2**31 for one in ids):
        raise ConfigError(f"{where}: prompt_token_ids must be a non-empty list of token ids")
    assert isinstance(item, dict)
    count = item.get("max_tokens")
    if type(count) is not int or count < 1:
        raise ConfigError(f"{where}: max_tokens is {count!r}; give a whole number of at least 1")
    return ids, count


def _keys(ids: Sequence[int]) -> tuple[int, ...]:
    """Return a key for each full block that names it and all before it."""
    keys, running = [], blake2b(digest_size=8)
    for start in range(0, len(ids) - KEY_TOKENS + 1, KEY_TOKENS):
        running.update(b"".join(one.to_bytes(4, "little") for one in ids[start : start + KEY_TOKENS]))
        keys.append(int.from_bytes(running.digest(), "little") >> 1)
    return tuple(keys)
