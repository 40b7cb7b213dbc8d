"""The settings of the HTTP side: one option a line.

Owns: fields, defaults, help, ranges, flags. Does not: look at the machine or a model.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config.option import option


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """Address, keys, processes and shutdown of the server."""

    host: str = option("127.0.0.1", "address to listen on", "--host")
    port: int = option(8000, "port to listen on", "--port", within=(0, 65535))
    api_key: tuple[str, ...] = option(
        (),
        "key that clients must present; give several for any of them; better in OCTAVO_API_KEY, which no history keeps",
        "--api-key",
        secret=True,
    )
    api_key_file: str | None = option(
        None, "TOML or YAML file of named keys with their tenants, limits and priorities", "--api-key-file"
    )
    tenant_weight: tuple[str, ...] = option(
        (),
        "TENANT=WEIGHT, its share under the fair policy; the tenant of an --api-key is its SHA-256 in hex; give several",
        "--tenant-weight",
    )
    strict_fields: bool = option(
        False,
        "refuse requests with fields that are not known here (default: ignore them and say so in X-Octavo-Ignored)",
        "--strict-fields",
    )
    insecure: bool = option(False, "allow an address other than loopback without a key", "--insecure")
    in_process: bool = option(False, "run the engine inside the API process (no crash protection)", "--in-process")
    standby: bool = option(
        False, "keep a second engine open, which takes over at once when the first one dies", "--standby"
    )
    drain_timeout_s: float = option(
        30.0, "seconds that open requests get at shutdown", "--shutdown-timeout", within=(0.0, None)
    )
    admin_socket: str | None = option(
        None, "path of the Unix socket for octavo admin (default: in a folder of this user's)", "--admin-socket"
    )

    @property
    def has_keys(self) -> bool:
        """True if clients must present a key."""
        return bool(self.api_key or self.api_key_file)


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """How many requests may wait, and how long (docs/limits.md)."""

    max_waiting: int = option(
        1024,
        "sequences that may wait for a free slot before new requests get 429; each choice of a prompt is one",
        "--max-queue-size",
        within=(1, None),
    )
    max_waiting_tokens: int = option(
        4_194_304,
        "prompt tokens of requests without a first token before new ones get 429",
        "--max-queue-tokens",
        within=(1, None),
    )
    max_queue_time_s: float | None = option(
        None,
        "seconds after which a request that has not started gets 408, and 429 at once where it could not start by then "
        "(default: no bound)",
        "--max-queue-time",
        within=(0.001, None),
    )


@dataclass(frozen=True, slots=True)
class RetryConfig:
    """What is kept of requests with an Idempotency-Key, for retries (docs/journal.md)."""

    journal: str | None = option(
        None, "folder of the journal, which carries requests with an Idempotency-Key over a restart", "--journal"
    )
    journal_sync: str = option(
        "none",
        "when the journal waits for the disk: none (it outlives this process), group (the machine too)",
        "--journal-sync",
        choices=("none", "group"),
    )
    keep_s: float = option(
        600.0, "seconds that a finished answer is kept for a retry", "--journal-keep", within=(0.0, 86_400.0)
    )
    max_kept: int = option(
        10_000, "requests with an Idempotency-Key that are kept", "--max-kept-requests", within=(1, None)
    )
    max_kept_bytes: int = option(
        256 << 20, "bytes of finished answers that are kept, such as 256M", "--max-kept-bytes", within=(0, None)
    )
    orphan_timeout_s: float = option(
        120.0,
        "seconds that a request with an Idempotency-Key goes on while nobody reads it",
        "--orphan-timeout",
        within=(0.0, 86_400.0),
    )


@dataclass(frozen=True, slots=True)
class ResponsesConfig:
    """What is kept of the answers of /v1/responses, in memory only (docs/apis.md)."""

    max_stored_responses: int = option(
        1000, "responses that are kept for previous_response_id; 0 = none", "--max-stored-responses", within=(0, None)
    )
    max_stored_bytes: int = option(
        64 << 20, "bytes of responses that are kept, such as 64M", "--max-stored-bytes", within=(0, None)
    )
    keep_responses_s: float = option(
        86_400.0,
        "seconds that a response is kept after its last use",
        "--keep-responses",
        within=(0.0, 2_592_000.0),
    )


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """Files and batches of clients (docs/batch.md)."""

    batch_dir: str | None = option(
        None, "folder of /v1/files and /v1/batches, which are off without one", "--batch-dir"
    )
    batch_concurrency: int | None = option(
        None,
        "requests of batches open at once (default: half of --max-num-seqs)",
        "--batch-concurrency",
        within=(1, None),
    )
    max_upload_bytes: int = option(
        64 << 20, "bytes of one uploaded file, such as 64M", "--max-upload-bytes", within=(1, None)
    )
    max_batch_bytes: int = option(
        4 << 30, "bytes of all uploaded files, such as 4G", "--max-batch-bytes", within=(1, None)
    )
    max_files: int = option(1000, "files that are kept", "--max-batch-files", within=(1, 100_000))
    max_batch_requests: int = option(50_000, "requests of one batch", "--max-batch-requests", within=(1, None))
    max_pending_batches: int = option(
        64, "batches of one tenant that are not over", "--max-pending-batches", within=(1, None)
    )
    batch_keep_s: float = option(
        30 * 86_400.0, "seconds that files and finished batches are kept", "--batch-keep", within=(1.0, None)
    )


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """Traces and the log; metrics have no settings here (docs/observing.md)."""

    otlp_traces_endpoint: str | None = option(
        None, "URL that takes traces, such as http://127.0.0.1:4318/v1/traces (extra: otel)", "--otlp-traces-endpoint"
    )
    log_format: str = option("text", "form of the lines on stderr", "--log-format", choices=("text", "json"))
    log_level: str = option(
        "warning",
        "least level of what is logged; lines at start-up and while busy are told at any (see --quiet)",
        "--log-level",
        choices=("debug", "info", "warning", "error"),
    )
