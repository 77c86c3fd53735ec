"""`kvpool why`: asks a running server why a prompt is not cached."""

from __future__ import annotations

import json as json_format
import sys
import urllib.error
import urllib.request
from typing import Annotated, Any

import typer

from kvpool.errors import InvalidArgumentError
from kvpool.terminal import is_http


def register(app: typer.Typer, name: str) -> None:
    """Adds the command to the application."""
    app.command(name)(why)


def why(
    prompt: Annotated[str, typer.Argument(help="A prompt, or the body of any request as JSON; - reads it from stdin.")],
    url: Annotated[str, typer.Option(help="The address of the server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Which model, if the server has several.")] = None,
    key: Annotated[str, typer.Option(envvar="KVPOOL_KEY", help="The key that the server wants.")] = "",
) -> None:
    """Say why a prompt is not cached by a running server, and what helps. Changes nothing.

    \b
    kvpool why "Once upon a time"
    kvpool why - < request.json
    """
    if not is_http(url):
        raise InvalidArgumentError(f"--url {url}: give an address such as http://127.0.0.1:8000")
    answer = _ask(url.rstrip("/") + "/v1/cache/query", _body(sys.stdin.read() if prompt == "-" else prompt, model), key)
    print(f"{answer['cached_tokens']} of {answer['prompt_tokens']} tokens are cached")
    for span in answer.get("missed", ()):
        print(f"{span['start']}..{span['end']} {span['cause']}: {span['words']}")
        if parted := span.get("parted"):
            print(f"    here {parted['before']!r} goes on with {parted['here']!r}, there with {parted['there']!r}")
    if answer["cached_tokens"] + 1 < answer["prompt_tokens"] and "missed" not in answer:
        print("the server does not remember what left its cache: start it by kvpool serve")


def _body(text: str, model: str | None) -> dict[str, Any]:
    """The body of a request: what was given, or a completion of it."""
    try:
        given = json_format.loads(text)
    except ValueError:
        given = None
    body = given if isinstance(given, dict) else {"prompt": text}
    return body if model is None else {**body, "model": model}


def _ask(url: str, body: dict[str, Any], key: str) -> dict[str, Any]:
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, json_format.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json_format.load(answer)
            return found
    except urllib.error.HTTPError as error:
        text = error.read().decode("utf-8", "replace")[:300]
        raise InvalidArgumentError(f"{url} answered with status {error.code}: {text}") from None
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"{url} does not answer: {error}; is a server there? See --url") from None
