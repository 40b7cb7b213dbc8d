"""`octavo explain [ID]`: why a request waits, what it does, or how it ended. Without an ID: all open requests.

Owns: querying a local server over its admin socket, and a remote one over HTTP; formatting the answer as text.
Does not: find reasons (the engine's observe.explainer does), or know whether the server omitted names.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from octavo.cli.flags import UsageError
from octavo.cli.servers import (
    add_server_arguments,
    bearer_headers,
    call_admin,
    full_url,
    has_server_at,
    is_server_named,
    named_server,
    refusal_text,
)
from octavo.cli.terminal import align_columns, reason_of
from octavo.config.setting import Number
from octavo.errors import OctavoError

TIMEOUT_S = 30.0
_ENDED = ("finished", "unknown")
_COLUMNS = ("ID", "STATE", "POSITION", "REASON", "AGE", "PROMPT", "OUTPUT", "NEXT TOKEN")
_WATCHED = ("state", "position", "reason", "epoch", "replica")  # fields whose change --follow prints
Json = Mapping[str, Any]


class NotAnsweredError(OctavoError):
    """The server did not answer, or the request is unknown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("id", nargs="?", metavar="ID", help="id in the answer, X-Request-Id or the log [all open]")
    add_server_arguments(parser)
    parser.add_argument("--api-key", metavar="KEY", help="key of a server elsewhere (--url) [OCTAVO_API_KEY]")
    parser.add_argument("--json", action="store_true", help="print the answer as one line of JSON")
    parser.add_argument("--follow", action="store_true", help="print a line at each change until the request ends")
    parser.add_argument(
        "--interval", type=Number(float, 0, is_above=True), default=0.5, metavar="X",
        help="seconds between queries of --follow [0.5]",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print the explanation; return 0 if the server knows the request."""
    is_server_named(args)
    is_remote = args.url is not None and (bool(args.api_key) or not has_server_at(full_url(args.url)))
    if is_remote and not args.id:
        raise UsageError("--url names a server that is not one of yours; to explain one request there, give its ID")
    if args.api_key and args.url is None:
        raise UsageError("--api-key is for --url; a server here needs none")
    if args.follow and not args.id:
        raise UsageError("--follow follows one request; give its ID (octavo top shows all)")
    answer = _follow(args, is_remote) if args.follow else _explain(args, is_remote)
    if args.json:
        print(json.dumps(answer))
    else:
        print("\n".join(request_lines(answer) if args.id else open_lines(answer)))
    return 0


def _follow(args: argparse.Namespace, is_remote: bool) -> Json:
    """Print a line for each change of state until the request has ended; return the last answer."""
    last_states: list[tuple[object, ...]] = []
    while True:
        answer = _explain(args, is_remote)
        explanations = answer["explanations"]
        states = [tuple(one.get(name) for name in _WATCHED) for one in explanations]
        if states != last_states and not args.json:
            for one in explanations:
                print(f"{one.get('age_s', 0.0):8.2f} s  {one['text']}", flush=True)
        last_states = states
        if all(one["state"] in _ENDED for one in explanations):
            return answer
        time.sleep(args.interval)


def _explain(args: argparse.Namespace, is_remote: bool) -> Json:
    """Query the server once. Raises AdminError, NotAnsweredError."""
    if is_remote:
        base = full_url(args.url).removesuffix("/v1")
        return _get(f"{base}/v1/requests/{quote(args.id, safe='')}/explain", bearer_headers(args.api_key))
    answer: Json = call_admin(named_server(args).admin, "explain", args.id or "")
    explanations = answer.get("explanations", ())
    if explanations and all(one["state"] == "unknown" for one in explanations):
        raise NotAnsweredError(explanations[0]["text"])
    return answer


def _get(url: str, headers: dict[str, str]) -> Json:
    import httpx

    try:
        response = httpx.get(url, headers=headers, timeout=TIMEOUT_S)
        if response.status_code != 200:
            message = refusal_text(response.status_code, response.content)
            raise NotAnsweredError(f"{url} answers {response.status_code}: {message}")
        body: Any = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise NotAnsweredError(f"no answer from {url} ({reason_of(error)})") from None
    if not isinstance(body, dict):
        raise NotAnsweredError(f"{url} does not answer with an explanation; is it an Octavo server?")
    return body


# --- the text


def request_lines(answer: Json) -> list[str]:
    """Return lines about one request: each of its prompts, and the queue."""
    lines: list[str] = []
    for one in answer["explanations"]:
        lines += [*_prompt_lines(one), ""]
    if answer.get("num_left_out"):
        lines += [f"... and {answer['num_left_out']} more prompts", ""]
    return [*lines, _queue_line(answer["queue"])]


def open_lines(answer: Json) -> list[str]:
    """Return lines about all open requests, model by model if there are several."""
    if "models" in answer:
        parts = [[f"model {name}", *open_lines(one), ""] for name, one in answer["models"].items()]
        return [line for part in parts for line in part][:-1] or ["no model is loaded"]
    rows = [_row(one) for one in answer.get("open", ())]
    if not rows:
        return ["no request is open", _queue_line(answer["queue"])]
    lines = align_columns([_COLUMNS, *rows])
    if (more := answer.get("num_waiting", 0) + answer.get("num_running", 0) - len(rows)) > 0:
        lines.append(f"... and {more} more")
    return [*lines, _queue_line(answer["queue"])]


def _row(one: Json) -> tuple[str, ...]:
    reason = " ".join(part for part in (one["reason"] or "", f"({one['lacks']})" if one["lacks"] else "") if part)
    next_token_s = one["next_token_s"]
    return (
        one["id"],
        one["state"],
        str(one["position"] or "-"),
        reason or "-",
        f"{one['age_s']:.1f} s",
        str(one["num_prompt_tokens"]),
        str(one["num_outputs"]),
        "-" if next_token_s is None else f"in {next_token_s:.2f} s",
    )


def _queue_line(queue: Json) -> str:
    sequences = f"{queue['num_waiting']} of at most {queue['max_waiting']} sequences"
    tokens = f"{queue['num_waiting_tokens']} of at most {queue['max_waiting_tokens']} prompt tokens"
    wait = "" if queue.get("wait_s") is None else f"; a new request would wait about {queue['wait_s']:.1f} s"
    return f"queue: {sequences}, {tokens}{wait}"


def _prompt_lines(one: Json) -> list[str]:
    """Return the lines about one prompt: a sentence, name and value pairs, and the prompt's events."""
    pairs: list[tuple[str, str]] = []
    if one.get("position"):
        pairs += _queue_pairs(one)
    for name, state in (("deadline_in_s", "finished"), ("queue_timeout_in_s", "started")):
        if one.get(name) is not None:
            pairs.append(("timeout", f"in {one[name]:.2f} s, unless it has {state} by then"))
    if one.get("epoch"):
        is_resumed = one.get("begun_in_epoch") not in (None, one["epoch"])
        resumed = f", resumed {_times(one['num_resumes'])}" if is_resumed else ""
        replica = f"{one['replica']}, " if one.get("replica") else ""
        pairs.append(("engine", f"{replica}epoch {one['epoch']}{resumed}"))
    pairs.append(("tokens", _tokens_text(one)))
    if seconds := one.get("seconds"):
        spent = [f"{value:.2f} s {phase}" for phase, value in seconds.items() if phase != "total" and value > 0]
        first_s = one.get("first_token_s")
        first = "" if first_s is None else f"; first token after {first_s:.2f} s"
        pairs.append(("time", f"{seconds['total']:.2f} s: {', '.join(spent) or 'none yet'}{first}"))
    for index, event in enumerate(one.get("events") or ()):
        pairs.append(("" if index else "events", _event_text(event)))
    if one.get("num_events_left_out"):
        pairs.append(("", f"({one['num_events_left_out']} events in between are left out)"))
    return [one["text"], *(f"  {name:<8} {text}" for name, text in pairs)]


def _queue_pairs(one: Json) -> list[tuple[str, str]]:
    """Return a waiting prompt's facts as pairs: the policy's order, the requests ahead, the bypasses."""
    pairs = [("order", f"{one['policy']}: {one['rule']}" + (f"; {one['why']}" if one["why"] else ""))]
    ahead = [f"{other.get('id') or other.get('name')} ({other['why']})" for other in one["ahead"]]
    num_ahead = one.get("num_ahead", one["position"] - 1)
    if num_ahead > len(ahead):
        ahead.append(f"{num_ahead - len(ahead)} more")
    if num_ahead:
        pairs.append(("ahead", ", ".join(ahead)))
    if one["num_bypassed"]:
        times = _times(one["num_bypassed"])
        pairs.append(("bypassed", f"{times} by later requests, at most {_times(one['max_bypass'])}"))
    return pairs


def _tokens_text(one: Json) -> str:
    limit = f" of at most {one['max_tokens']}" if one.get("max_tokens") else ""
    parts = [f"{one.get('num_prompt_tokens', 0)} in the prompt", f"{one.get('num_outputs', 0)} generated{limit}"]
    for name, words in (("cached_tokens", "found cached"), ("num_recomputed_tokens", "to compute again")):
        if one.get(name):
            parts.append(f"{one[name]} {words}")
    if one.get("num_blocks"):
        parts.append(f"in {one['num_blocks']} blocks")
    return ", ".join(parts)


def _event_text(event: Json) -> str:
    kind, details = event["event"], ""
    if kind in ("admitted", "resumed"):
        details = f"{event['num_tokens']} tokens granted, {event['cached_tokens']} cached"
    elif kind == "chunked":
        details = f"{event['num_tokens']} tokens granted, {event['needed']} left"
    elif kind == "deferred":
        needs = f": needs {event['needed']}, {event['available']} left" if event["needed"] else ""
        details = f"{event['reason']}{needs}"
    elif kind == "preempted":
        by = event["by"] or "another tenant's request"
        cause = f"{event['reason']}, by {by}" if event["reason"] else "a step failed"
        details = f"{cause}, {event['num_tokens']} tokens to compute again"
    elif kind == "swapped":
        details = f"{event['num_tokens']} tokens kept on the host"
    elif kind in ("finished", "choice_finished"):
        details = f"{event['finish_reason']}, {event['num_tokens']} tokens"
    return f"{event['time_s']:9.3f} s  {kind:<15} {details}".rstrip()


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
