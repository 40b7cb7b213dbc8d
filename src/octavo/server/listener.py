"""The socket that clients connect to: bound before a model loads, so that a taken port is known at once.

Owns: opening it, the check of an exposed address, its URL.
Does not: accept, or import a web framework (the supervisor opens it).
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
from typing import TYPE_CHECKING

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.config import ServingConfig, WebConfig

BACKLOG = 2048
MIN_PUBLIC_KEY_CHARACTERS = 16  # of a key that clients on other machines can try to guess
_log = logging.getLogger(__name__)


class PortInUseError(ConfigError):
    """The port is in use by another program."""


def open_socket(serving: ServingConfig) -> socket.socket:
    """Return a listening socket. Raises ConfigError for a public address without a good key, or one that fails."""
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
    """Refuse a public address without a key, or with a key that is easily guessed. Raises ConfigError."""
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
    """Return True if other machines can reach the address, and --insecure is not given."""
    return not (is_loopback(serving.host) or serving.insecure)


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url_of(listener: socket.socket, web: WebConfig | None = None) -> str:
    """Return the server's URL for clients on this machine."""
    scheme = "https" if web is not None and web.ssl_certfile is not None else "http"
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "localhost"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
