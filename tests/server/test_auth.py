"""Nobody gets in without a key, by whatever spelling; tenants never share a prefix cache."""

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.http.endpoints import Access, Endpoint, Endpoints, Limit, find_endpoints
from tests.server.fakes import Harness, Wire, keyed

KEY = "sk-right"
ENDPOINTS = find_endpoints()
BAD_HEADERS: list[dict[str, str]] = [
    {},
    {"authorization": ""},
    {"authorization": "Bearer"},
    {"authorization": "Bearer "},
    {"authorization": "Bearer sk-wrong"},
    {"authorization": f"Bearer {KEY}x"},
    {"authorization": f"Bearer {KEY[:-1]}"},
    {"authorization": f"Basic {KEY}"},
    {"authorization": KEY},
    {"x-api-key": ""},
    {"x-api-key": f"Bearer {KEY}"},
    {"x-api-key": f"{KEY}x"},
    {"x-api-key": KEY, "authorization": "Bearer sk-wrong"},
    {"host": "localhost", "x-forwarded-for": "127.0.0.1"},
]
CRAFTED = [
    "/livez/../v1/models",
    "/livez/",
    "//livez",
    "/livez;/v1/models",
    "/livez%2f..%2fv1/models",
    "/%6civez",
    "/LIVEZ",
    "/readyz/x",
    "/v1/models/",
    "/v1//models",
    "/nothing",
    "/v1/models/livez",
]


def concrete(path: str) -> str:
    return path.replace("{model_id:path}", "tiny").replace("{request_id}", "r")


def test_every_route_is_an_endpoint_and_only_four_are_open() -> None:
    routes = {(method, route.path) for route in Harness().app.routes for method in route.methods}  # type: ignore[attr-defined]
    assert routes == {(each.method, each.path) for each in ENDPOINTS}
    access = ENDPOINTS.access
    assert {path for path in access if access[path] is Access.OPEN} == {"/livez", "/readyz", "/login"}
    assert {path for path in access if access[path] is Access.STATUS} == {"/health"}


def test_every_post_that_makes_work_goes_through_the_gate() -> None:
    posts = {each.path for each in ENDPOINTS if each.method == "POST" and each.limit is not Limit.QUEUE}
    posts -= {"/login", "/logout"}
    posts -= {"/v1/requests/{request_id}/cancel", "/v1/messages/count_tokens"}  # makes no work
    posts -= {"/v1/files", "/v1/batches", "/v1/batches/{batch_id}/cancel"}  # lines of batches go through it
    posts -= {"/tokenize", "/detokenize", "/v1/responses/input_tokens", "/v1/responses/{response_id}/cancel"}
    posts -= {"/v1/responses/compact"}  # is always 404
    posts -= {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}  # the operator's, or allowed by a flag
    posts -= {"/api/show", "/api/pull", "/api/push", "/api/create", "/api/copy"}
    assert not posts, "a new endpoint that makes work goes through the gate, or is excused here by name"


async def _page(request: Request) -> Response:
    return Response("in")


def test_a_path_has_one_access_and_an_open_one_is_spelled_out() -> None:
    for wrong in (
        [Endpoint("GET", "/new", _page), Endpoint("POST", "/new", _page, Access.OPEN)],
        [Endpoint("GET", "/new/{name}", _page, Access.OPEN)],
        [Endpoint("GET", "/new", _page), Endpoint("GET", "/new", _page, limit=Limit.NONE)],
    ):
        with pytest.raises(AssertionError, match="/new"):
            Endpoints(wrong)


async def test_a_route_beside_the_table_still_needs_a_key() -> None:
    harness = Harness(config=keyed(KEY))
    harness.app.add_route("/new", _page)
    assert (await harness.get("/new")).status_code == 401
    assert (await harness.get("/new", headers={"authorization": f"Bearer {KEY}"})).text == "in"


@pytest.mark.parametrize("headers", BAD_HEADERS, ids=str)
async def test_bad_keys_get_401_on_every_route(headers: dict[str, str]) -> None:
    harness = Harness(config=keyed(KEY, "sk-other"))
    for path, access in ENDPOINTS.access.items():
        for method in ("GET", "POST", "HEAD", "PUT", "OPTIONS"):
            response = await harness.request(method, concrete(path), headers=headers)
            if access is Access.KEY and response.status_code == 429:
                assert headers and int(response.headers["retry-after"]) > 0, "after ten wrong keys"
            elif access is Access.KEY:
                assert response.status_code == 401, (method, path)
                assert response.headers["www-authenticate"] == "Bearer"
    for path in CRAFTED:
        assert (await harness.get(path, headers=headers)).status_code in (401, 429), path
    assert not harness.engine.requests


async def test_raw_paths_that_decode_to_an_open_one_are_not_open() -> None:
    harness = Harness(config=keyed(KEY))
    for raw in (b"/%6civez", b"/livez%3f", b"/x/../livez"):
        wire = Wire(harness.app, "/livez", {})
        wire.scope |= {"method": "GET", "raw_path": raw}
        await wire.start()
        assert wire.status == 401, raw
    wire = Wire(harness.app, "/livez", {})
    wire.scope |= {"method": "GET", "root_path": "/livez"}
    await wire.start()
    assert wire.status == 401


async def test_right_keys_get_in_and_the_error_never_repeats_a_key() -> None:
    harness = Harness(config=keyed("sk-other", KEY))
    for key in (KEY, "sk-other"):
        for scheme in ("Bearer", "bearer"):
            response = await harness.get("/v1/models", headers={"authorization": f"{scheme} {key}"})
            assert response.status_code == 200
    response = await harness.chat(headers={"authorization": "Bearer sk-secret-guess"})
    assert response.status_code == 401 and "guess" not in response.text
    assert response.json()["error"]["code"] == "invalid_api_key"
    twice = [("authorization", "Bearer x"), ("authorization", f"Bearer {KEY}")]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(harness.app), base_url="http://localhost") as client:
        assert (await client.get("/v1/models", headers=twice)).status_code == 401


async def test_the_key_may_come_in_anthropics_header() -> None:
    harness = Harness(config=keyed(KEY))
    assert (await harness.get("/v1/models", headers={"x-api-key": KEY})).status_code == 200
    both = {"x-api-key": "sk-wrong", "authorization": f"Bearer {KEY}"}
    assert (await harness.get("/v1/models", headers=both)).status_code == 200


async def test_open_routes_are_open_and_without_keys_all_are() -> None:
    harness = Harness(config=keyed(KEY))
    assert (await harness.get("/livez")).status_code == 200
    assert (await harness.get("/readyz?verbose=1")).status_code == 200
    assert (await Harness().get("/v1/models")).status_code == 200


async def test_healths_bare_status_is_public_and_its_details_need_a_key() -> None:
    harness = Harness(config=keyed(KEY))
    right = {"authorization": f"Bearer {KEY}"}
    for headers in BAD_HEADERS:
        response = await harness.get("/health", headers=headers)
        assert (response.status_code, response.json()) == (200, {"status": "ready"}), headers
    assert (await harness.get("/health", headers=right)).json()["model"] == "tiny"
    for path in ("/health/", "//health", "/health/x", "/%68ealth"):
        assert (await harness.get(path)).status_code == 401, path
    harness.context.lifecycle.refuse()
    stranger, holder = await harness.get("/health"), await harness.get("/health", headers=right)
    assert (stranger.status_code, stranger.json()) == (503, {"status": "draining"})
    assert holder.status_code == 503 and holder.json()["error"]["code"] == holder.json()["status"] == "draining"
    assert stranger.headers["retry-after"] == holder.headers["retry-after"]


async def test_websockets_are_closed() -> None:
    harness = Harness()
    wire = Wire(harness.app, "/v1/models", {})
    wire.scope["type"] = "websocket"
    await wire.start()
    assert wire.sent == [{"type": "websocket.close", "code": 1008}]


async def test_two_tenants_never_share_a_salt_and_one_tenant_always_does() -> None:
    harness = Harness(config=keyed("sk-a", "sk-b"))
    salts = []
    for key, salt in (("sk-a", None), ("sk-a", None), ("sk-b", None), ("sk-a", "x"), ("sk-b", "x"), ("sk-a", "x")):
        fields = {} if salt is None else {"cache_salt": salt}
        assert (await harness.chat(headers={"authorization": f"Bearer {key}"}, **fields)).status_code == 200
        salts.append(harness.engine.requests[-1].cache_salt)
    a, a_again, b, a_x, b_x, a_x_again = salts
    assert a == a_again and a_x == a_x_again
    assert len({a, b, a_x, b_x}) == 4
    assert all(len(salt) == 32 for salt in salts)
