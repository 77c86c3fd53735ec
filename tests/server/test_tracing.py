"""Spans of requests, read from OpenTelemetry's exporter in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from live import Live, openai_client, until

from kvpool.errors import ConfigError

pytest.importorskip("opentelemetry.sdk")
PROMPT = "w5 w6 w7 w8 w9 w10 w11 w12 w13"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans() -> Iterator[Any]:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


@pytest.fixture
def traced(serve: Callable[..., Live], spans: Any) -> Iterator[Any]:
    """OpenAI's client at a server that makes spans."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    from kvpool.server import Tracing

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    with openai_client(serve(tracing=Tracing(provider))) as client:
        yield client


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each step the engine waits until the server has taken what the step gave."""
    from kvpool.server.served_model import LoopNotifier

    call = LoopNotifier._call

    def call_and_wait(notifier: Any) -> None:
        told = list(notifier._waiting)
        call(notifier)
        until(lambda: not any(running._news for running in told))

    monkeypatch.setattr(LoopNotifier, "_call", call_and_wait)


def seconds(span: Any) -> float:
    return float(span.end_time - span.start_time) / 1e9


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("stream", [False, True])
def test_given_a_request_then_its_span_tells_where_the_time_went(traced: Any, spans: Any, stream: bool) -> None:
    traced.completions.create(model="tiny", prompt=PROMPT, max_tokens=1)
    spans.clear()
    headers = {"x-request-id": "mine-1", "traceparent": PARENT}
    wanted = dict(model="tiny", prompt=PROMPT, max_tokens=4, stream=stream, extra_headers=headers)
    answer = traced.completions.create(**wanted, extra_body={"ignore_eos": True})
    if stream:
        list(answer)
    until(lambda: len(spans.get_finished_spans()) == 4)  # a stream's span ends after its last event went out
    found = {span.name: span for span in spans.get_finished_spans()}
    assert set(found) == {"POST /v1/completions", "queue", "prompt", "decode"}
    whole = found["POST /v1/completions"]
    assert f"{whole.context.trace_id:032x}" == PARENT.split("-")[1]
    told = whole.attributes
    assert (told["kvpool.request_id"], told["kvpool.model"], told["kvpool.tenant"]) == ("mine-1", "tiny", "")
    assert (told["kvpool.prompt_tokens"], told["kvpool.cached_tokens"], told["kvpool.generated_tokens"]) == (9, 8, 4)
    common = {name.removeprefix("gen_ai."): value for name, value in told.items() if name.startswith("gen_ai.")}
    assert common.items() >= {
        ("operation.name", "text_completion"),
        ("provider.name", "kvpool"),
        ("request.model", "tiny"),
        ("request.max_tokens", 4),
        ("response.model", "tiny"),
        ("response.finish_reasons", ("length",)),
        ("usage.input_tokens", 9),
        ("usage.cache_read.input_tokens", 8),
        ("usage.output_tokens", 4),
    }
    assert 0 <= told["kvpool.queue_seconds"] <= told["kvpool.first_token_seconds"] <= seconds(whole)
    assert whole.status.is_ok or whole.status.is_unset
    parts = [found[name] for name in ("queue", "prompt", "decode")]
    assert all(part.parent.span_id == whole.context.span_id for part in parts)
    assert [part.end_time for part in parts[:2]] == [part.start_time for part in parts[1:]]
    assert len(parts[2].attributes["kvpool.step_seconds"]) == 3  # one for each token after the first
    assert not any("w5" in str(value) for span in found.values() for value in span.attributes.values())


@pytest.mark.slow
def test_given_a_request_that_is_refused_by_the_engine_then_its_span_is_an_error(traced: Any, spans: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        traced.completions.create(model="tiny", prompt=[5], logit_bias={"9999": 1})
    (whole,) = [span for span in spans.get_finished_spans() if span.name == "POST /v1/completions"]
    assert not whole.status.is_ok
    assert "9999" in whole.status.description


def test_given_no_exporter_then_the_message_says_what_to_install() -> None:
    from kvpool.server import Tracing

    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401
    except ModuleNotFoundError:
        with pytest.raises(ConfigError, match=r"traces need opentelemetry.* pip install '\.\[traces\]' in a checkout"):
            Tracing.to("http://127.0.0.1:9/v1/traces")
    else:
        Tracing.to("http://127.0.0.1:9/v1/traces").close()


def test_given_a_request_then_its_answer_has_its_name(client: Any) -> None:
    own = client.models.with_raw_response.list(extra_headers={"x-request-id": "mine-2"})
    assert own.headers["x-request-id"] == "mine-2"
    other = client.models.with_raw_response.list(extra_headers={"x-request-id": "not mine"})
    assert other.headers["x-request-id"].startswith("req-")
    with pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(model="huge", prompt=PROMPT)
    assert refused.value.request_id.startswith("req-")


def test_given_a_failure_of_the_server_itself_then_its_answer_has_the_name_too(
    client: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "token_ids", lambda prompt: 1 / 0)
    with pytest.raises(openai.InternalServerError, match="ZeroDivisionError") as failed:
        client.completions.create(model="tiny", prompt="hello", extra_headers={"x-request-id": "mine-3"})
    assert failed.value.response.headers.get_list("x-request-id") == ["mine-3"]
