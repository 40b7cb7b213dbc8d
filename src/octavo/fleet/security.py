"""What secures the connections between machines: addresses, the shared token, TLS.

Owns: reading the token and the PEM files; the refusal of an address that other machines reach without a token.
Does not: the handshake (octavo.sealing), or open connections.
On loopback without a token, the listener writes a random one to this user's folder of servers (mode 0700), and a
dialler of the same user reads it, so that frames are sealed in any case.
"""

from __future__ import annotations

import os
import secrets
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from octavo.config import LinkConfig
from octavo.errors import ConfigError
from octavo.machine import is_loopback
from octavo.sealing import MIN_TOKEN_BYTES

_MAX_TOKEN_BYTES = 4096
_REMEDY = (
    "set OCTAVO_FLEET_TOKEN or --fleet-token-file to the same secret on all machines, such as openssl rand -hex 16 "
    "makes"
)


class HostPort(NamedTuple):
    """A host and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, flag: str) -> HostPort:
    """Parse HOST:PORT; an IPv6 address is in brackets. Raises ConfigError naming the flag."""
    host, _, port = text.strip().rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535 or "/" in host:
        raise ConfigError(f"{flag} is {text!r}; give HOST:PORT, such as 10.0.0.5:8765 or [::1]:8765")
    return HostPort(host, int(port))


@dataclass(frozen=True, slots=True)
class LinkSecurity:
    """The token and the TLS files of this machine's connections. `folder` is this user's folder of servers."""

    folder: Path
    token: bytes | None = None
    cert: str | None = None
    key: str | None = None
    ca: str | None = None

    @classmethod
    def of(cls, link: LinkConfig, folder: Path) -> LinkSecurity:
        """Read the token's file, and check the settings. Raises ConfigError."""
        token = link.fleet_token.encode() if link.fleet_token is not None else None
        name = "--fleet-token"
        if link.fleet_token_file is not None:
            if token is not None:
                raise ConfigError("--fleet-token (OCTAVO_FLEET_TOKEN) and --fleet-token-file are both set; give one")
            name, token = "--fleet-token-file", _read_token(link.fleet_token_file)
        if token is not None and len(token) < MIN_TOKEN_BYTES:
            raise ConfigError(
                f"{name} has {len(token)} bytes, which can be guessed; give at least {MIN_TOKEN_BYTES}, "
                "such as openssl rand -hex 16 makes"
            )
        security = cls(folder, token, link.fleet_tls_cert, link.fleet_tls_key, link.fleet_tls_ca)
        if security.uses_tls:  # report unusable files at once
            security.client_context()
        return security

    @property
    def uses_tls(self) -> bool:
        """True if one of the TLS settings is given."""
        return any(path is not None for path in (self.cert, self.key, self.ca))

    def check(self, address: HostPort, flag: str) -> None:
        """Refuse an address that other machines reach without a token. Raises ConfigError."""
        if self.token is None and not is_loopback(address.host):
            raise ConfigError(
                f"{flag} is {str(address)!r} and there is no token, so anyone who reaches it could read and write "
                f"requests; {_REMEDY}"
            )

    def listening_token(self, port: int) -> bytes:
        """Return the token for connections to a port here; without one, write a random one for this user's diallers."""
        if self.token is not None:
            return self.token
        token = secrets.token_hex(16).encode()
        path = self._token_path(port)
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(token)
        return token

    def dialling_token(self, address: HostPort) -> bytes:
        """Return the token for a connection to an address. Raises ConfigError if there is none."""
        if self.token is not None:
            return self.token
        path = self._token_path(address.port)
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077:
                    return file.read(_MAX_TOKEN_BYTES)
        except OSError:
            pass
        raise ConfigError(f"nothing of this user waits for engines or fronts at {address} here; start it, or {_REMEDY}")

    def forget(self, port: int) -> None:
        """Remove the random token of a port that is closed."""
        if self.token is None:
            self._token_path(port).unlink(missing_ok=True)

    def server_context(self) -> ssl.SSLContext | None:
        """Return the TLS context of a listener; None without TLS. Raises ConfigError."""
        if not self.uses_tls:
            return None
        if self.cert is None:
            raise ConfigError("--fleet-tls-cert is missing: a machine that waits for connections needs a certificate")
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client_context(self) -> ssl.SSLContext | None:
        """Return the TLS context of a dialler; None without TLS. The other side must have a certificate for its name.

        Raises ConfigError.
        """
        return self._context(ssl.PROTOCOL_TLS_CLIENT) if self.uses_tls else None

    def _context(self, protocol: ssl._SSLMethod) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.key is not None and self.cert is None:
            raise ConfigError(f"--fleet-tls-key is {self.key!r} without --fleet-tls-cert; give the certificate too")
        try:
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key, password=no_password)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--fleet-tls-cert {self.cert!r} and its key {self.key or self.cert!r} cannot be used ({error}); give "
                "PEM files of a certificate and of its own private key, without a password"
            ) from None
        try:
            if self.ca is not None:
                context.load_verify_locations(self.ca)
                context.verify_mode = ssl.CERT_REQUIRED  # of a listener: diallers need a certificate too
            elif protocol is ssl.PROTOCOL_TLS_CLIENT:
                context.load_default_certs()
        except OSError as error:
            raise ConfigError(f"--fleet-tls-ca {self.ca!r} cannot be used ({error}); give a PEM file") from None
        return context

    def _token_path(self, port: int) -> Path:
        return self.folder / f"link-{port}.token"


def _read_token(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_TOKEN_BYTES).strip()
    except OSError as error:
        raise ConfigError(
            f"--fleet-token-file is {path!r}, which cannot be read ({error.strerror}); give a file with the token"
        ) from None


def no_password() -> str:
    """Raise ValueError. Without this callback, OpenSSL would ask for the password on the terminal."""
    raise ValueError("the key has a password")
