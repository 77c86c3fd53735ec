"""Spans of requests for OpenTelemetry, with the times of their parts. `kvpool serve --traces` names a collector."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvpool.errors import ConfigError
from kvpool.terminal import is_http
from kvpool.version import __version__

if TYPE_CHECKING:
    from kvpool.engine.generation import Generation

_MAX_STEPS = 4096  # steps whose times a span holds


class Tracing:
    """Makes the spans of requests; `provider` is a TracerProvider of opentelemetry."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._tracer = provider.get_tracer("kvpool", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._provider = provider

    @classmethod
    def to(cls, url: str) -> Tracing:
        """Sends spans to a collector, such as http://127.0.0.1:4318/v1/traces. A thread sends them in batches."""
        if not is_http(url):
            raise ConfigError(f"--traces is {url!r}; write an address such as http://127.0.0.1:4318/v1/traces")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as error:
            raise ConfigError(f"traces need {error.name}: pip install '.[traces]' in a checkout of kvpool") from None
        provider = TracerProvider(resource=Resource.create({"service.name": "kvpool"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        return cls(provider)

    def begin(
        self, headers: Mapping[str, str], path: str, asked: Mapping[str, Any], request_id: str, model: str, tenant: str
    ) -> RequestTrace:
        """Begins the span of a request. It is part of the caller's trace if the headers name one (`traceparent`).

        `asked` are what the request asks for, by the names of OpenTelemetry's `gen_ai.request` attributes.
        """
        own = {"kvpool.request_id": request_id, "kvpool.model": model, "kvpool.tenant": tenant}
        common = {
            "gen_ai.operation.name": "text_completion" if path == "/v1/completions" else "chat",
            "gen_ai.provider.name": "kvpool",
            "gen_ai.request.model": model,
            **{f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None},
        }
        context = self._propagator.extract(dict(headers))
        span = self._tracer.start_span(f"POST {path}", context, self._trace.SpanKind.SERVER, own | common)
        return RequestTrace(self, span, model)

    def part(self, span: Any, name: str, start: int, end: int, attributes: Mapping[str, Any] | None = None) -> None:
        """Adds a span below another one, with known times."""
        context = self._trace.set_span_in_context(span)
        self._tracer.start_span(name, context, attributes=attributes, start_time=start).end(end)

    def failed(self, span: Any, words: str) -> None:
        """Marks the span as failed."""
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, words))

    def close(self) -> None:
        """Sends what waits."""
        self._provider.shutdown()


class RequestTrace:
    """The span of one request while it runs, and its attributes."""

    def __init__(self, tracing: Tracing, span: Any, model: str) -> None:
        self._tracing = tracing
        self._span = span
        self._model = model
        self._began = time.time_ns()
        self._steps: list[float] = []

    def step(self, seconds: float) -> None:
        """New tokens came; `seconds` have passed since those before them."""
        if len(self._steps) < _MAX_STEPS:
            self._steps.append(seconds)

    def end(self, generations: Sequence[Generation], trouble: str = "") -> None:
        """The answer is over: one span each for waiting, for the prompt and for the tokens after the first."""
        now, span = time.time_ns(), self._span
        samples = [sample for one in generations for sample in one.samples.values()]
        prompts, cached = (
            sum(one.num_prompt_tokens for one in generations),
            sum(one.num_cached_tokens for one in generations),
        )
        generated = sum(len(sample.token_ids) for sample in samples)
        reasons = [sample.finish_reason or "" for sample in samples]
        for names, value in (
            (("kvpool.prompt_tokens", "gen_ai.usage.input_tokens"), prompts),
            (("kvpool.cached_tokens", "gen_ai.usage.cache_read.input_tokens"), cached),
            (("kvpool.generated_tokens", "gen_ai.usage.output_tokens"), generated),
            (("kvpool.finish_reasons", "gen_ai.response.finish_reasons"), reasons),
            (("gen_ai.response.model",), self._model),
        ):
            for name in names:
                span.set_attribute(name, value)
        for one in generations:
            self._parts(one, now)
        if trouble:
            self._tracing.failed(span, trouble)
        span.end(now)

    def _parts(self, one: Generation, now: int) -> None:
        waited, first = one.queue_seconds, one.first_token_seconds
        admitted = now if waited is None else self._began + int(waited * 1e9)
        self._tracing.part(self._span, "queue", self._began, admitted)
        if waited is None:
            return
        self._span.set_attribute("kvpool.queue_seconds", waited)
        told = now if first is None else self._began + int(first * 1e9)
        tokens = {"kvpool.prompt_tokens": one.num_prompt_tokens, "kvpool.cached_tokens": one.num_cached_tokens}
        self._tracing.part(self._span, "prompt", admitted, told, tokens)
        if first is not None:
            self._span.set_attribute("kvpool.first_token_seconds", first)
            self._tracing.part(self._span, "decode", told, now, {"kvpool.step_seconds": self._steps})
