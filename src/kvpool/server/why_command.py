"""`kvpool why`: asks a running server why a prompt is not cached."""

from __future__ import annotations

import json as json_format
import re
import sys
import urllib.error
import urllib.request
from typing import Annotated, Any
from urllib.parse import quote

import typer

from kvpool.errors import InvalidArgumentError
from kvpool.terminal import is_http


def register(app: typer.Typer, name: str) -> None:
    """Adds the command to the application."""
    app.command(name)(why)


def why(
    prompt: Annotated[
        str,
        typer.Argument(
            help="A prompt, the body of any request as JSON, or the id of a request or of its answer; - reads it from stdin."
        ),
    ],
    url: Annotated[str, typer.Option(help="The address of the server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Which model, if the server has several.")] = None,
    key: Annotated[str, typer.Option(envvar="KVPOOL_KEY", help="The key that the server wants.")] = "",
) -> None:
    """Say why a prompt is not cached by a running server, or was not when it was answered, and what helps.

    \b
    kvpool why "Once upon a time"
    kvpool why - < request.json
    kvpool why chatcmpl-0f3a...
    """
    if not is_http(url):
        raise InvalidArgumentError(f"--url {url}: give an address such as http://127.0.0.1:8000")
    url, text = url.rstrip("/"), sys.stdin.read() if prompt == "-" else prompt
    answer = _answered(url, text, key) if _ID.fullmatch(text) else None
    if answer is None:
        answer, are = _ask(url + "/v1/cache/query", key, _body(text, model)), "are"
    else:
        are = "were"
    print(f"{answer['cached_tokens']} of {answer['prompt_tokens']} tokens {are} cached")
    for span in answer.get("missed", ()):
        of = f"prompt {span['prompt']}, " if "prompt" in span else ""
        print(f"{of}{span['start']}..{span['end']} {span['cause']}: {span['words']}")
        if parted := span.get("parted"):
            print(f"    here {parted['before']!r} goes on with {parted['here']!r}, there with {parted['there']!r}")
    if answer["cached_tokens"] + 1 < answer["prompt_tokens"] and not answer.get("missed"):
        print("the server does not remember what left its cache: start it by kvpool serve")


_ID = re.compile(r"[\w.:/+=-]{1,128}")  # of a request, as the server takes it from a client
_OWN_ID = re.compile(r"(req-|chatcmpl-|cmpl-|msg_|resp_)[0-9a-f]{32}")


def _answered(url: str, name: str, key: str) -> dict[str, Any] | None:
    """What a request missed that was answered; None if it may be a prompt: it is one word, and no request has that id."""
    try:
        return _ask(f"{url}/v1/cache/requests/{quote(name)}", key)
    except _NotFoundError:
        if _OWN_ID.fullmatch(name):
            raise
        return None


def _body(text: str, model: str | None) -> dict[str, Any]:
    """The body of a request: what was given, or a completion of it."""
    try:
        given = json_format.loads(text)
    except ValueError:
        given = None
    body = given if isinstance(given, dict) else {"prompt": text}
    return body if model is None else {**body, "model": model}


class _NotFoundError(InvalidArgumentError):
    """The server has nothing of that name."""


def _ask(url: str, key: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json_format.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json_format.load(answer)
            return found
    except urllib.error.HTTPError as error:
        text = error.read().decode("utf-8", "replace")[:300]
        kind = _NotFoundError if error.code == 404 else InvalidArgumentError
        raise kind(f"{url} answered with status {error.code}: {text}") from None
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"{url} does not answer: {error}; is a server there? See --url") from None
