"""Endpoint: one method of one path, with the facts that the application needs about it.

Owns: the access, limit, body and description of each endpoint; finding the modules that declare endpoints; the OpenAPI
document. Does not: check a key (auth does), admit a request (app does) or read a body (http.body does).
A module in octavo.server.api declares its endpoints in a list ENDPOINTS; no other module names them.
Invariant: a path without an endpoint is not served, and needs a key.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from importlib import import_module
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from octavo.server.api.fields import inline_schema

ENDPOINT = "octavo.endpoint"  # in a request's scope: the Endpoint, once the request is routed
PACKAGE = "octavo.server.api"
Handler = Callable[[Request], Awaitable[Response]]


class Access(Enum):
    """The clients that may call an endpoint."""

    OPEN = "anyone"
    STATUS = "anyone for the bare status, holders of a key for the details"
    KEY = "holders of a key, when keys are set"


class Limit(Enum):
    """The check before an endpoint is called, in addition to its access."""

    QUEUE = "room in the queue; the request counts in its key's rates once it is admitted"
    RATE = "the key's requests per minute"
    RATE_WITH_QUERY = "the key's requests per minute, for requests with a query"
    NONE = "nothing: the request is cheap, or ends or frees something"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path.

    `body` is the model or JSON schema of the request body, for the OpenAPI document. Without `description`, the
    document shows the handler's docstring. `max_body_bytes` replaces the server's bound on bodies. With `takes_file`
    the body is an upload, which the handler reads in parts and bounds.
    """

    method: str
    path: str
    handler: Handler
    access: Access = Access.KEY
    limit: Limit = Limit.RATE
    body: type[BaseModel] | Mapping[str, object] | None = None
    description: str = ""
    is_documented: bool = True
    max_body_bytes: int | None = None
    takes_file: bool = False

    def operation(self) -> dict[str, object]:
        """Return the endpoint's operation in the OpenAPI document."""
        name = self.handler.__name__
        operation: dict[str, object] = {
            "summary": name.replace("_", " ").title(),
            "description": self.description or (self.handler.__doc__ or "").strip(),
            "operationId": re.sub(r"\W", "_", f"{name}{self.shown_path}_{self.method.lower()}"),
        }
        if self.body is not None:
            schema = inline_schema(self.body) if isinstance(self.body, type) else self.body
            kind = "multipart/form-data" if self.takes_file else "application/json"
            operation["requestBody"] = {"content": {kind: {"schema": schema}}, "required": True}
        answer = {"description": "Successful Response", "content": {"application/json": {"schema": {}}}}
        return {**operation, "responses": {"200": answer}}

    @property
    def shown_path(self) -> str:
        """The path with plain parameter names: `{id}` instead of `{id:path}`."""
        return re.sub(r":\w+}", "}", self.path)


def queued(path: str, handler: Handler, body: type[BaseModel] | Mapping[str, object], *about: str) -> Endpoint:
    """Return the endpoint of a POST that takes room in the queue. `about` are the paragraphs of its description."""
    return Endpoint("POST", path, handler, limit=Limit.QUEUE, body=body, description="\n\n".join(about))


class Endpoints:
    """The endpoints of one application."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self._all = tuple(endpoints)
        self.access: dict[str, Access] = {}  # by path
        self.methods: dict[str, list[str]] = {}  # by path
        for each in self._all:
            access = self.access.setdefault(each.path, each.access)
            assert access is each.access, f"{each.path} has endpoints of different access"
            assert access is Access.KEY or "{" not in each.path, f"{each.path} is open, and has parameters"
            methods = self.methods.setdefault(each.path, [])
            assert each.method not in methods, f"{each.method} {each.path} is declared twice"
            methods.append(each.method)

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self._all)

    @property
    def upload_paths(self) -> frozenset[str]:
        """The paths that accept file uploads."""
        return frozenset(each.path for each in self._all if each.takes_file)

    def open_access(self, scope: Scope) -> Access | None:
        """Return the access of a path that needs no key, if the request spells the path exactly; else None."""
        path: str = scope["path"]
        raw: bytes = scope.get("raw_path") or path.encode()
        if raw.split(b"?", 1)[0] != path.encode() or scope.get("root_path"):
            return None
        access = self.access.get(path)
        return None if access is Access.KEY else access

    @cached_property
    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, without `servers`. Endpoints that generate come first, and OpenAI's before others."""
        paths: dict[str, dict[str, object]] = {}
        for each in sorted(
            self._all, key=lambda each: (each.limit is not Limit.QUEUE, not each.path.startswith("/v1/"), each.path)
        ):
            if each.is_documented:
                paths.setdefault(each.shown_path, {})[each.method.lower()] = each.operation()
        return {"openapi": "3.1.0", "info": {"title": "Octavo", "version": "0.1.0"}, "paths": paths}


def find_endpoints() -> Endpoints:
    """Return the endpoints of every module in PACKAGE; those with Limit.QUEUE first, as the most frequently called."""
    endpoints: list[Endpoint] = []
    for module in pkgutil.walk_packages(import_module(PACKAGE).__path__, f"{PACKAGE}."):
        endpoints += getattr(import_module(module.name), "ENDPOINTS", ())
    return Endpoints(sorted(endpoints, key=lambda each: each.limit is not Limit.QUEUE))
