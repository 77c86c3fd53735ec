"""Images in messages, sent as the clients of OpenAI and Anthropic send them."""

from __future__ import annotations

import asyncio
import base64
import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import Any

import anthropic
import openai
import pytest
from live import access, call, openai_client, refusal, until

from kvpool.errors import ConfigError
from kvpool.server import Limits, ServedModel, create_app, images
from kvpool.server.errors import Problem
from kvpool.server.images import ImageSource, image_places
from kvpool.server.limits import Gate
from kvpool.server.long_work import LongWork
from kvpool.server.serve_settings import ServeSettings
from live_app import Live

image_library = pytest.importorskip("PIL.Image")


def png(color: str) -> bytes:
    file = BytesIO()
    image_library.new("RGB", (20, 30), color).save(file, "PNG")
    return file.getvalue()


def encoded(color: str) -> str:
    return base64.b64encode(png(color)).decode()


@pytest.fixture(scope="module")
def seeing() -> Iterator[Any]:
    """An engine with a tiny Llava."""
    from vision_models import tiny_processor, vision_model

    from kvpool.engine import Engine

    with Engine(vision_model("llava"), processor=tiny_processor(), device="cpu", kv_blocks=128, block_size=4) as made:
        yield made


@pytest.fixture(scope="module")
def server(seeing: Any) -> Iterator[Live]:
    live = Live(create_app([ServedModel("tiny", seeing)]))
    yield live
    live.stop()


def expected(engine: Any, *parts: str | bytes | None) -> str:
    """What the engine itself answers to parts of text and images. None stands for a message of the assistant without text."""
    from kvpool.engine import SamplingParams

    messages: list[dict[str, Any]] = [{"role": "user", "content": []}]
    for part in parts:
        if part is None:
            messages += [{"role": "assistant", "content": []}, {"role": "tool", "content": []}]
        else:
            kind = "text" if isinstance(part, str) else "image"
            messages[-1]["content"].append({"type": kind, kind: part})
    prompt = engine.chat_prompt(messages)
    (result,) = engine.generate([prompt], SamplingParams(max_new_tokens=6, temperature=0))
    return str(result.text)


@pytest.fixture
def client(server: Live) -> Iterator[Any]:
    with openai_client(server) as made:
        yield made


def test_given_an_image_in_a_chat_then_the_answer_is_the_engines(client: Any, seeing: Any) -> None:
    answers = []
    for color in ("red", "blue"):
        url = f"data:image/png;base64,{encoded(color)}"
        parts = [{"type": "text", "text": "w5 w6"}, {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}]
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": parts}], max_completion_tokens=6, temperature=0
        )
        assert answer.usage.prompt_tokens == 1 + 2 + 16 + 1
        assert answer.choices[0].message.content == expected(seeing, "w5 w6", png(color))
        answers.append(answer.choices[0].message.content)
    assert answers[0] != answers[1]


def test_given_an_image_for_a_response_then_the_answer_is_the_engines(client: Any, seeing: Any) -> None:
    parts = [
        {"type": "input_text", "text": "w7"},
        {"type": "input_image", "image_url": f"data:image/png;base64,{encoded('green')}"},
    ]
    answer = client.responses.create(
        model="tiny", input=[{"role": "user", "content": parts}], max_output_tokens=6, temperature=0
    )
    assert answer.output_text == expected(seeing, "w7", png("green"))


def test_given_an_image_for_anthropics_messages_then_the_answer_is_the_engines(server: Live, seeing: Any) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": encoded("red")}
    marked = {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        answer = client.messages.create(
            model="tiny",
            max_tokens=6,
            messages=[{"role": "user", "content": [marked, {"type": "text", "text": "w8"}]}],
        )
    assert answer.content[0].text == expected(seeing, png("red"), "w8")


def test_given_a_tool_that_answers_with_an_image_then_the_model_sees_it(server: Live, seeing: Any) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": encoded("red")}
    answered: Any = [{"type": "text", "text": "w9"}, {"type": "image", "source": source}]
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "w8"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "call_1", "name": "screenshot", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": answered}]},
    ]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        answer = client.messages.create(model="tiny", max_tokens=6, messages=messages)
        answered[1]["source"] = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
        with pytest.raises(anthropic.BadRequestError, match="it is no PNG, JPEG, WebP or GIF") as refused:
            client.messages.create(model="tiny", max_tokens=6, messages=messages)
    assert answer.content[0].text == expected(seeing, "w8", None, "w9", png("red"))
    assert " at 0x" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/png;base64,%%%", "no base64"),
        ("data:image/png;base64", "comma"),
        (f"data:image/png;base64,{base64.b64encode(b'no image').decode()}", "cannot be read"),
        ("http://127.0.0.1:1/a.png", "fetches no image from that host"),
        ("file:///etc/passwd", "images come as data:"),
    ],
)
def test_given_no_image_then_the_error_says_why(client: Any, url: str, words: str) -> None:
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    with pytest.raises(openai.BadRequestError, match=words):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": parts}])


def test_given_a_placeholder_without_an_image_then_the_request_is_refused(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="placeholder for image input"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "w5 <image>"}])
    with pytest.raises(openai.BadRequestError, match="placeholder for image input"):
        client.completions.create(model="tiny", prompt="w5 <image>")


# --- limits -----------------------------------------------------------------------------------------------------------


def image_parts(*colors: str) -> list[Any]:
    urls = [f"data:image/png;base64,{encoded(color)}" for color in colors]
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls]


def test_given_more_images_than_a_prompt_may_have_then_it_is_refused(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=r"65 images count .* send fewer or smaller"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": image_parts("red") * 65}])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/cache/query"])
def test_given_images_of_many_requests_then_few_are_read_at_once_and_keys_take_turns(
    seeing: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    begun: list[str] = []
    released = threading.Event()
    read = seeing.chat_prompt

    def held(messages: Any, **template: Any) -> Any:
        begun.append(messages[0]["content"][-1]["text"])
        assert released.wait(30)
        return read(messages, **template)

    monkeypatch.setattr(seeing, "chat_prompt", held)
    live = Live(create_app([ServedModel("tiny", seeing)], access("w1", "w2")))
    images = live.app.state.server.gate.images = LongWork(2**25, 2**24, 100)

    def ask(tenant: str) -> None:
        parts = [*image_parts("red"), {"type": "text", "text": tenant}]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        call(live, path, body, f"sk-{tenant}")

    threads = [threading.Thread(target=ask, args=(tenant,)) for tenant in ("w1", "w1", "w1", "w2")]
    try:
        for thread in threads[:3]:
            thread.start()
        until(lambda: len(images._waiting.get("w1", ())) == 2)
        assert begun == ["w1"]
        threads[3].start()
        until(lambda: begun == ["w1", "w2"])
        released.set()
        for thread in threads:
            thread.join()
    finally:
        released.set()
        live.stop()
    assert sorted(begun) == ["w1", "w1", "w1", "w2"]


def test_given_images_under_way_then_a_key_may_have_half_of_what_the_server_holds() -> None:
    gate = Gate(Limits(image_bytes=1000))
    with gate.holding("a", 400):
        with pytest.raises(Problem, match="no more images"), gate.holding("a", 101):
            pass
        others = gate.holding("a", 100), gate.holding("b", 500)
        with others[0], others[1], pytest.raises(Problem, match="no more images"), gate.holding("c", 1):
            pass
    with gate.holding("a", 5000), pytest.raises(Problem), gate.holding("b", 1):  # one that is larger, by itself
        pass


def test_given_images_under_way_when_another_request_has_some_then_it_is_asked_to_try_again(seeing: Any) -> None:
    live = Live(create_app([ServedModel("tiny", seeing)], limits=Limits(image_bytes=1)))
    body = {"messages": [{"role": "user", "content": image_parts("red")}], "max_tokens": 1}
    try:
        with live.app.state.server.gate.holding("", 1):
            status, error = refusal(live, "/v1/chat/completions", body)
            assert (status, error["code"]) == (429, "busy")
        assert call(live, "/v1/chat/completions", body)["choices"]
        assert not live.app.state.server.gate._image_bytes
    finally:
        live.stop()


# --- images at addresses ----------------------------------------------------------------------------------------------


@pytest.fixture
def host() -> Iterator[str]:
    """A host with an image, one that is too large, and a redirect."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = {"/red.png?size=1": png("red"), "/large": b"x" * 1001}.get(self.path)
            self.send_response(200 if body is not None else 302)
            self.send_header("location", "/red.png?size=1")
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_given_hosts_that_may_be_asked_then_images_are_fetched_within_limits(
    host: str, seeing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "MAX_BYTES", 1000)
    answers: list[http.client.HTTPResponse] = []
    respond = http.client.HTTPConnection.getresponse

    def noted(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
        answers.append(respond(connection))
        return answers[-1]

    monkeypatch.setattr(http.client.HTTPConnection, "getresponse", noted)
    live = Live(create_app([ServedModel("tiny", seeing, image_hosts=[host.removeprefix("http://")])]))
    try:
        with openai_client(live) as client:

            def ask(path: str) -> Any:
                parts = [{"type": "image_url", "image_url": {"url": f"{host}{path}"}}]
                messages: Any = [{"role": "user", "content": parts}]
                return client.chat.completions.create(
                    model="tiny", messages=messages, max_completion_tokens=6, temperature=0
                )

            assert ask("/red.png?size=1").choices[0].message.content == expected(seeing, png("red"))
            with pytest.raises(openai.BadRequestError, match="over 1000 bytes"):
                ask("/large")
            with pytest.raises(openai.BadRequestError, match="status 302"):
                ask("/moved")
        assert [answer.isclosed() for answer in answers] == [True] * 3  # and with each its socket
    finally:
        live.stop()


def test_given_a_name_with_other_letters_then_it_is_the_same_host() -> None:
    assert image_places([" Example.COM "]) == {("example.com", 80), ("example.com", 443)}


def test_given_a_host_then_its_usual_ports_may_be_asked_and_no_other(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def refuse(connection: http.client.HTTPConnection, *_: Any) -> None:
        asked.append((connection.host, connection.port))
        raise OSError("nobody is there")

    def fetch(source: ImageSource, *urls: str) -> None:
        for url in urls:
            with pytest.raises(Problem):
                asyncio.run(source.content([{"type": "image_url", "image_url": {"url": url}}], 0))

    monkeypatch.setattr(http.client.HTTPConnection, "request", refuse)
    usual, given = ImageSource(["127.0.0.1"]), ImageSource(["127.0.0.1:81", "[::1]:82"])
    fetch(usual, f"{host}/red.png", "http://127.0.0.1:6379/", "http://127.0.0.1/", "https://127.0.0.1:443/")
    assert asked == [("127.0.0.1", 80), ("127.0.0.1", 443)]
    asked.clear()
    fetch(given, "http://127.0.0.1/", "https://127.0.0.1:81/", "http://[::1]:82/", "http://[::1]:81/")
    assert asked == [("127.0.0.1", 81), ("::1", 82)]


@pytest.mark.parametrize("host", ["", "http://example.com", "example.com:port", "example.com/images", "me@example.com"])
def test_given_something_else_for_an_image_host_then_it_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        ServeSettings(image_hosts=(host,))


def test_given_images_then_questions_about_the_cache_are_about_that_prompt(server: Live) -> None:
    def asked(color: str) -> Any:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(color)}"}}
        content = [image, {"type": "text", "text": "w11 w12 w13 w14 w15"}]
        return {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "cache_salt": "asked"}

    warmed = call(server, "/v1/cache/warm", asked("green"))
    usage = call(server, "/v1/chat/completions", asked("green"))["usage"]
    assert warmed["prompt_tokens"] == usage["prompt_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == (usage["prompt_tokens"] - 1) // 4 * 4
    found = [call(server, "/v1/cache/query", asked(color))["cached_tokens"] for color in ("green", "red")]
    assert found == [usage["prompt_tokens_details"]["cached_tokens"], 1]  # the word before the image
    pin = call(server, "/v1/cache/pin", asked("green"))
    assert pin["pinned_tokens"] == usage["prompt_tokens"] // 4 * 4
    call(server, f"/v1/cache/pin/{pin['id']}", method="DELETE")
    assert call(server, "/tokenize", asked("green"))["images"] != call(server, "/tokenize", asked("red"))["images"]
    status, error = refusal(server, "/v1/cache/invalidate", asked("green"))
    assert (status, error["param"]) == (400, "messages")
