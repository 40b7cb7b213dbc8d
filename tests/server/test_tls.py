"""HTTPS: a real server with a certificate, and files that do not work are told of at the start."""

import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from octavo.config import Config, WebConfig
from octavo.errors import ConfigError
from octavo.server.http.limits import HttpLimits
from octavo.server.http.listener import check_web, tls_options
from tests.server.test_run import Running, running

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")


def certify(folder: Path, name: str, *options: str) -> WebConfig:
    """A key and a certificate for localhost, signed by itself."""
    key, certificate = folder / f"{name}.key", folder / f"{name}.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *names, *files, *(options or ("-nodes",))], check=True, capture_output=True)
    return WebConfig(ssl_certfile=str(certificate), ssl_keyfile=str(key))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def web(folder: Path) -> WebConfig:
    return certify(folder, "server")


@pytest.fixture
def server(web: WebConfig) -> Iterator[Running]:
    with running(Config(web=web)) as found:
        yield found


def test_answers_and_streams_over_https(server: Running, web: WebConfig) -> None:
    assert server.url.startswith("https://")
    trusting = ssl.create_default_context(cafile=web.ssl_certfile)
    body = {"messages": [{"role": "user", "content": "hi"}]}
    with httpx.Client(base_url=server.url, verify=trusting, timeout=60) as client:
        assert client.get("/livez").status_code == 200
        text = client.post("/v1/chat/completions", json={**body, "stream": True}).text
        assert text.endswith("data: [DONE]\n\n")
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url + "/livez")
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url.replace("https", "http") + "/livez")


def test_a_handshake_that_does_not_end_is_cut(web: WebConfig) -> None:
    """It had asyncio's 60 s, in which nothing counts it."""
    with running(Config(web=web), limits=HttpLimits(handshake_timeout_s=0.3)) as found:
        port = int(found.url.rpartition(":")[2])
        for sent in (b"", b"\x16\x03\x01\x02\x00\x01"):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as sock, suppress(ConnectionError):
                sock.sendall(sent)
                assert sock.recv(100) == b""
        trusting = ssl.create_default_context(cafile=web.ssl_certfile)
        assert httpx.get(found.url + "/livez", verify=trusting).status_code == 200


def test_with_authorities_a_client_shows_its_certificate(folder: Path, web: WebConfig) -> None:
    mine = certify(folder, "client")
    asking = WebConfig(ssl_certfile=web.ssl_certfile, ssl_keyfile=web.ssl_keyfile, ssl_ca_certs=mine.ssl_certfile)
    check_web(asking)
    assert tls_options(asking)["ssl_cert_reqs"] == ssl.CERT_REQUIRED
    trusting = ssl.create_default_context(cafile=web.ssl_certfile)
    with running(Config(web=asking)) as found:
        with pytest.raises(httpx.TransportError):
            httpx.get(found.url + "/livez", verify=trusting)
        assert mine.ssl_certfile is not None
        trusting.load_cert_chain(mine.ssl_certfile, mine.ssl_keyfile)
        assert httpx.get(found.url + "/livez", verify=trusting).status_code == 200


def test_files_that_do_not_work_are_told_of(folder: Path, web: WebConfig) -> None:
    other = certify(folder, "other")
    locked = certify(folder, "locked", "-passout", "pass:secret")
    certificate, key = web.ssl_certfile, web.ssl_keyfile
    empty = folder / "empty.pem"
    empty.touch()
    cases = (
        (WebConfig(ssl_certfile="/no/such.pem"), "--ssl-certfile is '/no/such.pem', which cannot be read"),
        (WebConfig(ssl_certfile=certificate, ssl_keyfile="/no/key"), "--ssl-keyfile is '/no/key', which cannot be"),
        (WebConfig(ssl_certfile=certificate, ssl_keyfile=other.ssl_keyfile), "do not work .*MISMATCH"),
        (WebConfig(ssl_certfile=certificate), "do not work"),
        (locked, "without a password"),
        (WebConfig(ssl_certfile=str(empty), ssl_keyfile=key), "do not work"),
        (WebConfig(ssl_keyfile=key), "--ssl-keyfile is .* without --ssl-certfile"),
        (WebConfig(ssl_ca_certs=certificate), "--ssl-ca-certs is .* without --ssl-certfile"),
        (WebConfig(ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=str(empty)), "holds no certificates"),
    )
    for given, message in cases:
        with pytest.raises(ConfigError, match=message):
            check_web(given)
    check_web(web)
    assert tls_options(WebConfig()) == {}


def test_a_client_that_sends_no_head_is_cut_behind_tls_too(web: WebConfig) -> None:
    trusting = ssl.create_default_context(cafile=web.ssl_certfile)
    with running(Config(web=web), limits=HttpLimits(head_timeout_s=0.2)) as found:
        port = int(found.url.rpartition(":")[2])
        plain = socket.create_connection(("127.0.0.1", port), timeout=60)
        with plain, trusting.wrap_socket(plain, server_hostname="localhost") as client:
            client.sendall(b"GET /livez HTTP/1.1\r\nhost: ")
            with suppress(ConnectionResetError, ssl.SSLEOFError):
                assert client.recv(1) == b""


def test_what_is_no_tls_gets_nothing(web: WebConfig) -> None:
    with running(Config(web=web)) as found:
        port = int(found.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=60) as plain:
            plain.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
            with suppress(ConnectionResetError):
                assert b"HTTP" not in plain.recv(4096)
