"""The adapters of an engine: those of its settings, and those that its clients load and unload between steps.

Owns: `NAME=PATH` of the settings, the engine's verbs load_adapter and unload_adapter, the bound of loaded adapters.
Does not: read files (the executor does), know names (frontend/adapters.py does), or decide when one is unloaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

from octavo.artifacts.adapter import adapter_id, find_adapter
from octavo.config import AdapterConfig
from octavo.core.request import Request
from octavo.errors import ConfigError, EngineError, InvalidRequestError, OctavoError

if TYPE_CHECKING:
    from octavo.engine.loop import EngineLoop

MAX_LOADED = 1024


@runtime_checkable
class AdaptedExecutor(Protocol):
    """An executor that can load adapters."""

    def load_adapter(self, adapter_id: int, path: str, max_rank: int) -> None:
        """Load an adapter, between steps. Raises ModelFileError, EngineError."""

    def unload_adapter(self, adapter_id: int) -> None:
        """Free an adapter that no sequence uses. Idempotent."""


class LoadOrder(msgspec.Struct, frozen=True):
    """The argument of the verb load_adapter, as JSON."""

    adapter_id: int
    path: str

    def text(self) -> str:
        """Return the order as the verb's argument."""
        return msgspec.json.encode(self).decode()


class EngineAdapters:
    """The loaded adapters of one engine, by id. All methods belong to the loop's thread once it runs."""

    def __init__(self, executor: object, config: AdapterConfig) -> None:
        """Load the adapters of the settings. Raises ConfigError, ModelFileError."""
        self._executor, self._max_rank = executor, config.max_lora_rank
        self._loaded: set[int] = set()
        for path in read_lora_modules(config.lora_modules).values():
            self._load(LoadOrder(adapter_id(find_adapter(path)), path))

    def attach(self, loop: EngineLoop) -> None:
        """Add the verbs and the check of requests to a loop that has not started."""
        loop.verbs |= {"load_adapter": self._on_load, "unload_adapter": self._on_unload}
        loop.check_request = self.check

    def check(self, request: Request) -> None:
        """Raise InvalidRequestError if the request's adapter is not loaded."""
        if request.adapter_id and request.adapter_id not in self._loaded:
            raise InvalidRequestError("the model's adapter is not loaded; load it again", "model")

    def _load(self, order: LoadOrder) -> None:
        if not isinstance(self._executor, AdaptedExecutor):
            raise ConfigError("this engine has no adapters: leave out --enable-lora and --lora-modules")
        if len(self._loaded) >= MAX_LOADED and order.adapter_id not in self._loaded:
            raise EngineError(f"{MAX_LOADED} adapters are loaded; unload one first")
        self._executor.load_adapter(order.adapter_id, order.path, self._max_rank)
        self._loaded.add(order.adapter_id)

    def _on_load(self, argument: str) -> object:
        try:
            self._load(msgspec.json.decode(argument, type=LoadOrder))
        except OctavoError as error:
            return error  # the caller's; the loop goes on
        except (OSError, MemoryError, msgspec.MsgspecError) as error:
            return EngineError(f"the adapter cannot be loaded: {error}")
        return True

    def _on_unload(self, argument: str) -> object:
        self._loaded.discard(int(argument))
        if isinstance(self._executor, AdaptedExecutor):
            self._executor.unload_adapter(int(argument))
        return True


class _Module(msgspec.Struct):
    name: str
    path: str
    base_model_name: str | None = None


def read_lora_modules(spelled: Iterable[str]) -> Mapping[str, str]:
    """Read texts of the form NAME=PATH, or vLLM's JSON objects; return paths by name. Raises ConfigError."""
    found: dict[str, str] = {}
    for text in spelled:
        name, _, path = text.partition("=")
        if text.startswith("{"):
            try:
                module = msgspec.json.decode(text, type=_Module)
            except msgspec.MsgspecError as error:
                raise ConfigError(f"--lora-modules is {text!r}, which cannot be read: {error}") from None
            name, path = module.name, module.path
        if not name or not path:
            raise ConfigError(f"--lora-modules is {text!r}; give NAME=PATH, such as sql=/models/sql-lora")
        if name in found:
            raise ConfigError(f"--lora-modules has two adapters of the name {name!r}; give each a name of its own")
        found[name] = path
    return found
