"""A real server in a thread, the client that people use, and a tokenizer whose words are w0, w1, ..."""

from __future__ import annotations

import hashlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from kvpool.server import Access, Caller
from live_app import Live

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% for t in tools or [] %}{{ t['function']['name'] }} {% endfor %}{# <tool_call> #}"
)
WORDS = 160


def openai_client(live: Live, key: str = "none") -> Any:
    """OpenAI's own client."""
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key=key, max_retries=0, timeout=120)


def access(*tenants: str, **options: Any) -> Access:
    """A key `sk-TENANT` for each; the tenant `root` may do everything."""
    digests = {tenant: hashlib.sha256(f"sk-{tenant}".encode()).hexdigest() for tenant in tenants}
    return Access({digests[t]: Caller(t, t == "root", t) for t in tenants}, **options)


def call(live: Live, path: str, body: Any = None, key: str = "", method: str | None = None) -> Any:
    """A plain HTTP call; returns what came, or raises HTTPError."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(live.url + path, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        text = answer.read().decode()
        return json.loads(text) if "json" in answer.headers["content-type"] else text


def refusal(live: Live, path: str, body: Any = None, key: str = "", method: str | None = None) -> tuple[int, Any]:
    """A call that must be refused: its status and its error."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        call(live, path, body, key, method)
    return refused.value.code, json.loads(refused.value.read())["error"]


def until(condition: Callable[[], bool]) -> None:
    """Waits for something that must come; the test's own limit is generous."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def word_tokenizer() -> Any:
    """Words and token ids are the same numbers."""
    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", chat_template=TEMPLATE)


def save_model(directory: Path) -> None:
    """A tiny Llama with that tokenizer, as files that a server of its own process loads."""
    from models import tiny_model

    word_tokenizer().save_pretrained(directory)
    tiny_model("llama").save_pretrained(directory)
