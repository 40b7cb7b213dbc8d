"""The settings of browsers, certificates and proxies between a client and the server.

Owns: fields, defaults, help, flags.
Does not: read files or check them (server.cors, server.tls and server.root_path do).
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config.option import option


@dataclass(frozen=True, slots=True)
class WebConfig:
    """Browsers, certificates, proxies (docs/serving.md)."""

    allowed_hosts: tuple[str, ...] = option(
        (),
        "names under which this server may be addressed beside localhost and this machine's own, such as "
        "chat.example.com, where no key is set (checked with keys too once given); * = any",
        "--allowed-hosts",
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "origins whose pages may use this server, such as https://app.example.com; * = any (default: none)",
        "--allowed-origins",
    )
    allowed_methods: tuple[str, ...] = option(
        ("*",), "methods that those pages may use; * = those that there are", "--allowed-methods"
    )
    allowed_headers: tuple[str, ...] = option(
        ("*",), "headers that those pages may send; * = what they ask for", "--allowed-headers"
    )
    allow_credentials: bool = option(
        False, "let those pages send cookies and certificates; needs named origins", "--allow-credentials"
    )
    ssl_certfile: str | None = option(
        None, "PEM file of the server's certificate (and those it rests on): https alone is served", "--ssl-certfile"
    )
    ssl_keyfile: str | None = option(
        None, "PEM file of its private key, without a password (default: in --ssl-certfile)", "--ssl-keyfile"
    )
    ssl_ca_certs: str | None = option(
        None, "PEM file of authorities: clients must show a certificate that one of them signed", "--ssl-ca-certs"
    )
    root_path: str = option(
        "", "path in front of every endpoint where a proxy serves this under one, such as /octavo", "--root-path"
    )
