"""Octavo: LLM inference and serving. Public names, loaded on first use; importing octavo never loads torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.assembly import LLM, AsyncLLM
    from octavo.config import Config
    from octavo.core.policy import Policy, register_policy
    from octavo.core.request import FinishReason, Request, SamplingParams
    from octavo.core.request_state import RequestState
    from octavo.errors import (
        AdmissionError,
        CapacityError,
        ConfigError,
        DuplicateRequestError,
        EngineDeadError,
        EngineError,
        InvalidRequestError,
        ModelFileError,
        OctavoError,
        QueueFullError,
        RequestError,
        UnknownModelError,
    )
    from octavo.frontend.outputs import (
        ClassificationOutput,
        CompletionOutput,
        EmbeddingOutput,
        RequestOutput,
        ScoreOutput,
    )
    from octavo.frontend.sessions import TextDelta, Usage
    from octavo.grammar.compile import grammar_from

__version__ = "0.1.0"

_HOMES = {
    "octavo.assembly": ("LLM", "AsyncLLM"),
    "octavo.config": ("Config",),
    "octavo.core.policy": ("Policy", "register_policy"),
    "octavo.core.request": ("FinishReason", "Request", "SamplingParams"),
    "octavo.core.request_state": ("RequestState",),
    "octavo.frontend.outputs": (
        "ClassificationOutput",
        "CompletionOutput",
        "EmbeddingOutput",
        "RequestOutput",
        "ScoreOutput",
    ),
    "octavo.frontend.sessions": ("TextDelta", "Usage"),
    "octavo.errors": (
        "AdmissionError",
        "CapacityError",
        "ConfigError",
        "DuplicateRequestError",
        "EngineDeadError",
        "EngineError",
        "InvalidRequestError",
        "ModelFileError",
        "OctavoError",
        "QueueFullError",
        "RequestError",
        "UnknownModelError",
    ),
    "octavo.frontend.adapters": ("LoRARequest",),
    "octavo.grammar.compile": ("grammar_from",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "LLM",
    "AdmissionError",
    "AsyncLLM",
    "CapacityError",
    "ClassificationOutput",
    "CompletionOutput",
    "Config",
    "ConfigError",
    "DuplicateRequestError",
    "EmbeddingOutput",
    "EngineDeadError",
    "EngineError",
    "FinishReason",
    "InvalidRequestError",
    "LoRARequest",
    "ModelFileError",
    "OctavoError",
    "Policy",
    "QueueFullError",
    "Request",
    "RequestError",
    "RequestOutput",
    "RequestState",
    "SamplingParams",
    "ScoreOutput",
    "TextDelta",
    "UnknownModelError",
    "Usage",
    "grammar_from",
    "register_policy",
]


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted((*__all__, "__version__"))
