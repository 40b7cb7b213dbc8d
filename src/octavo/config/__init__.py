"""Every setting, declared once, in frozen sections.

An option is one field of a section (in engine.py, server.py or fleet.py). The field defines the option's flag,
OCTAVO_* variable, file key, help and checks.
Does not: read the machine or a model (assembly passes those facts in), or merge sources (sources.py does).
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config.engine import (
    CALL_PARSERS,
    DTYPES,
    QUANTIZATIONS,
    REASONING_PARSERS,
    AdapterConfig,
    CacheConfig,
    ChatConfig,
    ExecutionConfig,
    FlightConfig,
    ModelConfig,
    ParallelConfig,
    RecordingConfig,
    SchedulingConfig,
    SpeculationConfig,
    StatisticsConfig,
)
from octavo.config.fleet import FleetConfig, LinkConfig, ModelsConfig
from octavo.config.server import (
    AdmissionConfig,
    BatchConfig,
    McpConfig,
    MediaConfig,
    ResponsesConfig,
    RetryConfig,
    ServingConfig,
    TelemetryConfig,
    WebConfig,
)
from octavo.config.setting import Setting, section, settings_of
from octavo.errors import ConfigError

__all__ = [
    "CALL_PARSERS",
    "DTYPES",
    "ENGINE_SECTIONS",
    "QUANTIZATIONS",
    "REASONING_PARSERS",
    "SETTINGS",
    "AdapterConfig",
    "AdmissionConfig",
    "BatchConfig",
    "CacheConfig",
    "ChatConfig",
    "Config",
    "ExecutionConfig",
    "FleetConfig",
    "FlightConfig",
    "LinkConfig",
    "McpConfig",
    "MediaConfig",
    "ModelConfig",
    "ModelsConfig",
    "ParallelConfig",
    "RecordingConfig",
    "ResponsesConfig",
    "RetryConfig",
    "SchedulingConfig",
    "ServingConfig",
    "Setting",
    "SpeculationConfig",
    "StatisticsConfig",
    "TelemetryConfig",
    "WebConfig",
]
# Sections that apply to commands which run an engine in their own process, without a server.
ENGINE_SECTIONS = ("model", "chat", "cache", "scheduling", "execution", "parallel", "speculation")


@dataclass(frozen=True, slots=True)
class Config:
    """All settings."""

    model: ModelConfig = section(ModelConfig, "model", "model")
    chat: ChatConfig = section(ChatConfig, "conversations and chat templates", "model")
    cache: CacheConfig = section(CacheConfig, "KV cache", "memory and speed")
    scheduling: SchedulingConfig = section(SchedulingConfig, "scheduling", "memory and speed")
    execution: ExecutionConfig = section(ExecutionConfig, "execution", "memory and speed")
    parallel: ParallelConfig = section(ParallelConfig, "several devices", "memory and speed")
    speculation: SpeculationConfig = section(SpeculationConfig, "speculation", "memory and speed")
    adapters: AdapterConfig = section(AdapterConfig, "adapters", "model")
    serving: ServingConfig = section(ServingConfig, "serving", "server")
    web: WebConfig = section(WebConfig, "browsers, certificates, proxies", "server")
    admission: AdmissionConfig = section(AdmissionConfig, "admission", "server")
    media: MediaConfig = section(MediaConfig, "images", "server")
    retry: RetryConfig = section(RetryConfig, "retries and the journal", "server")
    responses: ResponsesConfig = section(ResponsesConfig, "stored responses", "server")
    mcp: McpConfig = section(McpConfig, "tools of MCP servers", "server")
    batch: BatchConfig = section(BatchConfig, "files and batches", "server")
    statistics: StatisticsConfig = section(StatisticsConfig, "statistics", "server")
    models: ModelsConfig = section(ModelsConfig, "several models", "server")
    fleet: FleetConfig = section(FleetConfig, "engines on other machines", "several machines")
    link: LinkConfig = section(LinkConfig, "connections between machines", "several machines")
    recording: RecordingConfig = section(RecordingConfig, "recording", "server")
    flight: FlightConfig = section(FlightConfig, "flight recorder", "server")
    telemetry: TelemetryConfig = section(TelemetryConfig, "traces and the log", "server")

    def __post_init__(self) -> None:
        names = ("num_blocks", "kv_cache_bytes", "kv_cache_tokens")
        sizes = [name for name in names if getattr(self.cache, name) is not None]
        if len(sizes) > 1:
            raise ConfigError(f"{' and '.join(sizes)} are both set; give one size for the KV pool")
        ranks = self.parallel
        if ranks.num_ranks % ranks.nnodes:
            raise ConfigError(
                f"nnodes is {ranks.nnodes}; {ranks.num_ranks} ranks (tensor-parallel-size {ranks.tensor_parallel_size} "
                f"times pipeline-parallel-size {ranks.pipeline_parallel_size}) cannot be divided among them evenly"
            )
        if ranks.node_rank >= ranks.nnodes:
            raise ConfigError(f"node-rank is {ranks.node_rank}; give less than nnodes, which is {ranks.nnodes}")


SETTINGS: tuple[Setting, ...] = settings_of(Config)
