"""Spans of requests: what they hold, whose children they are, and what a collector gets."""

import asyncio
import dataclasses
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from octavo.config import Config, TelemetryConfig
from octavo.core.limits import Limits
from octavo.core.plan import Event, EventKind
from octavo.core.request import FinishReason
from octavo.core.scheduler import Scheduler
from octavo.engine.loop import EngineLoop, Outbox
from octavo.errors import ConfigError
from octavo.executors.protocol import ExecutorSpec
from octavo.frontend.local_client import LocalClient
from octavo.frontend.open_request import MAX_PREEMPTIONS
from octavo.observe.otel import RequestTrace, Timed, Tracer, check_endpoint
from tests.engine.fakes import make_request
from tests.fake_model import FakeExecutor
from tests.frontend.ledgers import Begun
from tests.server.fakes import Harness, Wire

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-1] + "0"


class Kept(Tracer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__(None)
        self.is_on = True
        self.traces: list[RequestTrace] = []

    def send(self, trace: RequestTrace) -> None:
        self.traces.append(trace)

    def close(self) -> None:
        pass


@asynccontextmanager
async def traced(num_blocks: int = 64) -> AsyncIterator[tuple[Harness, Kept]]:
    limits = Limits(block_size=16, num_blocks=(num_blocks,), max_model_len=512, vocab_size=258, max_batch_tokens=256)
    executor = FakeExecutor(vocab_size=258, max_model_len=512)
    executor.open(ExecutorSpec(limits.max_sequences, limits.max_batch_tokens, 16, num_blocks=num_blocks))
    client = LocalClient(EngineLoop(Scheduler(limits), executor))
    harness, kept = Harness(engine=client), Kept()  # type: ignore[arg-type]
    harness.app.state.context = dataclasses.replace(harness.context, tracer=kept)
    try:
        yield harness, kept
    finally:
        await client.close()


async def test_a_request_has_a_span_for_each_part_of_its_life_in_order() -> None:
    async with traced() as (harness, kept):
        response = await harness.complete(max_tokens=20, temperature=0.5, headers={"traceparent": PARENT})
        usage = response.json()["usage"]
    (trace,) = kept.traces
    assert trace.name == "text_completion tiny" and trace.parent == {"traceparent": PARENT} and trace.error is None
    assert [span.name for span in trace.spans] == ["queue", "prefill", "decode"]
    moments = [trace.start, *(at for span in trace.spans for at in (span.start, span.end)), trace.end]
    assert moments == sorted(moments)
    assert trace.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert trace.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert trace.attributes["gen_ai.request.temperature"] == 0.5
    assert trace.attributes["gen_ai.operation.name"] == "text_completion"
    assert trace.attributes["gen_ai.response.finish_reasons"] in (["stop"], ["length"])
    assert 0 < trace.attributes["gen_ai.latency.time_to_first_token"] <= trace.attributes["gen_ai.latency.e2e"]


async def test_streams_chats_and_several_prompts_are_traced_once_each() -> None:
    async with traced() as (harness, kept):
        await harness.chat(max_tokens=5, stream=True)
        await harness.complete(prompt=["a", "b"], max_tokens=5)
    chat, both = kept.traces
    assert chat.name == "chat tiny" and len(chat.spans) == 3
    assert [span.name for span in both.spans] == ["queue", "prefill", "decode"] * 2


async def test_refused_and_left_requests_end_with_an_error() -> None:
    async with traced() as (harness, kept):
        code = (await harness.complete(prompt="x" * 600)).json()["error"]["code"]
        body = {"prompt": "leave", "max_tokens": 400, "ignore_eos": True, "stream": True}
        wire = Wire(harness.app, "/v1/completions", body)
        task = wire.start()
        await wire.until(lambda: '"text"' in wire.text)
        wire.leave()
        await task
    refused, left = kept.traces
    assert refused.error == code and not refused.spans
    assert left.error == "cancelled" and left.end is not None


async def test_preemptions_are_spans_inside_the_request() -> None:
    async with traced(num_blocks=12) as (harness, kept):
        asked = [harness.complete(prompt=f"{i}" * 20, max_tokens=120, ignore_eos=True) for i in range(4)]
        await asyncio.gather(*asked)
    spans = [(trace, span) for trace in kept.traces for span in trace.spans if span.name == "preempted"]
    assert spans, "the pool holds one of them, and four asked"
    assert all(trace.start <= span.start <= span.end <= trace.end for trace, span in spans)


def test_times_out_of_the_batch_go_with_the_end_and_are_bounded() -> None:
    outbox = Outbox()
    outbox.open("a")
    requests = Begun()
    requests.add(make_request("a"))
    arrival = make_request("a").arrival
    events = [Event(EventKind.ADMITTED, "a", arrival + 1, 1)]
    for turn in range(MAX_PREEMPTIONS + 5):
        events.append(Event(EventKind.PREEMPTED, "a", arrival + 2 + turn, 2, by="b"))
        events.append(Event(EventKind.RESUMED, "a", arrival + 2.5 + turn, 3))
    events.append(Event(EventKind.FINISHED, "a", arrival + 99, 4, finish_reason=FinishReason.LENGTH))
    sent = outbox.decided(tuple(events))
    assert sent is not None and len(sent.decisions) == len(events)
    requests.accept(0, sent)
    state = requests.get("a")
    assert state is not None
    (end,) = state.take()
    assert end.is_final and end.queue_s == 1.0 and len(end.preempted) == MAX_PREEMPTIONS
    assert end.preempted[0] == (2.0, 2.5)


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """(endpoint, spans it got): a collector of OTLP over HTTP."""
    got: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
            for resource in body.resource_spans:
                got.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", got
    server.shutdown()
    server.server_close()
    thread.join()


def finished(parent: str | None = None, error: str | None = None) -> RequestTrace:
    trace = RequestTrace("chat tiny", 10.0, {"traceparent": parent} if parent else {}, {"gen_ai.request.model": "tiny"})
    trace.timed(Timed(10.5, 1.0, 2.0, 20.0, ((3.0, 4.0),), 7, 5, 0), "stop")
    trace.error = error
    trace.finish(21.0)
    return trace


def test_a_collector_gets_the_request_under_its_parent_and_its_parts_under_it(collector: Any) -> None:
    endpoint, got = collector
    tracer = Tracer(endpoint)
    tracer.send(finished(PARENT))
    tracer.close()
    by_name = {span.name: span for span in got}
    root = by_name["chat tiny"]
    assert set(by_name) == {"chat tiny", "queue", "prefill", "decode", "preempted"}
    assert root.trace_id.hex() == PARENT.split("-")[1] and root.parent_span_id.hex() == PARENT.split("-")[2]
    assert all(span.parent_span_id == root.span_id for span in got if span is not root)
    lengths = {name: (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 for name, span in by_name.items()}
    assert {name: round(length, 3) for name, length in lengths.items()} == {
        "chat tiny": 11.0, "queue": 1.0, "prefill": 1.0, "decode": 7.5, "preempted": 1.0,
    }  # fmt: skip
    values = {entry.key: entry.value for entry in root.attributes}
    assert values["gen_ai.usage.input_tokens"].int_value == 7 and root.kind == root.SPAN_KIND_SERVER


def test_whoever_does_not_sample_gets_no_spans_and_errors_are_marked(collector: Any) -> None:
    endpoint, got = collector
    tracer = Tracer(endpoint)
    tracer.send(finished(UNSAMPLED))
    tracer.send(finished(error="timeout"))
    tracer.close()
    (root,) = [span for span in got if not span.parent_span_id]
    assert len(got) == 5 and root.status.code == root.status.STATUS_CODE_ERROR
    assert {entry.key: entry.value.string_value for entry in root.attributes}["error.type"] == "timeout"


def test_no_collector_costs_no_request() -> None:
    tracer = Tracer("http://127.0.0.1:9/v1/traces")
    for _ in range(100):
        tracer.send(finished())
    tracer.is_on = False  # what is left is not worth waiting for


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "grpc://host", "http://"])
def test_an_endpoint_that_is_none_is_refused_with_an_example(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="4318/v1/traces"):
        check_endpoint(endpoint)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    with pytest.raises(ConfigError, match=r"octavo\[otel\]"):
        Tracer("http://127.0.0.1:4318/v1/traces")


def test_off_nothing_of_the_package_is_loaded() -> None:
    code = (
        "import sys; from octavo.config import Config; from octavo.observe.otel import Tracer; Tracer(None)\n"
        "sys.exit(any(name.startswith('opentelemetry.sdk') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    assert Config().telemetry == TelemetryConfig(None, "text", "warning")
