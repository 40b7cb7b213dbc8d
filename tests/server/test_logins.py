"""Signing in by key: sessions and their bounds, cookies and where they count, failed tries."""

import re
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from octavo.config import Config, ServingConfig, WebConfig
from octavo.server.http import auth as logins_module
from octavo.server.http.auth import Logins, WrongKeys, cookie_name, is_own_page
from octavo.server.http.keys import KeyRing
from tests.server.fakes import Harness, keyed

KEY = "sk-right-and-long"
PAGE = {"accept": "text/html,application/xhtml+xml", "sec-fetch-site": "none"}
OWN = {"sec-fetch-site": "same-origin"}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def made(*keys: str) -> tuple[Logins, Clock]:
    clock = Clock()
    return Logins(KeyRing.of(ServingConfig(api_key=keys)), clock), clock


async def signed_in(harness: Harness, key: str = KEY, **headers: str) -> Any:
    sent = {"content-type": "application/x-www-form-urlencoded", "accept": "text/html", **OWN, **headers}
    return await harness.request("POST", "/login", content=f"key={key}&next=dashboard".encode(), headers=sent)


def cookie_of(response: Any) -> str:
    return str(response.headers["set-cookie"]).partition(";")[0]


@pytest.mark.parametrize("path", ["/dashboard", "/docs", "/"])
async def test_I06_a_browser_without_a_key_is_shown_the_form_and_a_program_the_error(path: str) -> None:
    harness = Harness(config=keyed(KEY))
    page = await harness.get(path, headers=PAGE)
    assert page.status_code == 401 and page.headers["content-type"].startswith("text/html")
    assert '<form method="post" action="login">' in page.text and "http" not in page.text.lower()
    assert f'value="{path[1:]}"' in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    program = await harness.get(path, headers={"accept": "*/*"})
    assert program.status_code == 401 and program.json()["error"]["code"] == "invalid_api_key"


async def test_I06_login_by_key_sets_a_cookie_that_lets_in_and_logout_ends_it() -> None:
    harness = Harness(config=keyed(KEY, "sk-other"))
    response = await signed_in(harness)
    assert response.status_code == 303 and response.headers["location"] == "dashboard"
    told = response.headers["set-cookie"].lower()
    assert "httponly" in told and "samesite=strict" in told and "path=/" in told and KEY not in told
    assert "secure" not in told and "max-age" not in told
    cookie = {"cookie": cookie_of(response)}
    assert (await harness.get("/v1/models", headers={**cookie, **OWN})).status_code == 200
    assert (await harness.get("/dashboard", headers={**cookie, **PAGE})).status_code == 200
    assert (await harness.chat(headers={**cookie, **OWN})).status_code == 200
    out = await harness.request("POST", "/logout", headers={**cookie, **OWN, "accept": "text/html"})
    assert out.status_code == 303 and out.headers["location"] == "login"
    assert (await harness.get("/v1/models", headers={**cookie, **OWN})).status_code == 401
    assert len(harness.app.state.context.logins._sessions) == 0


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "none"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {},
    ],
    ids=str,
)
async def test_a_cookie_does_not_count_for_another_sites_request(headers: dict[str, str]) -> None:
    harness = Harness(config=keyed(KEY))
    cookie = {"cookie": cookie_of(await signed_in(harness))}
    assert (await harness.chat(headers={**cookie, **headers})).status_code == 401
    assert not harness.engine.requests


async def test_where_browsers_say_less_the_origin_decides() -> None:
    harness = Harness(config=keyed(KEY))
    cookie = {"cookie": cookie_of(await signed_in(harness))}
    assert (
        await harness.chat(headers={**cookie, "origin": "http://localhost", "host": "localhost"})
    ).status_code == 200
    assert (await harness.get("/v1/models", headers=cookie)).status_code == 200
    assert (await harness.get("/v1/models", headers={**cookie, "sec-fetch-site": "cross-site"})).status_code == 401


async def test_a_key_in_a_header_is_what_counts_where_there_is_one() -> None:
    harness = Harness(config=keyed(KEY))
    cookie = {"cookie": cookie_of(await signed_in(harness)), **OWN}
    assert (await harness.get("/v1/models", headers={**cookie, "authorization": "Bearer x"})).status_code == 401
    assert (await harness.get("/v1/models", headers={**cookie, "x-api-key": ""})).status_code == 401


@pytest.mark.parametrize(
    "cookie", ["octavo-session=", "octavo-session=x", "octavo-session-80=\xff", "other=1", "=", ";"]
)
async def test_cookies_that_are_none_let_nobody_in(cookie: str) -> None:
    harness = Harness(config=keyed(KEY))
    await signed_in(harness)
    assert (await harness.get("/v1/models", headers={"cookie": cookie.encode("latin-1"), **OWN})).status_code == 401


async def test_wrong_keys_are_told_and_too_many_have_to_wait_but_a_right_one_never() -> None:
    harness = Harness(config=keyed(KEY))
    for _ in range(logins_module.MAX_WRONG_KEYS):
        response = await signed_in(harness, "sk-secret-guess")
        assert response.status_code == 401 and "guess" not in response.text and "set-cookie" not in response.headers
        assert "no valid key" in response.text
    response = await signed_in(harness, "sk-secret-guess")
    assert response.status_code == 429 and 0 < int(response.headers["retry-after"]) <= 60
    program = {"content-type": "application/json", "accept": "application/json"}
    response = await harness.request("POST", "/login", content=b'{"key": "x"}', headers=program)
    assert response.status_code == 429 and response.json()["error"]["code"] == "too_many_wrong_keys"
    right = await signed_in(harness, KEY)
    assert right.status_code == 303 and "set-cookie" in right.headers, "others share a proxy's address"
    assert (await harness.get("/v1/models", headers={"authorization": f"Bearer {KEY}"})).status_code == 200


async def test_wrong_keys_in_headers_are_limited_per_address_and_counted() -> None:
    harness = Harness(config=keyed(KEY))
    wrong, right = {"authorization": "Bearer sk-guess"}, {"authorization": f"Bearer {KEY}"}
    statuses = [(await harness.get("/v1/models", headers=wrong)).status_code for _ in range(13)]
    assert statuses == [401] * 10 + [429] * 3
    refused = await harness.get("/v1/models", headers={"x-api-key": "sk-guess"})
    assert refused.status_code == 429 and 0 < int(refused.headers["retry-after"]) <= 60
    assert refused.headers["x-should-retry"] == "false", "the same key would be as wrong"
    assert refused.json()["error"]["code"] == "too_many_wrong_keys"
    assert (await harness.get("/v1/models", headers=right)).status_code == 200, "a right key always passes"
    assert (await harness.chat(headers=right)).status_code == 200
    assert (await harness.get("/v1/models")).status_code == 401, "no key is no guess"
    assert (await signed_in(harness, "sk-guess")).status_code == 429, "one count for headers and the form"
    forwarded = {**wrong, "x-forwarded-for": "10.9.8.7"}
    assert (await harness.get("/v1/models", headers=forwarded)).status_code == 429, "anyone may send this header"
    assert harness.context.logins.wrong_keys.note("10.9.8.7") == 0
    metrics = (await harness.get("/metrics", headers=right)).text
    counts = dict(re.findall(r'octavo_requests_failed_total\{.*?code="(\w+)".*?\} (\d+)', metrics))
    assert int(counts["too_many_wrong_keys"]) >= 5 and int(counts["invalid_api_key"]) >= 11


async def test_a_program_may_sign_in_with_json_too() -> None:
    harness = Harness(config=keyed(KEY))
    program = {"content-type": "application/json", "accept": "application/json"}
    response = await harness.request("POST", "/login", content=f'{{"key": "{KEY}"}}'.encode(), headers=program)
    assert response.status_code == 204
    for body in (b"[]", b'{"key": 1}', b"{", b"\xff"):
        response = await harness.request("POST", "/login", content=body, headers=program)
        assert response.status_code == 400, body
    large = await harness.request("POST", "/login", content=b"key=" + b"x" * 5000, headers=OWN)
    assert large.status_code == 413


async def test_another_sites_form_signs_nobody_in() -> None:
    harness = Harness(config=keyed(KEY))
    for headers in ({"sec-fetch-site": "cross-site"}, {"origin": "http://evil.example", "sec-fetch-site": "same-site"}):
        response = await signed_in(harness, **headers)
        assert response.status_code == 403 and "set-cookie" not in response.headers


@pytest.mark.parametrize("given", ["//evil.example", "https://evil.example", "\\evil", "v1/models", "%2f%2fevil"])
async def test_after_login_one_goes_to_a_page_of_this_server_only(given: str) -> None:
    harness = Harness(config=keyed(KEY))
    sent = {"content-type": "application/x-www-form-urlencoded", "accept": "text/html", **OWN}
    response = await harness.request("POST", "/login", content=f"key={KEY}&next={given}".encode(), headers=sent)
    assert response.status_code == 303 and response.headers["location"] == "./"


async def test_behind_tls_the_cookie_is_for_tls_alone() -> None:
    harness = Harness(config=keyed(KEY))
    response = await signed_in(harness, **{"x-forwarded-proto": "https"})
    told = response.headers["set-cookie"]
    assert told.startswith("__Host-octavo-session") and "Secure" in told
    cookie = {"cookie": cookie_of(response), **OWN}
    assert (await harness.get("/v1/models", headers=cookie)).status_code == 200


async def test_without_keys_the_form_leads_on() -> None:
    response = await Harness().get("/login", headers=PAGE)
    assert response.status_code == 303 and response.headers["location"] == "./"


async def test_the_form_works_under_a_path_in_front() -> None:
    serving = ServingConfig(api_key=(KEY,))
    harness = Harness(config=Config(serving=serving, web=WebConfig(root_path="/octavo")))
    page = await harness.get("/octavo/dashboard", headers=PAGE)
    assert page.status_code == 401 and 'action="login"' in page.text
    sent = {"content-type": "application/x-www-form-urlencoded", "accept": "text/html", **OWN}
    response = await harness.request("POST", "/octavo/login", content=f"key={KEY}".encode(), headers=sent)
    assert response.status_code == 303 and response.headers["location"] == "./"


def test_sessions_end_by_disuse_and_by_age() -> None:
    logins, clock = made(KEY)
    idle, used = logins.log_in(KEY.encode()), logins.log_in(KEY.encode())
    assert idle is not None and used is not None
    clock.now += logins_module.MAX_IDLE_S / 2
    assert logins.find(used) is not None
    clock.now += logins_module.MAX_IDLE_S / 2 + 1
    assert logins.find(idle) is None and logins.find(used) is not None
    for _ in range(20):
        clock.now += logins_module.MAX_IDLE_S - 1
        logins.find(used)
    assert logins.find(used) is None and len(logins._sessions) == 0


def test_sessions_are_bounded_for_a_key_and_for_all() -> None:
    logins, _ = made("sk-a", "sk-b")
    other = logins.log_in(b"sk-b")
    ids = [logins.log_in(b"sk-a") for _ in range(logins_module.MAX_SESSIONS_PER_KEY + 3)]
    assert len(logins._sessions) == logins_module.MAX_SESSIONS_PER_KEY + 1
    assert other is not None and logins.find(other) is not None
    assert [logins.find(str(each)) is not None for each in (ids[2], ids[3], ids[-1])] == [False, True, True]
    many, _ = made(*(f"sk-{n}" for n in range(20)))
    for number in range(20):
        for _ in range(logins_module.MAX_SESSIONS_PER_KEY):
            many.log_in(f"sk-{number}".encode())
    assert len(many._sessions) == logins_module.MAX_SESSIONS


def test_a_key_that_is_gone_takes_its_sessions_along(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("keys: [{name: a, key: sk-aaaaaaa}, {name: b, key: sk-bbbbbbb}]")
    path.chmod(0o600)
    ring = KeyRing.of(ServingConfig(api_key_file=str(path)))
    logins = Logins(ring)
    a, b = logins.log_in(b"sk-aaaaaaa"), logins.log_in(b"sk-bbbbbbb")
    path.write_text("keys: [{name: b, key: sk-bbbbbbb, dashboard: true}]")
    ring.reload()
    assert logins.find(str(a)) is None
    found = logins.find(str(b))
    assert found is not None and found.name == "b" and found.dashboard


def test_wrong_keys_are_counted_by_address_and_bounded() -> None:
    clock = Clock()
    wrong_keys = WrongKeys(clock)
    for number in range(logins_module.MAX_WRONG_KEYS):
        assert wrong_keys.note(f"2001:db8::{number:x}") == 0
        clock.now += 1
    assert wrong_keys.note("2001:db8::ffff") == logins_module.WRONG_KEYS_S - 10, "of one network"
    assert wrong_keys.note("2001:db8:1::1") == 0, "another one"
    clock.now += logins_module.WRONG_KEYS_S
    assert wrong_keys.note("2001:db8::1") == 0
    for number in range(logins_module.MAX_WRONG_KEY_ADDRESSES + 10):
        wrong_keys.note(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    assert len(wrong_keys._times) == logins_module.MAX_WRONG_KEY_ADDRESSES
    assert all(len(times) <= logins_module.MAX_WRONG_KEYS for times in wrong_keys._times.values())


def test_cookies_of_servers_on_other_ports_have_other_names() -> None:
    assert cookie_name(Headers({"host": "localhost:8000"}), False) == "octavo-session-8000"
    assert cookie_name(Headers({"host": "localhost"}), False) == "octavo-session"
    assert cookie_name(Headers({"host": "[::1]:x"}), True) == "__Host-octavo-session"


def test_only_this_servers_pages_count() -> None:
    assert is_own_page(Headers({"sec-fetch-site": "same-origin"}), "POST")
    assert not is_own_page(Headers(raw=[(b"sec-fetch-site", b"same-origin"), (b"sec-fetch-site", b"none")]), "GET")
    assert is_own_page(Headers({"origin": "https://a:1", "host": "a:1"}), "DELETE")
    assert not is_own_page(Headers({"origin": "https://a:2", "host": "a:1"}), "GET")
