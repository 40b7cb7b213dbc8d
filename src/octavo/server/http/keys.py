"""Keys: each key's rights, the file that declares keys, and the ring that finds a key and can be reloaded.

Owns: KeyInfo; the fields and ranges of key files (TOML or YAML, a list `keys`); the digests; each tenant's prefix-cache
salt; replacing all keys at once.
Does not: store or show a key itself, read HTTP, or count a key's use (limits does).
Invariants: a lookup takes the same time for all keys. No message contains a key or a line of the file. A key file that
cannot be read changes nothing. With keys, every tenant has its own salt, so that no two tenants share cached prefixes,
even if tenants are added or removed later.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import tomllib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from octavo.errors import ConfigError
from octavo.server.http.listener import MIN_PUBLIC_KEY_CHARACTERS, is_public

if TYPE_CHECKING:
    from octavo.config import Config, ServingConfig

MAX_FILE_BYTES = 1 << 20
MAX_KEYS = 1024  # each request's key is compared with all of them
MIN_KEY_CHARACTERS = 8
MAX_KEY_CHARACTERS = 512
_EMPTY = hashlib.sha256(b"").digest()
_HEX = re.compile("[0-9a-fA-F]{64}")
_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._@-]{1,64}\Z")]
_PerMinute = Annotated[int, Meta(ge=1, le=10**12)]
_Count = Annotated[int, Meta(ge=1, le=2**53)]
_Priority = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
_log = logging.getLogger(__name__)


class KeyInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key's name, tenant, rights and limits. Logs, metrics and answers may show `name`. None is no limit.

    `priority` applies to requests without one; `max_priority` is the most urgent (smallest) that a request may set.
    `dashboard` allows watching all tenants' requests, `metrics` reading all tenants' metrics. `max_files`,
    `max_storage_bytes` and `max_pending_batches` bound what the key's tenant stores, when this key adds to it.
    `digest` is the key's SHA-256; `salt` is its tenant's prefix-cache salt, which the key ring sets.
    """

    name: _Name
    tenant: _Name
    requests_per_minute: _PerMinute | None = None
    tokens_per_minute: _PerMinute | None = None
    max_concurrent: Annotated[int, Meta(ge=1, le=10**6)] | None = None
    priority: _Priority = 0
    max_priority: _Priority | None = None
    weight: Annotated[float, Meta(gt=0, lt=1e6)] = 1.0
    dashboard: bool = False
    metrics: bool = False
    max_files: _Count | None = None
    max_storage_bytes: _Count | None = None
    max_pending_batches: _Count | None = None
    digest: bytes = b""
    salt: bytes = b""

    def __repr__(self) -> str:
        return f"KeyInfo({self.name!r}, {self.tenant!r})"


ANONYMOUS = KeyInfo("", "")  # for requests without a key


def read_key_file(path: Path, min_characters: int = MIN_KEY_CHARACTERS) -> list[KeyInfo]:
    """Read and check a key file. Raises ConfigError naming the file, the entry and the field, never a key."""
    content = _read(path)
    entries = content.get("keys") if isinstance(content, dict) and len(content) == 1 else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"key file {path} must hold one list, 'keys', of 1 to {MAX_KEYS} entries")
    if len(entries) > MAX_KEYS:
        raise ConfigError(f"key file {path} holds {len(entries)} keys; give at most {MAX_KEYS}")
    keys = []
    for number, entry in enumerate(entries, 1):
        try:
            keys.append(_key_info(entry, min_characters))
        except (ValueError, msgspec.ValidationError) as error:
            raise ConfigError(f"key file {path}: entry {number}: {error}") from None
    if any("key" in entry for entry in entries) and path.stat().st_mode & 0o077:
        _log.warning("key file %s holds keys in plain and others than its owner may read it; chmod 600 it", path)
    return keys


def _key_info(entry: object, min_characters: int) -> KeyInfo:
    """Return the KeyInfo of an entry, which must have `key` or `key_sha256`. Raises ValueError."""
    if not isinstance(entry, dict):
        raise ValueError("it is not a table of a key's fields")
    fields = dict(entry)
    if fields.get("tenant") is None:
        fields["tenant"] = fields.get("name")
    key, hexadecimal = fields.pop("key", None), fields.pop("key_sha256", None)
    if unknown := {"digest", "salt"} & fields.keys():
        raise ValueError(f"there is no field {min(unknown)}")
    if (key is None) == (hexadecimal is None):
        raise ValueError("give either key or key_sha256")
    if key is None:
        if not isinstance(hexadecimal, str) or not _HEX.fullmatch(hexadecimal):
            raise ValueError("key_sha256 is not a SHA-256 in 64 hexadecimal digits")
        digest = bytes.fromhex(hexadecimal)
    else:
        _check_key(key, min_characters)
        digest = hashlib.sha256(key.encode()).digest()
    if digest == _EMPTY:
        raise ValueError("key_sha256 is that of an empty key; give that of a key")
    info = msgspec.convert({**fields, "digest": digest}, KeyInfo)
    if info.max_priority is not None and info.priority < info.max_priority:
        raise ValueError(f"priority {info.priority} is more urgent than max_priority {info.max_priority}")
    return info


def _check_key(key: object, min_characters: int) -> None:
    if not isinstance(key, str):
        raise ValueError("key is not a text; put it into quotation marks")
    if key != key.strip():
        raise ValueError("key begins or ends with white space; take it away")
    if not min_characters <= len(key) <= MAX_KEY_CHARACTERS:
        is_short = MIN_KEY_CHARACTERS <= len(key) < min_characters
        reason = ", and can be guessed where others reach --host" if is_short else ""
        remedy = f"give one of at least {min_characters} and at most {MAX_KEY_CHARACTERS}"
        raise ValueError(f"key has {len(key)} characters{reason}; {remedy}")


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
        line = str(error).rpartition("(")[2].rstrip(")")  # earlier text of the error may quote the file
        raise ConfigError(f"key file {path} is not well formed TOML ({line})") from None


def _read_yaml(path: Path, text: str) -> object:
    import yaml  # imported here to keep start-up fast: only YAML key files need it

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        raise ConfigError(f"key file {path} is not well formed YAML{line}") from None


class KeyRing:
    """All keys of the server. Without keys, every request has ANONYMOUS."""

    def __init__(self, keys: Iterable[KeyInfo] = ()) -> None:
        self._secret = secrets.token_bytes(32)
        self._serving: ServingConfig | None = None
        self.keys = self._salted(_checked(keys))  # no key is required if empty

    @classmethod
    def of(cls, serving: ServingConfig) -> KeyRing:
        """Return the key ring of --api-key and --api-key-file. Raises ConfigError."""
        ring = cls(_configured(serving))
        ring._serving = serving
        return ring

    def find(self, key: bytes) -> KeyInfo | None:
        """Return the KeyInfo of a key; None for an unknown or empty key."""
        if not key:
            return None
        digest = hashlib.sha256(key).digest()
        match = None
        for info in self.keys:
            if hmac.compare_digest(info.digest, digest):
                match = info
        return match

    def find_by_digest(self, digest: bytes) -> KeyInfo | None:
        """Return the KeyInfo with this SHA-256, or None. Not in constant time: the digest is no secret."""
        return next((info for info in self.keys if info.digest == digest), None)

    def can_watch(self, info: KeyInfo) -> bool:
        """Return True if a key may watch all tenants' requests. With several keys, a key needs this right."""
        return len(self.keys) < 2 or info.dashboard

    def can_read_metrics(self, info: KeyInfo) -> bool:
        """Return True if a key may read /metrics and /health's details. With several keys, a key needs this right."""
        return len(self.keys) < 2 or info.metrics

    @property
    def tenants(self) -> frozenset[str]:
        """The tenants of all keys."""
        return frozenset(info.tenant for info in self.keys)

    def _salted(self, keys: Iterable[KeyInfo]) -> tuple[KeyInfo, ...]:
        return tuple(
            msgspec.structs.replace(info, salt=hmac.digest(self._secret, info.tenant.encode(), "sha256"))
            for info in keys
        )

    def reload(self) -> str:
        """Reload the key file and return a summary of the changes. If this raises ConfigError, nothing has changed.

        Open requests continue, including those of removed keys. The fair policy keeps its weights until a restart.
        """
        if self._serving is None or self._serving.api_key_file is None:
            raise ConfigError("there is no --api-key-file to read again")
        fresh = self._salted(_checked(_configured(self._serving)))
        old, new = ({info.digest: info for info in keys} for keys in (self.keys, fresh))
        num_changed = sum(digest in old and old[digest] != info for digest, info in new.items())
        self.keys = fresh
        return (
            f"{len(new)} keys: {len(new.keys() - old.keys())} added, {len(old.keys() - new.keys())} removed, "
            f"{num_changed} changed"
        )


def with_key_weights(config: Config) -> Config:
    """Return the settings with the key file's weights added to --tenant-weight, for the engine's fair policy."""
    if config.serving.api_key_file is None:
        return config
    weights = {info.tenant: info.weight for info in KeyRing.of(config.serving).keys if info.weight != 1.0}
    named = {spelled.rpartition("=")[0] for spelled in config.serving.tenant_weight}
    spelled = tuple(f"{tenant}={weight}" for tenant, weight in weights.items() if tenant not in named)
    return replace(config, serving=replace(config.serving, tenant_weight=(*config.serving.tenant_weight, *spelled)))


def _configured(serving: ServingConfig) -> Iterable[KeyInfo]:
    for number, key in enumerate(dict.fromkeys(serving.api_key), 1):
        digest = hashlib.sha256(key.encode()).digest()
        yield KeyInfo(f"key-{number}", digest.hex(), digest=digest)
    if serving.api_key_file is not None:
        min_characters = MIN_PUBLIC_KEY_CHARACTERS if is_public(serving) else MIN_KEY_CHARACTERS
        yield from read_key_file(Path(serving.api_key_file), min_characters)


def _checked(keys: Iterable[KeyInfo]) -> tuple[KeyInfo, ...]:
    """Return the keys. Names and keys must be unique, and a tenant's keys have one weight. Raises ConfigError."""
    names: dict[str, KeyInfo] = {}
    digests: dict[bytes, KeyInfo] = {}
    weights: dict[str, KeyInfo] = {}
    for info in keys:
        if info.name in names:
            raise ConfigError(f"two keys are named {info.name!r}; give each a name of its own")
        if info.digest in digests:
            raise ConfigError(f"{digests[info.digest].name!r} and {info.name!r} have the same key; give each its own")
        first = weights.setdefault(info.tenant, info)
        if first.weight != info.weight:
            raise ConfigError(
                f"{first.name!r} and {info.name!r} are of tenant {info.tenant!r}, with weights {first.weight:g} and "
                f"{info.weight:g}; give them one weight"
            )
        names[info.name] = digests[info.digest] = info
    return tuple(names.values())
