"""The socket that clients connect to, and the checks of its settings before anything starts.

Owns: opening the socket (before a model loads, so that a taken port fails at once); its URL; the event loop's type; the
checks of public addresses, hosts, origins and the root path; the TLS files and uvicorn's options for them.
Does not: accept connections, or import a web framework: the supervisor and the api process import this module early.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import re
import socket
import ssl
import sys
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError
from octavo.fleet.security import no_password
from octavo.machine import is_loopback

if TYPE_CHECKING:
    from octavo.config import ServingConfig, WebConfig

TOKENS = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(\s*,\s*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")  # names of headers or methods
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,*?#]+")
_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")


def check_web(web: WebConfig) -> None:
    """Refuse settings that are invalid, unsafe or have no effect. Raises ConfigError naming the flag."""
    _check_hosts(web)
    _check_cors(web)
    _check_root_path(web.root_path)
    _check_tls(web)


def _check_hosts(web: WebConfig) -> None:
    """Refuse values that are neither a host name nor an address. Raises ConfigError."""
    for host in web.allowed_hosts:
        if host != "*" and not (_NAME.fullmatch(host) or _is_address(host)):
            raise ConfigError(
                f"--allowed-hosts is {host!r}; give names or addresses without scheme, port or path, such as "
                "chat.example.com, several with commas, or *"
            )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _check_cors(web: WebConfig) -> None:
    """Refuse invalid origins and names, and credentials together with any origin. Raises ConfigError."""
    for origin in web.allowed_origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--allowed-origins is {origin!r}; give scheme://host[:port] without a path, several with commas, or *"
            )
    for flag, values in (("--allowed-methods", web.allowed_methods), ("--allowed-headers", web.allowed_headers)):
        if not all(TOKENS.fullmatch(value) for value in values):
            raise ConfigError(f"{flag} is {', '.join(values)!r}; give names with commas between them, or *")
    if web.allow_credentials and ("*" in web.allowed_origins or not web.allowed_origins):
        raise ConfigError("--allow-credentials needs --allowed-origins with the names of the sites that are meant")


def _check_root_path(path: str) -> None:
    """Refuse a value that is not a path. Raises ConfigError."""
    is_path = _PATH.fullmatch(path) is not None and not {".", ".."} & set(path.split("/"))
    if path and not is_path:
        raise ConfigError(
            f"--root-path is {path!r}; give a path such as /octavo: it begins with a slash, ends without one, and has "
            "letters, digits, dots, dashes, underscores and tildes"
        )


def _check_tls(web: WebConfig) -> None:
    """Load the TLS files as uvicorn will. Raises ConfigError naming the flag and the file."""
    if web.ssl_certfile is None:
        for flag, path in (("--ssl-keyfile", web.ssl_keyfile), ("--ssl-ca-certs", web.ssl_ca_certs)):
            if path is not None:
                raise ConfigError(f"{flag} is {path!r} without --ssl-certfile; give the server's certificate too")
        return
    for flag, path in (
        ("--ssl-certfile", web.ssl_certfile),
        ("--ssl-keyfile", web.ssl_keyfile),
        ("--ssl-ca-certs", web.ssl_ca_certs),
    ):
        _check_readable(flag, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(web.ssl_certfile, web.ssl_keyfile, password=no_password)
    except (ssl.SSLError, ValueError) as error:
        key = web.ssl_keyfile or web.ssl_certfile
        raise ConfigError(
            f"--ssl-certfile {web.ssl_certfile!r} and its key in {key!r} do not work ({_reason(error)}); give PEM "
            "files of a certificate and of its own private key, without a password"
        ) from None
    if web.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(web.ssl_ca_certs)
        except ssl.SSLError as error:
            message = f"--ssl-ca-certs {web.ssl_ca_certs!r} holds no certificates ({_reason(error)}); give a PEM file"
            raise ConfigError(message) from None


def tls_options(web: WebConfig) -> dict[str, Any]:
    """Return uvicorn's TLS options; empty without a certificate."""
    if web.ssl_certfile is None:
        return {}
    options: dict[str, Any] = {"ssl_certfile": web.ssl_certfile, "ssl_keyfile": web.ssl_keyfile}
    if web.ssl_ca_certs is not None:
        options |= {"ssl_ca_certs": web.ssl_ca_certs, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return options


def _check_readable(flag: str, path: str | None) -> None:
    if path is None:
        return
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        raise ConfigError(f"{flag} is {path!r}, which cannot be read ({error.strerror}); give a PEM file") from None


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)


BACKLOG = 2048
MIN_PUBLIC_KEY_CHARACTERS = 16  # other machines can try to guess a key
_log = logging.getLogger(__name__)


class PortInUseError(ConfigError):
    """The port is in use by another program."""


def open_socket(serving: ServingConfig) -> socket.socket:
    """Return a listening socket. Raises ConfigError if the address is public without a good key, or if it fails."""
    _check_keys(serving)
    family = socket.AF_INET6 if ":" in serving.host else socket.AF_INET
    try:
        listener = socket.create_server((serving.host, serving.port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"port {serving.port} is in use; give another --port, or --port 0 for any free one"
            raise PortInUseError(message) from None
        is_name = isinstance(error, socket.gaierror)
        reason = "the name is not known" if is_name else os.strerror(error.errno or 0).lower()
        remedy = "give a port above 1023" if error.errno == errno.EACCES else "give an address of this machine"
        raise ConfigError(f"cannot listen on {serving.host}, port {serving.port}: {reason}; {remedy}") from None
    listener.setblocking(False)
    return listener


def _check_keys(serving: ServingConfig) -> None:
    """Refuse a public address without a key or with a key that is easy to guess. Raises ConfigError."""
    if is_public(serving) and not serving.has_keys:
        raise ConfigError(
            f"--host is {serving.host!r} and there is no key, so anyone who reaches this address could use it; give "
            "--api-key-file, or a key in the variable OCTAVO_API_KEY, or --insecure if that is meant"
        )
    if not all(key.strip() for key in serving.api_key):
        raise ConfigError("an --api-key is empty, so a client without one would get in; give a key")
    shortest = min(map(len, serving.api_key), default=MIN_PUBLIC_KEY_CHARACTERS)
    if shortest >= MIN_PUBLIC_KEY_CHARACTERS:
        return
    message = f"an --api-key has {shortest} characters, and can be guessed"
    remedy = f"give one of at least {MIN_PUBLIC_KEY_CHARACTERS}, such as openssl rand -hex 16 makes"
    if is_public(serving):
        raise ConfigError(f"{message}, while --host is {serving.host!r}; {remedy}")
    _log.warning("%s; %s", message, remedy)


def is_public(serving: ServingConfig) -> bool:
    """Return True if other machines can reach the address and --insecure is not set."""
    return not (is_loopback(serving.host) or serving.insecure)


def url_of(listener: socket.socket, web: WebConfig | None = None) -> str:
    """Return the server's URL for clients on this machine."""
    scheme = "https" if web is not None and web.ssl_certfile is not None else "http"
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "localhost"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop for asyncio.Runner(loop_factory=...): uvloop's, or asyncio's on Windows."""
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop  # not installed on every platform

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
