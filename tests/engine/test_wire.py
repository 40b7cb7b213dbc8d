"""Frames: what goes in comes out, and anything else is a WireError."""

from __future__ import annotations

import dataclasses
import struct
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.limits import GroupKind, GroupSpec
from octavo.core.plan import Event, EventKind, Events, TokenLogprobs, WaitReason
from octavo.core.request import FinishError, FinishReason, Request, SamplingParams, Span, Want
from octavo.engine import wire
from octavo.engine.client import Accepted
from octavo.errors import ErrorKind, ModelFileError, RequestError, error_of
from octavo.executors.protocol import Capacity

int32 = st.integers(-(2**31), 2**31 - 1)
ids = st.lists(int32, max_size=40).map(lambda values: array("i", values))
names = st.text(max_size=20)
finite = st.floats(allow_nan=False)
params = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(50, 2**31 - 1),
    min_tokens=st.integers(0, 50),
    temperature=st.floats(0, 100),
    top_p=st.floats(0.01, 1),
    logit_bias=st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-100, 100)), max_size=5).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    stop=st.lists(st.text(min_size=1, max_size=9), max_size=3).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    n=st.integers(1, 4),
    best_of=st.none() | st.integers(4, 9),
    length_penalty=st.floats(-100, 100),
    early_stopping=st.booleans() | st.just("never"),
    typical_p=st.floats(0.01, 1),
    dry_multiplier=st.floats(0, 100),
    dry_breaker_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    bad_words_ids=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    allowed_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
)
beams = st.builds(SamplingParams, n=st.integers(1, 4), beam_width=st.integers(4, 64))
requests = st.builds(
    Request,
    request_id=names,
    prompt_token_ids=st.none() | ids,
    params=params | beams,
    arrival=finite,
    num_prompt_tokens=st.integers(0, 2**40),
    block_keys=st.none() | st.lists(st.binary(min_size=16, max_size=16), max_size=3).map(tuple),
    emitted_token_ids=st.none() | ids,
    eos_token_ids=st.lists(int32, max_size=3).map(tuple),
    wants=st.integers(1, 7).map(Want),
    priority=st.integers(-(2**62), 2**62),
    tenant=names,
    cache_salt=st.binary(max_size=32),
    adapter_id=st.integers(0, 2**31),
    spans=st.lists(st.builds(Span, st.integers(0, 99), st.integers(0, 99), st.binary()), max_size=2).map(tuple),
    score_from=st.integers(0, 2**31),
    deadline=st.none() | finite,
    queue_timeout=st.none() | finite,
    ttft_objective=st.none() | finite,
    tpot_objective=st.none() | finite,
)
logprobs = st.builds(
    TokenLogprobs,
    int32,
    st.floats(allow_nan=False),
    st.integers(1, 2**31),
    st.lists(int32, max_size=3).map(tuple),
    st.lists(st.floats(allow_nan=False), max_size=3).map(tuple),
)
errors = st.builds(FinishError, st.sampled_from(ErrorKind), names)
decisions = st.builds(
    Event,
    st.sampled_from(EventKind),
    names,
    finite,
    st.integers(0, 2**62),
    reason=st.none() | st.sampled_from(WaitReason),
    num_tokens=st.integers(0, 2**31),
    by=st.none() | names,
    cached_tokens=st.integers(0, 2**31),
    finish_reason=st.sampled_from(FinishReason),
    stop_token_id=st.none() | int32,
    error=st.none() | errors,
    choice=st.integers(0, 2**31),
)


@st.composite
def step_events(draw: st.DrawFn) -> Events:
    count = draw(st.integers(0, 8))

    def column() -> array[int]:
        return array("i", draw(st.lists(int32, min_size=count, max_size=count)))

    return Events(
        draw(st.integers(0, 2**62)),
        draw(finite),
        draw(st.lists(names, min_size=count, max_size=count)),
        column(),
        column(),
        column(),
        draw(st.none() | st.lists(st.none() | logprobs, min_size=count, max_size=count)),
        tuple(draw(st.lists(st.tuples(names, int32, st.lists(logprobs, max_size=3).map(tuple)), max_size=2))),
        tuple(draw(st.lists(st.tuples(names, st.binary(max_size=16)), max_size=2))),
        tuple(draw(st.lists(decisions, max_size=4))),
    )


def body_of(frame: bytes) -> bytes:
    (body,) = wire.FrameSplitter().feed(frame)
    return body


@settings(max_examples=60, deadline=None)
@given(requests, st.integers(0, 2**40))
def test_requests_survive_the_wire(request: Request, epoch: int) -> None:
    message = wire.decode_to_engine(body_of(wire.frame(wire.Submit.of(epoch, request))))
    assert isinstance(message, wire.Submit) and message.epoch == epoch
    assert message.request() == request


@settings(max_examples=60, deadline=None)
@given(step_events())
def test_events_survive_the_wire(events: Events) -> None:
    message = wire.decode_from_engine(body_of(wire.frame(wire.Outputs.of(7, events))))
    assert isinstance(message, wire.Outputs) and message.events() == events


def test_no_field_of_a_core_type_is_forgotten() -> None:
    for core, message in ((Request, wire.Submit), (Events, wire.Outputs)):
        fields = [field.name for field in dataclasses.fields(core)]
        assert [name for name in message.__struct_fields__ if name not in ("epoch", "media")] == fields


CAPACITY = Capacity((GroupSpec(GroupKind.SLIDING, 8, 64, (0, 2)),), (9,), 16, 4, 128, 97, notes=("a note",))
SAMPLES: list[wire.ToEngine | wire.FromEngine] = [
    wire.CancelRequests(1, ("a", "b"), FinishReason.STOP),
    wire.CancelRequests(1, ("a",), FinishReason.STOP, 3),
    wire.ControlRequest(1, 7, "statistics", ""),
    wire.Close(1),
    wire.Ready(1, wire.VERSION, CAPACITY),
    wire.SubmitReply(1, Accepted("a", 5, True)),
    wire.ErrorReply(1, ErrorKind.ENGINE, "why"),
    wire.ControlReply(1, 7, {"a": [1, 2.5, None, "x"]}),
]


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_wire(message: wire.ToEngine | wire.FromEngine) -> None:
    body = body_of(wire.frame(message))
    decode = wire.decode_to_engine if isinstance(message, wire.ToEngine) else wire.decode_from_engine
    assert decode(body) == message


@pytest.mark.parametrize(
    "error",
    [error_of(kind, "why", "prompt") for kind in ErrorKind if kind.value.endswith("Error")]
    + [ModelFileError("/m.gguf", "truncated", "blk.0")],
    ids=lambda error: type(error).__name__,
)
def test_errors_keep_their_class_message_and_param(error: Exception) -> None:
    message = wire.decode_from_engine(body_of(wire.frame(wire.ErrorReply.of(1, error, "a"))))
    assert isinstance(message, wire.ErrorReply)
    back = message.error()
    assert type(back) is type(error) and str(back) == str(error)
    assert getattr(back, "param", None) == getattr(error, "param", None)
    assert type(error).__name__ == message.kind.value


def test_foreign_errors_become_engine_errors() -> None:
    back = wire.ErrorReply.of(1, ZeroDivisionError("x")).error()
    assert type(back).__name__ == "EngineError" and str(back) == "ZeroDivisionError: x"


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_message_or_a_wire_error(body: bytes) -> None:
    for decode in (wire.decode_to_engine, wire.decode_from_engine):
        try:
            message = decode(body)
            if isinstance(message, wire.Outputs):
                message.events()
            if isinstance(message, wire.Submit):
                message.request()
        except (wire.WireError, RequestError):
            pass


@settings(max_examples=200, deadline=None)
@given(requests, st.data())
def test_mutated_frames_give_a_message_or_a_wire_error(request: Request, data: st.DataObject) -> None:
    body = bytearray(body_of(wire.frame(wire.Submit.of(1, request))))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        message = wire.decode_to_engine(bytes(body))
        if isinstance(message, wire.Submit):
            message.request()
    except (wire.WireError, RequestError):
        pass


@pytest.mark.parametrize("size", [0, 15, 17])
def test_K02_a_block_key_of_another_size_is_refused(size: int) -> None:
    request = Request("a", array("i", range(16)), block_keys=(b"k" * size,))
    with pytest.raises(wire.WireError, match="length"):
        wire.decode_to_engine(body_of(wire.frame(wire.Submit.of(1, request))))


def test_columns_of_unequal_length_are_refused() -> None:
    message = wire.Outputs.of(1, Events(1, 0.0, ["a"], array("i", [0]), array("i", [0]), array("i", [5])))
    message.token_ids = array("i", [5, 6]).tobytes()
    with pytest.raises(wire.WireError, match="columns"):
        message.events()
    message.token_ids = b"abc"
    with pytest.raises(wire.WireError, match="32-bit"):
        message.events()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=30), max_size=10), st.lists(st.integers(1, 40), max_size=40))
def test_the_splitter_finds_every_frame_however_the_stream_is_cut(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(struct.pack("<I", len(body)) + body for body in bodies)
    splitter, found = wire.FrameSplitter(), []
    for cut in cuts:
        found += splitter.feed(stream[:cut])
        stream = stream[cut:]
    found += splitter.feed(stream)
    assert found == bodies


def test_an_impossible_length_is_refused_before_memory_is_spent() -> None:
    splitter = wire.FrameSplitter()
    with pytest.raises(wire.WireError, match="announced"):
        list(splitter.feed(struct.pack("<I", wire.MAX_FRAME_BYTES + 1) + b"x" * 100))


def test_a_message_over_the_cap_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 10)
    with pytest.raises(wire.WireError, match="hold 10"):
        wire.frame(wire.SubmitReply(1, Accepted("a" * 100, 5, True)))
