"""The explanation of a request as text for the terminal, made from the server's answer.

Owns: words and columns. Does not: ask the server (see explain), or know whether names were left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Told = Mapping[str, Any]

_COLUMNS = ("ID", "STATE", "PLACE", "WHY", "AGE", "PROMPT", "OUTPUT", "NEXT TOKEN")
_SOMEBODY = "a request of somebody else"


def story(answer: Told) -> list[str]:
    """Return lines about one id: each of its prompts, and the queue."""
    lines: list[str] = []
    for told in answer["explanations"]:
        lines += [*_prompt(told), ""]
    if answer.get("num_left_out"):
        lines += [f"... and {answer['num_left_out']} prompts more", ""]
    return [*lines, _queue(answer["queue"])]


def table(answer: Told) -> list[str]:
    """Return lines about all open requests."""
    rows = [_row(told) for told in answer.get("open", ())]
    if not rows:
        return ["no request is open", _queue(answer["queue"])]
    cells = [_COLUMNS, *rows]
    widths = [max(len(row[index]) for row in cells) for index in range(len(_COLUMNS))]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    if (more := answer.get("num_waiting", 0) + answer.get("num_running", 0) - len(rows)) > 0:
        lines.append(f"... and {more} more")
    return [*lines, _queue(answer["queue"])]


def headline(told: Told) -> str:
    """Return the request's state in one line."""
    return f"{told.get('age_s', 0.0):8.2f} s  {told['text']}"


def _prompt(told: Told) -> list[str]:
    lines = [told["text"]]
    if told.get("position"):
        lines.append(_pair("order", f"{told['policy']}: {told['rule']}" + (f"; {told['why']}" if told["why"] else "")))
        lines += _ahead(told)
        if told["num_bypassed"]:
            lines.append(
                _pair("passed", f"{told['num_bypassed']} times by later ones; at {told['max_bypass']} no more")
            )
    for name, unless in (("deadline_in_s", "it is done"), ("queue_timeout_in_s", "it has begun")):
        if told.get(name) is not None:
            lines.append(_pair("ends", f"in {told[name]:.2f} s, unless {unless} before"))
    if told.get("epoch"):
        begun = told.get("begun_in_epoch")
        since = (
            ""
            if begun is None or begun == told["epoch"]
            else f", resumed {told['num_resumes']} time" + "s" * (told["num_resumes"] != 1)
        )
        lines.append(_pair("engine", f"epoch {told['epoch']}{since}"))
    lines.append(_pair("tokens", _tokens(told)))
    seconds = told.get("seconds") or {}
    if seconds:
        spent = [f"{value:.2f} s {phase}" for phase, value in seconds.items() if phase != "total" and value > 0]
        first = told.get("first_token_s")
        shown = "" if first is None else f"; first token after {first:.2f} s"
        lines.append(_pair("time", f"{seconds['total']:.2f} s: {', '.join(spent) or 'none yet'}{shown}"))
    events = told.get("events") or ()
    lines += [_pair("life" if index == 0 else "", _event(event)) for index, event in enumerate(events)]
    if told.get("num_events_left_out"):
        lines.append(_pair("", f"({told['num_events_left_out']} events in between are left out)"))
    return lines


def _ahead(told: Told) -> list[str]:
    num = told.get("num_ahead", told["position"] - 1)
    shown = [f"{other.get('id') or other.get('name')} ({other['why']})" for other in told["ahead"]]
    if not num:
        return []
    more = num - len(shown)
    return [_pair("ahead", ", ".join(shown) + (f"{', ' if shown else ''}{more} more" if more else ""))]


def _tokens(told: Told) -> str:
    parts = [f"{told.get('num_prompt_tokens', 0)} of the prompt", f"{told.get('num_outputs', 0)} out"]
    if told.get("max_tokens"):
        parts[-1] += f" of at most {told['max_tokens']}"
    for name, words in (("cached_tokens", "found cached"), ("num_recomputed_tokens", "to compute again")):
        if told.get(name):
            parts.append(f"{told[name]} {words}")
    if told.get("num_blocks"):
        parts.append(f"in {told['num_blocks']} blocks")
    return ", ".join(parts)


def _event(event: Told) -> str:
    kind, numbers = event["event"], ""
    if kind in ("admitted", "resumed"):
        numbers = f"{event['num_tokens']} tokens granted, {event['cached_tokens']} cached"
    elif kind == "chunked":
        numbers = f"{event['num_tokens']} tokens granted, {event['needed']} left"
    elif kind == "deferred":
        needs = f": needs {event['needed']}, {event['available']} left" if event["needed"] else ""
        numbers = f"{event['reason']}{needs}"
    elif kind == "preempted":
        cause = f"{event['reason']}, " if event["reason"] else ""
        numbers = f"{cause}by {event['by'] or _SOMEBODY}, {event['num_tokens']} tokens to compute again"
        if event["reason"] is None:
            numbers = f"a step failed, {event['num_tokens']} tokens to compute again"
    elif kind == "swapped":
        numbers = f"{event['num_tokens']} tokens kept on the host"
    elif kind in ("finished", "choice_finished"):
        numbers = f"{event['finish_reason']}, {event['num_tokens']} tokens"
    return f"{event['time_s']:9.3f} s  {kind:<15} {numbers}".rstrip()


def _row(told: Told) -> tuple[str, ...]:
    why = " ".join(part for part in (told["reason"] or "", f"({told['lacks']})" if told["lacks"] else "") if part)
    token = told["next_token_s"]
    return (
        told["id"],
        told["state"],
        str(told["position"] or "-"),
        why or "-",
        f"{told['age_s']:.1f} s",
        str(told["num_prompt_tokens"]),
        str(told["num_outputs"]),
        "-" if token is None else f"in {token:.2f} s",
    )


def _queue(queue: Told) -> str:
    wait = "" if queue.get("wait_s") is None else f"; a new one would wait about {queue['wait_s']:.1f} s"
    tokens = f"{queue['num_waiting_tokens']} of {queue['max_waiting_tokens']} prompt tokens"
    return f"queue: {queue['num_waiting']} sequences wait, {queue['max_waiting']} may; {tokens}{wait}"


def _pair(name: str, text: str) -> str:
    return f"  {name:<8} {text}"
