"""Key files: TOML or YAML, a list `keys` of named keys.

Owns: the entries' fields and ranges. Does not: know what the limits do, or keep a key (only its SHA-256).
Invariant: no message holds a key, or a line of the file.
"""

from __future__ import annotations

import hashlib
import logging
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from octavo.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
MAX_KEYS = 1024  # each request is compared with all of them
MIN_KEY_CHARACTERS = 8
_EMPTY = hashlib.sha256(b"").digest()
_HEX = r"^[0-9a-fA-F]{64}$"
_NAME = r"^[A-Za-z0-9._@-]{1,64}$"
_PerMinute = Annotated[int, Field(ge=1, le=10**12)]
_Count = Annotated[int, Field(ge=1, le=2**53)]
_Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]
_log = logging.getLogger(__name__)


class KeyEntry(BaseModel):
    """One entry. Either `key` or `key_sha256` is given."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

    name: str = Field(pattern=_NAME)
    key: str | None = Field(None, min_length=MIN_KEY_CHARACTERS, max_length=512, repr=False)
    key_sha256: str | None = Field(None, pattern=_HEX, repr=False)
    tenant: str | None = Field(None, pattern=_NAME)
    requests_per_minute: _PerMinute | None = None
    tokens_per_minute: _PerMinute | None = None
    max_concurrent: int | None = Field(None, ge=1, le=10**6)
    priority: _Priority = 0
    max_priority: _Priority | None = None
    weight: float = Field(1.0, gt=0, lt=1e6, strict=False)
    dashboard: bool = False
    metrics: bool = False
    max_files: _Count | None = None
    max_storage_bytes: _Count | None = None
    max_pending_batches: _Count | None = None

    @property
    def digest(self) -> bytes:
        """SHA-256 of the key."""
        return bytes.fromhex(self.key_sha256) if self.key_sha256 else hashlib.sha256((self.key or "").encode()).digest()


def read_key_file(path: Path, min_characters: int = MIN_KEY_CHARACTERS) -> list[KeyEntry]:
    """Read and check every entry. Raises ConfigError naming the file, the entry and the field, never a key."""
    content = _read(path)
    entries = content.get("keys") if isinstance(content, dict) and len(content) == 1 else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"key file {path} must hold one list, 'keys', of 1 to {MAX_KEYS} entries")
    if len(entries) > MAX_KEYS:
        raise ConfigError(f"key file {path} holds {len(entries)} keys; give at most {MAX_KEYS}")
    found = [_entry(path, number, entry) for number, entry in enumerate(entries, 1)]
    for number, entry in enumerate(found, 1):
        if entry.key is not None and len(entry.key) < min_characters:
            raise ConfigError(
                f"key file {path}: entry {number} ({entry.name}): key has {len(entry.key)} characters, and can be "
                f"guessed where others reach --host; give one of at least {min_characters}"
            )
    _warn_of_readers(path, found)
    return found


def _entry(path: Path, number: int, value: object) -> KeyEntry:
    where = f"key file {path}: entry {number}"
    try:
        entry = KeyEntry.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        named = ".".join(map(str, first["loc"])) or "it"
        raise ConfigError(f"{where}: {named}: {first['msg']}") from None
    if (entry.key is None) == (entry.key_sha256 is None):
        raise ConfigError(f"{where} ({entry.name}): give either key or key_sha256")
    if entry.key is not None and entry.key != entry.key.strip():
        raise ConfigError(f"{where} ({entry.name}): key begins or ends with white space; take it away")
    if entry.digest == _EMPTY:
        raise ConfigError(f"{where} ({entry.name}): key_sha256 is that of an empty key; give that of a key")
    if entry.max_priority is not None and entry.priority < entry.max_priority:
        raise ConfigError(
            f"{where} ({entry.name}): priority {entry.priority} is more urgent than max_priority {entry.max_priority}"
        )
    return entry


def _read(path: Path) -> object:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise ConfigError(f"key file {path} is larger than {MAX_FILE_BYTES} bytes")
        text = raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"key file {path} cannot be read ({reason})") from None
    return _read_toml(path, text) if path.suffix == ".toml" else _read_yaml(path, text)


def _read_toml(path: Path, text: str) -> object:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = str(error).rpartition("(")[2].rstrip(")")  # the text before it may quote the file
        raise ConfigError(f"key file {path} is not well formed TOML ({place})") from None


def _read_yaml(path: Path, text: str) -> object:
    import yaml  # kept out of start-up: only a file needs it

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        raise ConfigError(f"key file {path} is not well formed YAML{place}") from None


def _warn_of_readers(path: Path, entries: Iterable[KeyEntry]) -> None:
    if any(entry.key is not None for entry in entries) and path.stat().st_mode & 0o077:
        _log.warning("key file %s holds keys in plain and others than its owner may read it; chmod 600 it", path)
