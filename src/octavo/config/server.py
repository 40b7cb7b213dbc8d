"""The settings of the HTTP server.

Owns: sections and their options. Does not: read or check the files that options name (server.web_settings does).
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config.setting import option


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """The server's address, API keys, processes and shutdown."""

    host: str = option("127.0.0.1", "address to listen on", "--host=ADDRESS", brief="address to listen on")
    port: int = option(
        8000,
        "port to listen on; 0 = any free one",
        "--port",
        within=(0, 65535),
        brief="port to listen on; 0 = any free one",
    )
    api_key: tuple[str, ...] = option(
        (),
        "key that clients must present, may be repeated; OCTAVO_API_KEY keeps it out of the shell's history",
        "--api-key",
        brief="key that clients must present",
        is_secret=True,
    )
    api_key_file: str | None = option(
        None,
        "TOML or YAML file of named keys with their tenants, limits and priorities",
        "--api-key-file=FILE",
        brief="named keys with tenants and limits",
    )
    tenant_weight: tuple[str, ...] = option(
        (),
        "TENANT=WEIGHT, its share under the fair policy, may be repeated; the tenant of an --api-key is its SHA-256 in "
        "hex",
        "--tenant-weight",
    )
    strict_fields: bool = option(
        False,
        "refuse requests with unknown fields (default: ignore them and list them in X-Octavo-Ignored)",
        "--strict-fields",
    )
    insecure: bool = option(False, "allow an address other than loopback without a key", "--insecure")
    in_process: bool = option(False, "run the engine inside the API process (no crash protection)", "--in-process")
    standby: bool = option(
        False,
        "keep a second engine open, which takes over at once when the first one dies",
        "--standby",
        brief="keep a second engine ready to take over",
    )
    drain_timeout_s: float = option(
        30.0, "seconds that open requests may take at shutdown", "--shutdown-timeout", within=(0.0, None)
    )
    admin_socket: str | None = option(
        None, "path of the Unix socket for octavo admin (default: in a folder of this user's)", "--admin-socket=PATH"
    )

    @property
    def has_keys(self) -> bool:
        """True if clients must send an API key."""
        return bool(self.api_key or self.api_key_file)


@dataclass(frozen=True, slots=True)
class WebConfig:
    """Browsers, certificates, proxies (docs/serving.md)."""

    allowed_hosts: tuple[str, ...] = option(
        (),
        "host names that requests may have beside localhost and this machine's own, such as chat.example.com; checked "
        "if no key is set, or if this is given; * = any",
        "--allowed-hosts",
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "origins of web pages that may use this server, such as https://app.example.com; * = any (default: none)",
        "--allowed-origins",
        brief="origins of web pages that may use this (CORS)",
    )
    allowed_methods: tuple[str, ...] = option(("*",), "methods that those pages may use; * = all", "--allowed-methods")
    allowed_headers: tuple[str, ...] = option(
        ("*",), "headers that those pages may send; * = those they request", "--allowed-headers"
    )
    allow_credentials: bool = option(
        False, "let those pages send cookies and certificates; needs named origins", "--allow-credentials"
    )
    ssl_certfile: str | None = option(
        None,
        "PEM file of the server's certificate and its chain; only https is served",
        "--ssl-certfile=FILE",
        brief="serve https with this certificate",
    )
    ssl_keyfile: str | None = option(
        None, "PEM file of the private key, without a password (default: in --ssl-certfile)", "--ssl-keyfile=FILE"
    )
    ssl_ca_certs: str | None = option(
        None, "PEM file of authorities; clients must present a certificate signed by one of them", "--ssl-ca-certs=FILE"
    )
    root_path: str = option("", "path prefix under which a proxy serves this, such as /octavo", "--root-path")


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """How many requests may wait, and for how long (docs/limits.md)."""

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
        "seconds after which a request that has not started gets 408, or 429 at once if it could not start by then "
        "(default: no limit)",
        "--max-queue-time",
        within=(0.001, None),
    )


@dataclass(frozen=True, slots=True)
class MediaConfig:
    """Images in requests (docs/models.md)."""

    limit_mm_per_prompt: str = option("image=16", "maximum images of a request, as image=N", "--limit-mm-per-prompt")
    allowed_media_domains: tuple[str, ...] = option(
        (),
        "hosts (HOST, or HOST:PORT if the port is not 80 or 443) from which images are fetched; * = any host with "
        "public addresses (default: none, so that images must be data URLs)",
        "--allowed-media-domains",
        takes_words=True,
    )
    allow_private_media: bool = option(
        False,
        "fetch images also from private, loopback and link-local addresses of those hosts",
        "--allow-private-media-addresses",
    )
    media_timeout_s: float = option(
        5.0, "seconds that fetching an image may take, with its redirects", "--media-timeout", within=(0.1, 120.0)
    )
    max_media_bytes: int = option(
        16 << 20, "maximum bytes of an image file, such as 16M", "--max-media-bytes", within=(1, 32 << 20)
    )
    max_media_pixels: int = option(
        16 << 20, "maximum pixels of an image, such as 16M", "--max-media-pixels", within=(1, 128 << 20)
    )


@dataclass(frozen=True, slots=True)
class RetryConfig:
    """Storage of requests with an Idempotency-Key and their answers, for retries (docs/journal.md)."""

    journal: str | None = option(
        None, "folder of the journal, which keeps requests with an Idempotency-Key across a restart", "--journal=DIR"
    )
    journal_sync: str = option(
        "none",
        "what the journal survives: none (a crash of this process), group (of the machine too: it waits for the disk), "
        "standby (the loss of the machine: it waits for the standby front, while one is connected)",
        "--journal-sync",
        choices=("none", "group", "standby"),
    )
    keep_s: float = option(
        600.0, "seconds for which a finished answer is kept for a retry", "--journal-keep", within=(0.0, 86_400.0)
    )
    max_kept: int = option(
        10_000, "maximum requests with an Idempotency-Key that are kept", "--max-kept-requests", within=(1, None)
    )
    max_kept_bytes: int = option(
        256 << 20, "maximum bytes of finished answers that are kept, such as 256M", "--max-kept-bytes", within=(0, None)
    )
    orphan_timeout_s: float = option(
        120.0,
        "seconds for which a request with an Idempotency-Key continues without a reader",
        "--orphan-timeout",
        within=(0.0, 86_400.0),
    )


@dataclass(frozen=True, slots=True)
class ResponsesConfig:
    """Storage of the answers of /v1/responses, in memory only (docs/apis.md)."""

    max_stored_responses: int = option(
        1000,
        "maximum responses that are kept for previous_response_id; 0 = none",
        "--max-stored-responses",
        within=(0, None),
    )
    max_stored_bytes: int = option(
        64 << 20, "maximum bytes of responses that are kept, such as 64M", "--max-stored-bytes", within=(0, None)
    )
    keep_responses_s: float = option(
        86_400.0,
        "seconds for which a response is kept after its last use",
        "--keep-responses",
        within=(0.0, 2_592_000.0),
    )


@dataclass(frozen=True, slots=True)
class McpConfig:
    """Servers of the Model Context Protocol, whose tools models may call (docs/structured-output.md)."""

    mcp: tuple[str, ...] = option(
        (),
        "NAME=COMMAND or NAME=URL of an MCP server whose tools models may call, may be repeated: a command is started, "
        "a URL is streamable HTTP (extra: mcp)",
        "--mcp",
        brief="MCP server whose tools models may call",
        heading="model",
    )
    mcp_config: str | None = option(
        None,
        'JSON file of MCP servers, {"mcpServers": {NAME: {"command", "args", "env"} or {"url", "headers"}}}',
        "--mcp-config=FILE",
    )
    mcp_timeout_s: float = option(
        60.0, "seconds that one call of a tool of an MCP server may take", "--mcp-timeout", within=(0.1, 3600.0)
    )


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """Files and batches of clients (docs/batch.md)."""

    batch_dir: str | None = option(
        None, "folder of /v1/files and /v1/batches, which are off without it", "--batch-dir=DIR"
    )
    batch_concurrency: int | None = option(
        None,
        "maximum open requests of batches (default: half of --max-num-seqs)",
        "--batch-concurrency",
        within=(1, None),
    )
    max_upload_bytes: int = option(
        64 << 20, "maximum bytes of one uploaded file, such as 64M", "--max-upload-bytes", within=(1, None)
    )
    max_batch_bytes: int = option(
        4 << 30, "maximum bytes of all uploaded files, such as 4G", "--max-batch-bytes", within=(1, None)
    )
    max_files: int = option(1000, "maximum number of files", "--max-batch-files", within=(1, 100_000))
    max_batch_requests: int = option(50_000, "maximum requests of one batch", "--max-batch-requests", within=(1, None))
    max_pending_batches: int = option(
        64, "maximum unfinished batches of one tenant", "--max-pending-batches", within=(1, None)
    )
    batch_keep_s: float = option(
        30 * 86_400.0, "seconds for which files and finished batches are kept", "--batch-keep", within=(1.0, None)
    )


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """Traces and the log (docs/observing.md). Metrics have no settings in this section."""

    otlp_traces_endpoint: str | None = option(
        None,
        "URL that takes traces, such as http://127.0.0.1:4318/v1/traces (extra: otel)",
        "--otlp-traces-endpoint=URL",
    )
    log_format: str = option("text", "format of the lines on stderr", "--log-format", choices=("text", "json"))
    log_level: str = option(
        "warning",
        "lowest level that is logged; lines at start-up and while busy are printed at any level (see --quiet)",
        "--log-level",
        choices=("debug", "info", "warning", "error"),
    )
