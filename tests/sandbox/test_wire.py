"""Bytes on the pipes of a sandbox process: a checked struct or a WireError, at both ends."""

import random
import subprocess
import sys

import msgspec
import pytest

from octavo.errors import EngineError, InvalidRequestError, ModelFileError, TooComplexError
from octavo.sandbox import wire
from octavo.sandbox.pool import COMMAND


def frames() -> list[bytes]:
    order = wire.Order(7, "check_regex", 2.0, wire.pack(wire.CheckRegex("a+")))
    told = [
        wire.WorkerReady(1),
        wire.JobResult(7, {"a": [1, None, "x"]}),
        wire.Refusal(7, "TooComplexError", "no", "regex"),
    ]
    return [wire.frame(message) for message in (order, *told)]


def damaged(rng: random.Random, frame: bytes) -> bytes:
    raw = bytearray(frame)
    for _ in range(rng.choice((1, 2, 5))):
        at = rng.randrange(len(raw))
        raw[at : at + rng.choice((0, 1, 3))] = rng.randbytes(rng.choice((0, 1, 3)))
        raw = raw or bytearray(b"\x00")
    return bytes(raw)


def test_row_30_damaged_frames_of_a_tool_process_are_structs_or_wire_errors() -> None:
    rng, whole = random.Random(30), frames()
    outcomes = {"read": 0, "refused": 0}
    for _ in range(20_000):
        raw = damaged(rng, rng.choice(whole))
        for decode in (wire.decode_order, wire.decode_to_parent):
            try:
                decode(raw[4:])
                outcomes["read"] += 1
            except wire.FrameError:
                outcomes["refused"] += 1
        if len(raw) >= 4:
            try:
                assert wire.length_of(raw[:4]) <= wire.MAX_FRAME_BYTES
            except wire.FrameError:
                outcomes["refused"] += 1
    assert min(outcomes.values()) > 1000


def test_row_30_a_tool_process_that_is_fed_garbage_ends() -> None:
    rng = random.Random(31)
    for _ in range(4):
        garbage = damaged(rng, frames()[0]) + rng.randbytes(5000)
        done = subprocess.run(
            [*COMMAND, "--memory-bytes", str(1 << 30)], input=garbage, capture_output=True, timeout=30
        )
        assert done.returncode >= 0, done.stderr[-500:]
        assert wire.decode_to_parent(done.stdout[4 : 4 + wire.length_of(done.stdout[:4])]) == wire.WorkerReady(
            wire.VERSION
        )


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (TooComplexError("no", "regex"), TooComplexError, "no"),
        (InvalidRequestError("no", "regex"), InvalidRequestError, "no"),
        (
            ModelFileError("chat template", "cannot be compiled"),
            InvalidRequestError,
            "chat template: cannot be compiled",
        ),
        (RecursionError("deep inside"), TooComplexError, "it is too large or nested too deeply"),
        (MemoryError(), TooComplexError, "it is too large or nested too deeply"),
        (ValueError("a secret"), EngineError, "the job failed (ValueError)"),
    ],
    ids=lambda value: "",
)
def test_errors_cross_the_pipe(error: Exception, kind: type[Exception], message: str) -> None:
    refusal = wire.decode_to_parent(wire.frame(wire.Refusal.of(3, error))[4:])
    assert isinstance(refusal, wire.Refusal)
    again = refusal.error()
    assert type(again) is kind and str(again) == message
    assert getattr(again, "param", None) == getattr(error, "param", None)


def test_a_kind_that_is_no_error_is_not_made() -> None:
    for kind in ("OctavoError", "SystemExit", "annotations", "__builtins__", ""):
        assert type(wire.Refusal(1, kind, "x").error()) is EngineError


def test_frames_have_a_cap() -> None:
    with pytest.raises(wire.FrameError, match="frames hold"):
        wire.frame(wire.JobResult(1, "x" * wire.MAX_FRAME_BYTES))
    with pytest.raises(wire.FrameError, match="was announced"):
        wire.length_of(wire.LENGTH.pack(wire.MAX_FRAME_BYTES + 1))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(wire.pack({"pattern": 5}), type=wire.CheckRegex)


def test_the_command_is_this_python() -> None:
    assert COMMAND[0] == sys.executable
