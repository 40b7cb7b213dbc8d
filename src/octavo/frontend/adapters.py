"""AdapterRegistry: the adapters that clients can name, whichever engine serves them.

Owns: names, ids and paths; loading into the engines and into those that replace them; freeing an adapter after its last
request; the file from which the next front end restores adapters loaded while serving.
Does not: read weights (the engine's executor does), or know HTTP.
Invariants: an id is a digest of the adapter's contents, so that equal contents share an id, and cached prefixes of
different ones never match. A name that was unloaded is gone at once; its open requests go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from octavo.artifacts.adapter import adapter_id, find_adapter
from octavo.artifacts.json_file import read_json
from octavo.config import AdapterConfig
from octavo.engine.adapters import LoadOrder, read_lora_modules
from octavo.engine.client import Verb
from octavo.errors import ConfigError, InvalidRequestError, OctavoError
from octavo.frontend.open_requests import OpenRequests

_LOG = logging.getLogger(__name__)
STORE_FILE = "adapters.json"
IDLE_S = 2.0  # without open requests, before an unloaded adapter is freed: requests may still be on their way
MAX_NAME = 128


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that clients can name."""

    name: str
    adapter_id: int
    path: str


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter for LLM.generate and chat, with vLLM's names; `lora_int_id` is not used. A new one is loaded."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


class AdapterClient(Protocol):
    """What the registry uses of an engine's client. Later engines first get the orders in `adapters`, by id."""

    adapters: dict[int, str]
    requests: OpenRequests

    async def control(self, verb: Verb, argument: str = "") -> object:
        """See EngineClient."""


class AdapterRegistry:
    """The adapters by name. For one event loop."""

    def __init__(self, client: AdapterClient, config: AdapterConfig, store: Path | None = None) -> None:
        """Take the settings' adapters, which engines load by themselves. Raises ConfigError, ModelFileError."""
        self.is_enabled = config.is_enabled
        self.can_change = config.allow_runtime_lora
        self._client = client
        self._store = store
        self._changing = asyncio.Lock()
        self._freeing: set[asyncio.Task[None]] = set()
        self._fixed = {name: _adapter(name, path) for name, path in read_lora_modules(config.lora_modules).items()}
        self._adapters = dict(self._fixed)

    def __iter__(self) -> Iterator[Adapter]:
        return iter(tuple(self._adapters.values()))

    def get(self, name: str) -> Adapter | None:
        """Return the adapter of this name."""
        return self._adapters.get(name)

    async def load(self, name: str, path: str, models: Collection[str] = ()) -> Adapter:
        """Load an adapter under a new name, which is none of the models'.

        Raises ConfigError, InvalidRequestError, ModelFileError, EngineError.
        """
        async with self._changing:
            return await self._load(name, path, models)

    async def _load(self, name: str, path: str, models: Collection[str] = ()) -> Adapter:
        if not self.is_enabled:
            raise ConfigError("this server has no adapters; start it with --enable-lora")
        if not name or len(name) > MAX_NAME or not name.isprintable():
            raise InvalidRequestError(f"lora_name is {name[:MAX_NAME]!r}; give 1 to {MAX_NAME} characters", "lora_name")
        if name in self._adapters or name in models:
            message = f"the name {name!r} is in use; unload that adapter first, or give another"
            raise InvalidRequestError(message, "lora_name")
        adapter = await asyncio.to_thread(_adapter, name, path)
        order = LoadOrder(adapter.adapter_id, str(Path(path).expanduser().absolute())).text()
        is_new = adapter.adapter_id not in self._client.adapters
        self._client.adapters[adapter.adapter_id] = order  # first, for an engine that begins meanwhile
        try:
            await self._client.control("load_adapter", order)
        except BaseException:
            if is_new:
                self._client.adapters.pop(adapter.adapter_id, None)
            raise
        self._adapters[name] = adapter
        self._save()
        return adapter

    async def find(self, wanted: object) -> Adapter:
        """Return the adapter of a name or a LoRARequest, which may load it. Raises InvalidRequestError, and as load."""
        name = wanted if isinstance(wanted, str) else getattr(wanted, "lora_name", None)
        path = str(getattr(wanted, "lora_path", "") or "")
        if not isinstance(name, str):
            raise InvalidRequestError(
                f"lora_request is a {type(wanted).__name__}; give an adapter's name or a LoRARequest", "lora_request"
            )
        async with self._changing:
            adapter = self._adapters.get(name)
            if adapter is None and path:
                adapter = await self._load(name, path)
        if adapter is None:
            known = ", ".join(self._adapters) or "none"
            raise InvalidRequestError(f"no adapter {name!r} is loaded; there are: {known}", "lora_request")
        if path and adapter.path != path:
            raise InvalidRequestError(f"the adapter {name!r} is that of {adapter.path}", "lora_request")
        return adapter

    def unload(self, name: str) -> Adapter | None:
        """Remove a name, and free its adapter after the last request; return None if there is no such name."""
        adapter = self._adapters.pop(name, None)
        if adapter is not None:
            self._save()
            task = asyncio.get_running_loop().create_task(self._free(adapter.adapter_id))
            self._freeing.add(task)
            task.add_done_callback(self._freeing.discard)
        return adapter

    async def restore(self) -> None:
        """Load the adapters that the former front end had loaded while serving; log those that cannot be loaded."""
        if self._store is None or not self._store.is_file():
            return
        for name, path in read_json(self._store).items():
            if name not in self._adapters:
                try:
                    await self.load(str(name), str(path))
                except OctavoError as error:
                    _LOG.error("adapter %s is not restored: %s", name, error)

    async def _free(self, number: int) -> None:
        """Free an adapter in the engines once it has had no name and no open request for IDLE_S."""
        idle_s = 0.0
        while idle_s < IDLE_S:
            await asyncio.sleep(IDLE_S / 4)
            is_open = any(state.request.adapter_id == number for state in self._client.requests)
            idle_s = 0.0 if is_open else idle_s + IDLE_S / 4
        async with self._changing:  # a load of the same contents is complete, or begins after this
            if all(adapter.adapter_id != number for adapter in self):
                self._client.adapters.pop(number, None)
                with contextlib.suppress(OctavoError):  # the engine is being replaced; the next one will not load it
                    await self._client.control("unload_adapter", str(number))

    def _save(self) -> None:
        """Write the adapters that were loaded while serving."""
        if self._store is None:
            return
        kept = {each.name: each.path for each in self if self._fixed.get(each.name) != each}
        draft = self._store.with_suffix(".new")
        try:
            draft.write_bytes(msgspec.json.encode(kept))
            draft.replace(self._store)
        except OSError as error:
            _LOG.warning("adapters: not kept for the next server process, %s: %s", self._store, error)


def _adapter(name: str, path: str) -> Adapter:
    return Adapter(name, adapter_id(find_adapter(path)), path)
