"""A real server in a thread, the client that people use, and a tokenizer whose words are w0, w1, ..."""

from __future__ import annotations

import threading
from typing import Any

import openai
import uvicorn
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% for t in tools or [] %}{{ t['function']['name'] }} {% endfor %}"
)
WORDS = 160


class Live:
    """A server that runs in a thread of its own, in this process."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self._server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", 0, log_level="error", lifespan="on"))
        self._started = threading.Event()
        startup = self._server.startup

        async def announced(sockets: Any = None) -> None:
            await startup(sockets)
            self._started.set()

        self._server.startup = announced  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        assert self._started.wait(30)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


def openai_client(live: Live, key: str = "none") -> Any:
    """OpenAI's own client."""
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key=key, max_retries=0, timeout=30)


def word_tokenizer() -> Any:
    """Words and token ids are the same numbers."""
    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", chat_template=TEMPLATE)
