"""Keys: the rights of each key; the ring that finds a key and can be reloaded.

Owns: KeyInfo, the digests, each tenant's prefix-cache salt, replacing all keys at once.
Does not: keep or show a key itself, read HTTP, or count a key's use (rates does).
Invariants: a lookup takes the same time for all keys; a key file that cannot be read changes nothing; with keys every
tenant has a salt of its own, so that no two tenants share cached prefixes, even if added or removed later.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import ConfigError
from octavo.server.key_file import MIN_KEY_CHARACTERS, KeyEntry, read_key_file
from octavo.server.listener import MIN_PUBLIC_KEY_CHARACTERS, is_public

if TYPE_CHECKING:
    from octavo.config import Config, ServingConfig


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """A key's name, tenant, rights and limits. `name` may be shown in logs, metrics and answers; None is no limit.

    `priority` is for requests that give none, `max_priority` the most urgent (smallest) that they may give;
    `dashboard`: may watch the requests of all tenants; `metrics`: may read the metrics of all tenants.
    `max_files`, `max_storage_bytes` and `max_pending_batches` bound what its tenant stores, when this key adds to it.
    """

    name: str
    tenant: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    priority: int = 0
    max_priority: int | None = None
    weight: float = 1.0
    dashboard: bool = False
    metrics: bool = False
    max_files: int | None = None
    max_storage_bytes: int | None = None
    max_pending_batches: int | None = None
    digest: bytes = field(default=b"", repr=False)
    salt: bytes = field(default=b"", repr=False)  # of its tenant's prefix cache; set by the key ring


ANONYMOUS = KeyInfo("", "")  # of a request without a key


class KeyRing:
    """All keys. Without keys, all requests have ANONYMOUS."""

    def __init__(self, keys: Iterable[KeyInfo] = ()) -> None:
        self._secret = secrets.token_bytes(32)
        self._serving: ServingConfig | None = None
        self.keys = self._salted(_checked(keys))  # empty: no key is required

    @classmethod
    def of(cls, serving: ServingConfig) -> KeyRing:
        """Return the ring of --api-key and --api-key-file. Raises ConfigError."""
        ring = cls(_configured(serving))
        ring._serving = serving
        return ring

    def find(self, key: bytes) -> KeyInfo | None:
        """Return the KeyInfo of a key, or None; an empty key has none."""
        if not key:
            return None
        given = hashlib.sha256(key).digest()
        found = None
        for info in self.keys:
            if hmac.compare_digest(info.digest, given):
                found = info
        return found

    def holder_of(self, digest: bytes) -> KeyInfo | None:
        """Return the KeyInfo of the key with this SHA-256, or None; not in constant time: the digest is no secret."""
        return next((info for info in self.keys if info.digest == digest), None)

    def may_watch(self, info: KeyInfo) -> bool:
        """Return True if a key may watch the requests of all tenants: a right, if there are several keys."""
        return len(self.keys) < 2 or info.dashboard

    def may_measure(self, info: KeyInfo) -> bool:
        """Return True if a key may read /metrics and the details of /health: a right like `may_watch`."""
        return len(self.keys) < 2 or info.metrics

    @property
    def tenants(self) -> frozenset[str]:
        """The tenants of all keys."""
        return frozenset(info.tenant for info in self.keys)

    def _salted(self, keys: Iterable[KeyInfo]) -> tuple[KeyInfo, ...]:
        return tuple(replace(info, salt=hmac.digest(self._secret, info.tenant.encode(), "sha256")) for info in keys)

    def reload(self) -> str:
        """Reload the key file and return a summary of the changes. Raises ConfigError; then nothing is changed.

        Open requests continue, also those of a removed key. Weights of the fair policy stay until a restart.
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
        yield from map(_info, read_key_file(Path(serving.api_key_file), min_characters))


def _info(entry: KeyEntry) -> KeyInfo:
    return KeyInfo(
        entry.name,
        entry.tenant or entry.name,
        entry.requests_per_minute,
        entry.tokens_per_minute,
        entry.max_concurrent,
        entry.priority,
        entry.max_priority,
        entry.weight,
        entry.dashboard,
        entry.metrics,
        entry.max_files,
        entry.max_storage_bytes,
        entry.max_pending_batches,
        entry.digest,
    )


def _checked(keys: Iterable[KeyInfo]) -> tuple[KeyInfo, ...]:
    """Return the keys; names and keys must be unique, and each tenant have one weight. Raises ConfigError."""
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
