"""Every setting, in frozen parts, with its flag: the one place where an option is defined.

Owns: the parts put together; their fields are in engine_parts, server_parts and web_parts (flags, OCTAVO_* and file
keys derive from them).
Does not: look at the machine or a model (assembly passes those facts in), read files, or decide between sources
(see settings).
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config.engine_parts import (
    CALL_PARSERS,
    DTYPES,
    QUANTIZATIONS,
    REASONING_PARSERS,
    CacheConfig,
    ChatConfig,
    ExecutionConfig,
    ModelConfig,
    RecordingConfig,
    SchedulingConfig,
    SpeculationConfig,
    StatisticsConfig,
)
from octavo.config.server_parts import (
    AdmissionConfig,
    BatchConfig,
    ResponsesConfig,
    RetryConfig,
    ServingConfig,
    TelemetryConfig,
)
from octavo.config.web_parts import WebConfig
from octavo.errors import ConfigError

__all__ = [
    "CALL_PARSERS",
    "DTYPES",
    "QUANTIZATIONS",
    "REASONING_PARSERS",
    "AdmissionConfig",
    "BatchConfig",
    "CacheConfig",
    "ChatConfig",
    "Config",
    "ExecutionConfig",
    "ModelConfig",
    "RecordingConfig",
    "ResponsesConfig",
    "RetryConfig",
    "SchedulingConfig",
    "ServingConfig",
    "SpeculationConfig",
    "StatisticsConfig",
    "TelemetryConfig",
    "WebConfig",
]


@dataclass(frozen=True, slots=True)
class Config:
    """All settings."""

    model: ModelConfig = ModelConfig()
    chat: ChatConfig = ChatConfig()
    cache: CacheConfig = CacheConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    execution: ExecutionConfig = ExecutionConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    serving: ServingConfig = ServingConfig()
    web: WebConfig = WebConfig()
    admission: AdmissionConfig = AdmissionConfig()
    retry: RetryConfig = RetryConfig()
    responses: ResponsesConfig = ResponsesConfig()
    batch: BatchConfig = BatchConfig()
    statistics: StatisticsConfig = StatisticsConfig()
    recording: RecordingConfig = RecordingConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    def __post_init__(self) -> None:
        names = ("num_blocks", "kv_cache_bytes", "kv_cache_tokens")
        sizes = [name for name in names if getattr(self.cache, name) is not None]
        if len(sizes) > 1:
            raise ConfigError(f"{' and '.join(sizes)} are both set; give one size for the KV pool")
