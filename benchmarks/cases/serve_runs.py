"""A server in this process and its clients in others: what an answer costs beside the engine's own work, and a soak."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import uvicorn

from cases.serve_clients import misbehave
from harness import PeerAbsentError
from kvpool.engine import Engine, SamplingParams
from kvpool.errors import ModelLoadError
from kvpool.replay.load.load_mix import synthetic
from kvpool.scheduling import SchedulerConfig
from kvpool.server import Limits, ServedModel, create_app

BODY_LIMIT = 1 << 16


class Load(NamedTuple):
    """Streams at once, each asked for once."""

    streams: int
    prompt_words: int
    new_tokens: int


def letters() -> Any:
    """A tokenizer of single letters, for models with random weights."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    words = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
    tokenizer = Tokenizer(BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)


class Server:
    """An engine behind HTTP on loopback."""

    def __init__(self, model: Any, max_sequences: int, kv_bytes: int = 2**28) -> None:
        tokenizer = None if model is None else letters()
        limits = SchedulerConfig(max_sequences=max_sequences)
        try:
            self.engine = Engine(model, tokenizer=tokenizer, device="cpu", kv_bytes=kv_bytes, scheduler=limits)
        except ModelLoadError as error:
            raise PeerAbsentError(str(error).splitlines()[0]) from None
        app = create_app([ServedModel("bench", self.engine)], limits=Limits(1024, 1024, body_bytes=BODY_LIMIT))
        self._server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", 0, log_level="error", access_log=False))
        threading.Thread(target=self._server.run, daemon=True).start()
        while not self._server.started:
            time.sleep(0.01)
        self.url = "http://127.0.0.1:{}".format(*self._server.servers[0].sockets[0].getsockname()[1:2])

    def answered(self, load: Load) -> tuple[float, dict[str, Any]]:
        """CPU seconds of this process for a load over HTTP, and what its client, another process, saw."""
        self.engine.manager.reset_prefix_cache()
        command = [sys.executable, "-m", "kvpool", "bench", "serve", "--url", self.url, "--json", "-", "-q"]
        command += ["--clients", str(load.streams), "--requests", str(load.streams), "--prefixes", "1"]
        command += ["--prompt-tokens", str(load.prompt_words), "--shared-tokens", str(load.prompt_words // 2)]
        start = time.process_time()
        told = subprocess.run([*command, "--max-tokens", str(load.new_tokens)], capture_output=True, text=True, check=True)
        return time.process_time() - start, json.loads(told.stdout)

    def generated(self, load: Load) -> float:
        """CPU seconds of the same load by the engine itself."""
        asked = synthetic(
            load.streams, prompt_tokens=load.prompt_words, shared_tokens=load.prompt_words // 2, num_prefixes=1,
            max_tokens=load.new_tokens,
        )  # fmt: skip
        prompts = [self.engine.chat_prompt([{"role": "user", "content": each.prompt}]) for each in asked]
        self.engine.manager.reset_prefix_cache()
        start = time.process_time()
        self.engine.generate(prompts, SamplingParams(load.new_tokens, temperature=0, ignore_eos=True))
        return time.process_time() - start


class Soaked(NamedTuple):
    """What came of a soak."""

    unintended: int  # answers that nothing asked for: errors of good requests, answers to bad ones, blocks that stayed
    health_ms: float  # that 99 of 100 calls of /health stayed within
    answers: int
    left: int


def soak(server: Server, num_clients: int, seconds: float) -> Soaked:
    """Clients that stream, leave in the middle, send nonsense and too much, for a while; then nothing may be left."""
    with ProcessPoolExecutor(1, get_context("spawn")) as elsewhere:  # where they do not hold up the server
        seen, waits = elsewhere.submit(misbehave, server.url, num_clients, seconds, BODY_LIMIT).result()
    deadline = time.monotonic() + 60
    while server.engine.stats().num_running + server.engine.stats().num_waiting and time.monotonic() < deadline:
        time.sleep(0.05)
    server.engine.manager.check()
    stayed = server.engine.stats().cache.pool().referenced
    unintended = sum(count for kind, count in seen.items() if kind not in ("answered", "left", "refused")) + stayed
    if unintended:
        print(f"soak: {dict(seen)}, {stayed} blocks stayed", file=sys.stderr)
    return Soaked(unintended, 1e3 * waits[int(0.99 * (len(waits) - 1))], seen["answered"], seen["left"])
