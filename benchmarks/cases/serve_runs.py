"""A server in this process and its clients in others: what an answer costs beside the engine's own work, and a soak."""

from __future__ import annotations

import asyncio
import resource
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn

from cases.serve_clients import drive, look, misbehave
from harness import PeerAbsentError
from kvpool.engine import Engine, SamplingParams
from kvpool.errors import ModelLoadError
from kvpool.scheduling import SchedulerConfig
from kvpool.server import Limits, ServedModel, create_app
from load import synthetic

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

    def look(self) -> _Look:
        """What this process holds now, as Linux tells it."""
        loop = self._server.servers[0].get_loop()
        links = [_target(link) for link in Path("/proc/self/fd").iterdir()]
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        num_sockets = sum(target.startswith("socket:") for target in links)
        return _Look(len(asyncio.all_tasks(loop)), num_sockets, pages * resource.getpagesize() / 2**20)

    def left_over(self, before: _Look) -> int:
        """Sequences, blocks, tasks and sockets that are there and were not before."""
        now, stats = self.look(), self.engine.stats()
        more = max(0, now.tasks - before.tasks) + max(0, now.sockets - before.sockets)
        return more + stats.num_running + stats.num_waiting + stats.cache.pool().referenced

    def answered(self, load: Load) -> tuple[float, dict[str, Any]]:
        """CPU seconds of this process for a load over HTTP, and what its client, another process, saw."""
        self.engine.manager.cache.reset()
        with ProcessPoolExecutor(1, get_context("spawn")) as elsewhere:
            elsewhere.submit(abs, 0).result()  # the process is there
            start = time.process_time()
            told = elsewhere.submit(drive, self.url, *load).result()
            return time.process_time() - start, told

    def generated(self, load: Load) -> float:
        """CPU seconds of the same load by the engine itself."""
        asked = synthetic(
            load.streams,
            prompt_tokens=load.prompt_words,
            shared_tokens=load.prompt_words // 2,
            num_prefixes=1,
            max_tokens=load.new_tokens,
        )
        prompts = [self.engine.chat_prompt([{"role": "user", "content": each.prompt}]) for each in asked]
        self.engine.manager.cache.reset()
        start = time.process_time()
        self.engine.generate(prompts, SamplingParams(load.new_tokens, temperature=0, ignore_eos=True))
        return time.process_time() - start


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # closed in the meantime
        return ""


class Soaked(NamedTuple):
    """What came of a soak."""

    unintended: int  # errors of good requests, answers to bad ones
    stayed: int  # blocks, sequences, tasks and sockets that were not there before
    grown_mib: float  # memory at the end beside that after a third of the time
    health_ms: float  # that 99 of 100 calls of /health stayed within
    outcomes: dict[str, int]


class _Look(NamedTuple):
    """What a process holds besides its cache."""

    tasks: int
    sockets: int
    mib: float


def soak(server: Server, num_clients: int, seconds: float) -> Soaked:
    """Clients that stream, leave in the middle, send nonsense and too much, for a while; then nothing may be left."""
    server.answered(Load(2, 40, 8))  # what is made on first use
    before = server.look()
    sizes: list[float] = []
    with ProcessPoolExecutor(2, get_context("spawn")) as elsewhere:  # where they do not hold up the server
        clients = elsewhere.submit(misbehave, server.url, num_clients, seconds, BODY_LIMIT)
        looks = elsewhere.submit(look, server.url, seconds)
        while not clients.done():
            sizes.append(server.look().mib)
            time.sleep(min(1.0, seconds / 20))
        seen, waits = clients.result(), looks.result()
    deadline = time.monotonic() + 60
    while (stayed := server.left_over(before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    server.engine.manager.check()
    third = sizes[len(sizes) // 3 :]
    unintended = sum(count for kind, count in seen.items() if kind not in ("answered", "left", "refused"))
    print(f"soak: {dict(seen)}, {stayed} things stayed, {third[0]:.0f} to {third[-1]:.0f} MiB", file=sys.stderr)
    return Soaked(unintended, stayed, third[-1] - third[0], 1e3 * waits[int(0.99 * (len(waits) - 1))], dict(seen))
