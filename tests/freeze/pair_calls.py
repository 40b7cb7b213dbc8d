"""Call a running `octavo serve`, and put what it answers into the form that is frozen.

Owns: the processes, sockets, admin questions and the rules of what is masked: times, random ids, prose, token cuts.
Does not: know the requests (pair_cases) or import anything of octavo.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 100.0
ANSWER_TIMEOUT_S = 60.0
UNTIL_TIMEOUT_S = 60.0
ENDLESS = "on and on "  # the text that is said until time ends it
MAX_TEXT = 400  # characters of a string that are kept
MAX_NUMBERS = 12  # of a list that are kept

Json = Any


@dataclass(frozen=True)
class Call:
    """One request, and what is done with its answer.

    `$NAME$` in a path, header or body is what an earlier call of the group saved. `until` repeats the call until the
    value at a path is one of those given. `action` is none of HTTP: "admin VERB ARG", "signal NAME" or "restart".
    """

    name: str
    method: str = "POST"
    path: str = "/"
    body: Json = None
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None  # declared, whatever is sent
    raw: bytes | None = None  # sent as it is, instead of all of the above
    save: dict[str, str] = field(default_factory=dict)
    until: tuple[str, tuple[Json, ...]] | None = None
    in_background: bool = False
    join: str | None = None
    leaves: bool = False  # after the first event
    action: str | None = None
    shows: tuple[str, ...] = ()  # of /metrics: the names whose values are frozen
    drops: tuple[str, ...] = ()  # keys of the answer that time decides

    def __or__(self, fields: dict[str, Any]) -> Call:
        return replace(self, **fields)


@dataclass(frozen=True)
class Group:
    """One server: its flags (`{dir}` is a fresh folder), files in that folder, and calls in their order."""

    name: str
    flags: tuple[str, ...]
    calls: tuple[Call, ...]
    files: dict[str, str] = field(default_factory=dict)


class Server:
    """An `octavo serve` of its own."""

    def __init__(self, group: Group, folder: Path) -> None:
        self._group, self._folder = group, folder
        for name, text in group.files.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o600)
        self._starts = 0
        self.start()

    def start(self) -> None:
        """Start it; it is not ready yet."""
        self._starts += 1
        self._log = self._folder / f"log-{self._starts}"
        flags = [flag.replace("{dir}", str(self._folder)) for flag in self._group.flags]
        env = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
        env |= {"OCTAVO_RUN_DIR": str(self._folder / "run"), "OCTAVO_CACHE_DIR": str(self._folder / "cache")}
        env |= {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        command = [sys.executable, "-m", "octavo", "serve", *flags, "--port", "0"]
        place = self._folder
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, cwd=place
            )

    def wait(self) -> None:
        """Wait until it serves."""
        end = time.monotonic() + START_TIMEOUT_S
        while not re.search(r"^try .*\n", self._log.read_text(), re.MULTILINE):
            assert self._process.poll() is None and time.monotonic() < end, self._log.read_text()
            time.sleep(0.02)
        text = self._log.read_text()
        match = re.search(r"https?://([^/:]+):(\d+)", text)
        assert match is not None, text
        self.host, self.port = match[1], int(match[2])
        (self._admin,) = map(str, (self._folder / "run").glob(f"{self._process.pid}-*/admin.sock"))

    @property
    def log(self) -> str:
        """What it said since it was started last."""
        return self._log.read_text()

    def end(self) -> int:
        """Tell it to end; its exit status."""
        self._process.terminate()
        return self._process.wait(30)

    def stop(self) -> None:
        """Kill it; its children end with it."""
        self._process.kill()
        self._process.wait(30)

    def act(self, words: list[str]) -> Json:
        """Do what an action says; its answer."""
        if words[0] == "admin":
            return _outline(self._ask(words[1], " ".join(words[2:])))
        if words[0] == "signal":
            self._process.send_signal(getattr(signal, words[1]))
            return "sent"
        if words[0] == "exit":
            return self._process.wait(30)
        assert words[0] == "restart", words
        self.stop()
        self.start()
        self.wait()
        return "ready"

    def _ask(self, verb: str, argument: str) -> Json:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_TIMEOUT_S)
            connection.connect(self._admin)
            connection.sendall(json.dumps({"verb": verb, "argument": argument}).encode() + b"\n")
            return json.loads(connection.makefile("rb").readline())


class Runner:
    """The calls of one group, one after the other."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.saved: dict[str, str] = {}
        self._background: dict[str, tuple[threading.Thread, list[Json]]] = {}

    def run(self, call: Call) -> Json:
        """Do one call; what is frozen of it."""
        if call.action is not None:
            return {"action": self._server.act(self._filled(call.action).split(" "))}
        if call.join is not None:
            thread, found = self._background.pop(call.join)
            thread.join(ANSWER_TIMEOUT_S)
            return found[0] if found else "no answer"
        if call.in_background:
            answers: list[Json] = []
            thread = threading.Thread(target=lambda: answers.append(self._once(call)), daemon=True)
            thread.start()
            self._background[call.name] = thread, answers
            return "begun"
        if call.until is None:
            return self._once(call)
        end = time.monotonic() + UNTIL_TIMEOUT_S
        while True:
            self._last: Json = None
            answer = self._once(call)
            if _at(self._last, call.until[0]) in call.until[1] or time.monotonic() > end:
                return answer
            time.sleep(0.01)

    def whole(self, call: Call) -> Json:
        """Do one call; its JSON as it came."""
        self._once(call)
        return self._last

    def _filled(self, text: str) -> str:
        return re.sub(r"\$(\w+)\$", lambda match: self.saved.get(match[1], match[0]), text)

    def _once(self, call: Call) -> Json:
        if call.raw is not None:
            return self._send_raw(call.raw)
        try:
            return self._exchange(call)
        except (OSError, http.client.HTTPException) as error:
            return f"no answer: {type(error).__name__}"

    def _exchange(self, call: Call) -> Json:
        connection = http.client.HTTPConnection(self._server.host, self._server.port, timeout=ANSWER_TIMEOUT_S)
        try:
            self._send(connection, call)
            response = connection.getresponse()
            if call.leaves:
                assert response.fp.readline()
                return {"status": response.status, "left": True}
            data = response.read()
            headers = response.getheaders()
        finally:
            connection.close()
        self._last = _decoded(data)
        for name, path in call.save.items():
            self.saved[name] = str(dict(headers).get(path[1:]) if path[0] == "@" else _at(self._last, path))
        return frozen(call, response.status, headers, data)

    def _send(self, connection: http.client.HTTPConnection, call: Call) -> None:
        body = call.body
        if body is not None and not isinstance(body, (bytes, str)):
            body = json.dumps(body)
        data = self._filled(body).encode() if isinstance(body, str) else body or b""
        connection.putrequest(
            call.method, self._filled(call.path), skip_accept_encoding=True, skip_host="host" in call.headers
        )
        for name, value in call.headers.items():
            connection.putheader(name, self._filled(value))
        if data or call.length is not None or call.method in ("POST", "PUT", "PATCH"):
            connection.putheader("content-length", str(len(data) if call.length is None else call.length))
        connection.endheaders(data or None)

    def _send_raw(self, data: bytes) -> Json:
        with socket.create_connection((self._server.host, self._server.port), ANSWER_TIMEOUT_S) as connection:
            connection.sendall(data.replace(b"$HOST$", f"{self._server.host}:{self._server.port}".encode()))
            got = b""
            while part := connection.recv(65536):
                got += part
        head, _, rest = got.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = [tuple(line.split(": ", 1)) for line in lines[1:]]
        return frozen(Call("raw"), int(lines[0].split(" ")[1]), headers, rest)  # type: ignore[arg-type]


def _at(value: Json, path: str) -> Json:
    for part in path.split("."):
        if isinstance(value, list):
            value = value[int(part)] if int(part) < len(value) else None
        else:
            value = value.get(part) if isinstance(value, dict) else None
    return value


def _decoded(data: bytes) -> Json:
    try:
        return json.loads(data)
    except ValueError:
        return None


# What is frozen of an answer.

_HEX = re.compile(r"[0-9a-f]{12,}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
_MASKED_HEADERS = {"date", "content-length", "etag", "last-modified", "retry-after"}
_NUMBER_KEYS = re.compile(r".*(_at|_s|_ms|_duration|_bytes|_pid|duration)|created|step|bytes")
_PROSE_KEYS = {"message", "public_text", "reason", "trouble", "why", "rule"}


def frozen(call: Call, status: int, headers: list[tuple[str, str]], data: bytes) -> Json:
    """Status, headers and body of an answer in the form that is stored."""
    kept = sorted((name.lower(), _header(name.lower(), value)) for name, value in headers)
    answer: dict[str, Json] = {"status": status, "headers": dict(kept)}
    kind = dict(kept).get("content-type", "")
    if not data:
        return answer
    if kind.startswith("text/event-stream"):
        answer["events"] = _stream(_sse(data.decode()), call.drops)
    elif kind == "application/x-ndjson":
        answer["events"] = _stream([{"data": json.loads(line)} for line in data.splitlines()], call.drops)
    elif kind.startswith("text/plain") and data.startswith(b"# HELP"):
        answer["metrics"] = _metrics(data.decode(), call.shows)
    elif (value := _decoded(data)) is not None:
        answer["body"] = _api_outline(value) if "openapi" in value else _masked(value, call.drops)
    elif kind == "application/jsonl" or b'"custom_id"' in data:
        answer["lines"] = sorted((_masked(json.loads(line), call.drops) for line in data.splitlines()), key=json.dumps)
    elif kind.startswith("text/html") or len(data) > MAX_TEXT:
        answer["body"] = "<page>"
    else:
        answer["body"] = data.decode("utf-8", "replace")
    return answer


def _header(name: str, value: str) -> str:
    if name in _MASKED_HEADERS or "-remaining-tokens" in name or "-reset-" in name:
        return "*"
    if name == "allow":
        return ", ".join(sorted(value.split(", ")))
    if name == "set-cookie":
        return re.sub(r"expires=[^;]+", "expires=*", re.sub(r"^([\w-]+=)[\w-]{16,}", r"\1*", value))
    if name == "content-security-policy":
        return re.sub(r"'sha256-[^']+'", "'sha256-*'", value)
    return _HEX.sub("*", value)


def _masked(value: Json, drops: tuple[str, ...], key: str = "") -> Json:
    """A value with what varies, and prose, as the name of its type."""
    if isinstance(value, dict):
        if key in ("timings", "seconds", "prediction"):
            return {name: None if item is None else "num" for name, item in sorted(value.items())}
        is_told = "state" in value and "public_text" not in value and "text" in value
        return {
            name: "str" if is_told and name == "text" else _masked(item, drops, name)
            for name, item in value.items()
            if name not in drops
        }
    if isinstance(value, list):
        if len(value) > MAX_NUMBERS and all(isinstance(item, (int, float)) for item in value):
            return f"{len(value)} numbers {_crc([round(item, 4) for item in value])}"
        return [_masked(item, drops, key) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, (int, float)):
        return "num" if _NUMBER_KEYS.fullmatch(key) else value
    if key in _PROSE_KEYS or key == "error":
        return "str"
    text = _TIME.sub("*", _HEX.sub("*", value))
    text = re.sub(r"\b(call|toolu|fc|rs)_[A-Za-z0-9]{8,}", r"\1_*", text)
    return text if len(text) <= MAX_TEXT else f"{len(text)} characters {_crc(text)}"


def _outline(value: Json) -> Json:
    """The keys of a value, and the types of its leaves; of a list its first item."""
    if isinstance(value, dict):
        return {name: _outline(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_outline(item) for item in value[:1]]
    if isinstance(value, bool) or value is None:
        return value
    return "num" if isinstance(value, (int, float)) else "str"


def _crc(value: Json) -> str:
    return f"{zlib.crc32(json.dumps(value).encode()):08x}"


def _metrics(text: str, shows: tuple[str, ...]) -> Json:
    """Type and labels of every metric, and the values of some."""
    kinds = dict(line.split(" ")[2:4] for line in text.splitlines() if line.startswith("# TYPE"))
    labels: dict[str, set[str]] = {}
    values: dict[str, float] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line)
        if match is None:
            continue
        names = labels.setdefault(match[1], set())
        names |= set(re.findall(r'(\w+)="', match[2] or ""))
        if match[1] in shows and 'code="request_not_found"' not in line and 'key="one"' not in line:  # polled for
            values[line.rpartition(" ")[0]] = float(match[3])
    return {
        "types": dict(sorted(kinds.items())),
        "labels": {name: ",".join(sorted(names)) for name, names in sorted(labels.items())},
        "values": values,
    }


def _api_outline(value: Json) -> Json:
    """Of an OpenAPI document: methods of each path, and the names of the fields of each body."""
    found = {}
    for path, methods in value["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {})
            found[f"{method} {path}"] = {
                kind: sorted(_properties(item.get("schema", {}))) for kind, item in content.items()
            }
    return found


def _properties(schema: Json) -> set[str]:
    found = set(schema.get("properties", {}))
    for each in schema.get("anyOf", []) + schema.get("allOf", []):
        found |= _properties(each)
    return found


# Streams: events in their order, with what was cut by time put together.

_JOINED = {
    "text",
    "content",
    "delta",
    "response",
    "thinking",
    "reasoning",
    "reasoning_content",
    "partial_json",
    "arguments",
}
_LISTS = {
    "content",
    "tokens",
    "token_logprobs",
    "top_logprobs",
    "text_offset",
    "token_ids",
    "logprobs",
    "prompt_logprobs",
}


def _sse(text: str) -> list[dict[str, Json]]:
    found = []
    for block in re.split(r"\n\n", text):
        event: dict[str, Json] = {}
        for line in block.split("\n"):
            name, _, value = line.partition(": ")
            if name in ("event", "data", "id"):
                event[name] = value
        if "data" in event:
            data = _decoded(event["data"].encode())
            event["data"] = event["data"] if data is None else data
            found.append(event)
    return found


def _stream(events: list[dict[str, Json]], drops: tuple[str, ...]) -> Json:
    """The events of a stream; ids and log-probabilities are put together apart: they come with any piece of text."""
    numbers = [event["data"].pop("sequence_number") for event in events if _has(event["data"], "sequence_number")]
    ids = [event.get("id") for event in events if event.get("event") != "ping"]
    scores: dict[str, Json] = {}
    prompts = [ids for event in events for ids in _taken(event["data"], "prompt_token_ids")]
    parts = [part for event in events if event.get("event") != "ping" for part in _split(event, scores)]
    found: list[dict[str, Json]] = []
    for part in _by_choice(parts):
        part.pop("id", None)
        part["data"] = _masked(part["data"], drops)
        joined = _merged(found[-1], part) if found else None
        if joined is not None:
            found[-1] = joined
        else:
            found.append(part)
    told: dict[str, Json] = {"list": _endless_masked(found)}
    if scores:
        told["tokens"] = {place: _masked(each, drops) for place, each in sorted(scores.items())}
    if prompts:
        told["prompt_token_ids"] = prompts
    if any(ids):
        told |= {"last_id": next(each for each in reversed(ids) if each), "with_id": "all" if all(ids) else "some"}
    if numbers:
        told["numbered_from"] = numbers[0] if numbers == list(range(numbers[0], numbers[0] + len(numbers))) else "gaps"
    return told


def _has(data: Json, key: str) -> bool:
    return isinstance(data, dict) and key in data


def _taken(data: Json, key: str) -> list[Json]:
    """What stands once in a stream, with its first event or its first choice."""
    if not isinstance(data, dict):
        return []
    return [place.pop(key) for place in (data, *data.get("choices", [])) if key in place]


def _split(event: dict[str, Json], scores: dict[str, Json]) -> list[dict[str, Json]]:
    """Each piece of text, each part of a call, and the end of a choice as events of their own."""
    data = event["data"]
    if (_has(data, "message") and "done" in data) or (_has(data, "response") and "done" in data):
        return [{**event, "data": part} for part in _split_ollama(data)]
    choices = data.get("choices") if isinstance(data, dict) else None
    if not choices or len(choices) > 1:
        return [event]
    choice = dict(choices[0])
    has_tokens = choice.get("logprobs") is not None or bool(choice.get("token_ids"))
    if choice.get("logprobs") is not None:
        place = f"{choice['index']} logprobs"
        merged = _merged(scores.get(place), choice["logprobs"])
        scores[place] = choice["logprobs"] if merged is None else merged
    if "logprobs" in choice:
        choice["logprobs"] = "*"
    if "token_ids" in choice:
        place = f"{choice['index']} ids"
        scores[place] = scores.get(place, []) + (choice["token_ids"] or [])
        choice["token_ids"] = "*"
    end = choice.get("finish_reason")
    name = "text" if "text" in choice else "delta"
    pieces = [choice["text"]] if name == "text" and (choice["text"] or end is None) else []
    pieces = _deltas(choice["delta"]) if name == "delta" and (choice["delta"] or end is None) else pieces
    if has_tokens and pieces in (
        [{}],
        [""],
    ):  # tokens without text come alone, or with the piece before, as time has it
        pieces = []
    shared = {key: value for key, value in data.items() if key != "timings"}
    if isinstance(shared.get("usage"), dict):
        shared["usage"] = dict.fromkeys(shared["usage"], "num")
    said = {key: value for key, value in choice.items() if key != "stop_reason"} | {"finish_reason": None}
    found = [{**event, "data": {**shared, "choices": [{**said, name: piece}]}} for piece in pieces]
    if end is not None:
        empty = {name: "" if name == "text" else {}}
        found.append({**event, "data": {**data, "choices": [{**choice, **empty}]}})
    return found


def _deltas(delta: Json) -> list[Json]:
    if "role" in delta:
        return [delta]
    found: list[Json] = []
    thoughts = {key: value for key, value in delta.items() if key.startswith("reasoning")}
    rest = {key: value for key, value in delta.items() if key not in thoughts and key != "tool_calls"}
    found += [each for each in (thoughts, rest) if each]
    for call in delta.get("tool_calls") or []:
        if "id" in call:
            found.append({"tool_calls": [{**call, "function": {**call["function"], "arguments": ""}}]})
        if arguments := call["function"].get("arguments"):
            found.append({"tool_calls": [{"index": call["index"], "function": {"arguments": arguments}}]})
    return found or [delta]


def _split_ollama(data: Json) -> list[Json]:
    """The kinds of text of a line, and the end."""
    inner = data.get("message", data)
    found = []
    for key in ("thinking", "content", "response", "tool_calls"):
        if inner.get(key):
            piece = {key: inner[key]} if inner is data else {"message": {"role": inner["role"], key: inner[key]}}
            fixed = {name: data[name] for name in ("model", "created_at")}
            found.append({**fixed, **piece, "done": False})
    if data["done"]:
        empty = {"message": {"role": inner["role"], "content": ""}} if inner is not data else {"response": ""}
        found.append({**data, **empty})
    return found or [data]


def _by_choice(parts: list[dict[str, Json]]) -> list[dict[str, Json]]:
    """Events of several choices, those of each choice together, since their turns are time's."""

    def index(part: dict[str, Json]) -> int | None:
        choices = part["data"].get("choices") if isinstance(part["data"], dict) else None
        return choices[0].get("index") if choices and len(choices) == 1 else None

    found: list[dict[str, Json]] = []
    run: list[dict[str, Json]] = []
    for part in parts:
        if index(part) is not None:
            run.append(part)
            continue
        found += [*sorted(run, key=lambda each: index(each) or 0), part]
        run = []
    return found + sorted(run, key=lambda each: index(each) or 0)


def _endless_masked(value: Json) -> Json:
    """What is said without end is cut where time has it."""
    if isinstance(value, dict):
        return {name: _endless_masked(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_endless_masked(item) for item in value]
    is_endless = isinstance(value, str) and value and (ENDLESS * (len(value) // len(ENDLESS) + 1)).startswith(value)
    return "(endless)" if is_endless else value


def _merged(one: Json, other: Json, key: str = "") -> Json:
    """Both events as one where they differ in text alone; None where they differ otherwise."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return None
        if key == "usage":
            return other
        both = {name: _merged(one[name], other[name], name) for name in one}
        return None if any(both[name] is None and one[name] is not None for name in both) else both
    if isinstance(one, list) and isinstance(other, list):
        if key in _LISTS:
            return one + other
        if len(one) != len(other):
            return None
        items = [_merged(a, b, key) for a, b in zip(one, other, strict=True)]
        return None if any(item is None and a is not None for item, a in zip(items, one, strict=True)) else items
    if key in _JOINED and isinstance(one, str) and isinstance(other, str):
        return one + other
    return one if one == other else None
