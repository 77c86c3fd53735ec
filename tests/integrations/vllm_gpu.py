"""A real vLLM on a GPU with kvpool's connector: the same answers, and the same bytes, wherever pages come from.

    make test-vllm-gpu              # about nine minutes; ARGS="--prompts 20 --lives host,graphs" for some of it
    make test-vllm-gpu ARGS="--models all --prompts 10"     # small models of every kind, in fewer lives

Each life of an engine gets the same prompts one at a time, because batches change the rounding of vLLM's own answers. So does
a hit of another length: an answer may part from that of vLLM alone where both best tokens are level within the error of
bfloat16, and nowhere else. Bytes are compared exactly: every page after a load with what torch read of it when it was
stored. VLLM_USE_V2_MODEL_RUNNER=0 takes vLLM's first model runner.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).parent))

import tiny_models
from vllm_lives import Life, workers

from kvpool.integrations.connector.orders import NO_PAGE

VOCABULARY, NEW = 4000, 24
LEVEL = 0.15  # how far apart the logarithms of two probabilities may be to count as level
OPTIONS: dict[str, Any] = dict(
    dtype="bfloat16", num_gpu_blocks_override=160, max_num_seqs=16, gpu_memory_utilization=0.2
)


class Answer(NamedTuple):
    """Tokens, the logarithms of the probabilities of the best ones at each place, and how much of the prompt was cached."""

    tokens: list[int]
    best: list[dict[int, float]]
    cached: int


def model(folder: Path) -> str:
    """A small Llama whose answers depend on all of the prompt."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        initializer_range=0.08,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def prompts(number: int, vocabulary: int = VOCABULARY) -> list[list[int]]:
    """Prompts of 100 to 1,500 tokens, some of which begin alike."""
    rng = random.Random(7)
    begins = [[rng.randrange(vocabulary) for _ in range(rng.randrange(40, 700))] for _ in range(5)]
    return [
        rng.choice(begins) + [rng.randrange(vocabulary) for _ in range(rng.randrange(60, 800))] for _ in range(number)
    ]


class Watch:
    """Reads pages itself, by a plain copy of torch, when they are stored and when they were loaded, and compares them."""

    def __init__(self) -> None:
        from kvpool.integrations.connector.worker_side import WorkerSide

        self.rows: dict[int, list[str | None]] = {}
        self.loaded = self.wrong = 0
        self._kind = WorkerSide
        self._store, self._end = WorkerSide._store_due, WorkerSide._end_load
        watch = self

        def store(side: Any) -> None:
            for each in side._due:
                watch.rows.update(zip(each.rows, watch._pages(side, each.pages), strict=True))
            watch._store(side)

        def end(side: Any, load: Any, number: int) -> None:
            for row, page in zip(load.rows[:number], watch._pages(side, load.pages), strict=False):
                if row in watch.rows and not load.digests:
                    watch.loaded += 1
                    kept = zip(watch.rows[row], page, strict=True)
                    watch.wrong += any(old != new for old, new in kept if None not in (old, new))
            watch._end(side, load, number)

        WorkerSide._store_due, WorkerSide._end_load = store, end  # type: ignore[method-assign]

    def _pages(self, side: Any, pages: Sequence[Sequence[int]]) -> list[list[str | None]]:
        """A digest of each part of each page; None for one that has left its window."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return [
            [
                hashlib.sha256(part.bytes[of_groups[part.group]].cpu().numpy().tobytes()).hexdigest()
                if of_groups[part.group] != NO_PAGE
                else None
                for part in side._pages.parts
            ]
            for of_groups in zip(*pages, strict=True)
        ]

    def close(self) -> None:
        self._kind._store_due, self._kind._end_load = self._store, self._end  # type: ignore[method-assign]


def one_by_one(life: Life, asked: Sequence[Sequence[int]]) -> list[Answer]:
    """The answers to prompts, each asked when the one before is over."""
    return [each for prompt in asked for each in together(life, [prompt])]


def together(life: Life, asked: Sequence[Sequence[int]]) -> list[Answer]:
    """The answers to prompts that are asked at once."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=NEW, detokenize=False, ignore_eos=True, logprobs=4)
    given = [{"prompt_token_ids": list(prompt)} for prompt in asked]
    outputs = life.engine.generate(given, sampling, use_tqdm=False)
    return [
        Answer(
            list(each.outputs[0].token_ids),
            [{token: found.logprob for token, found in place.items()} for place in each.outputs[0].logprobs],
            each.num_cached_tokens or 0,
        )
        for each in outputs
    ]


def is_right(one: Answer, other: Answer) -> bool:
    """Whether two answers are the same up to a place where both of their tokens are level in both."""
    for place, (mine, theirs) in enumerate(zip(one.tokens, other.tokens, strict=True)):
        if mine != theirs:
            gaps = [
                abs(best.get(mine, -99.0) - best.get(theirs, -99.0)) for best in (one.best[place], other.best[place])
            ]
            return max(gaps) <= LEVEL
    return True


def compared(right: Sequence[Answer], found: Sequence[Answer]) -> dict[str, Any]:
    """How many answers are the same to the last token, and how many are right."""
    pairs = list(zip(right, found, strict=True))
    return {
        "of": len(pairs),
        "same": sum(one.tokens == other.tokens for one, other in pairs),
        "right": sum(is_right(one, other) for one, other in pairs),
        "cached": sum(each.cached for each in found),
    }


class Lives:
    """Lives of an engine, one after the other; the first is vLLM alone, whose answers count as right."""

    def __init__(self, model: str, asked: list[list[int]]) -> None:
        self.model, self.prompts = model, asked
        self.seen: dict[str, dict[str, Any]] = {}
        self.right: list[Answer] = []

    def run(
        self, name: str, extra: dict[str, Any] | None, what: Callable[[Life], dict[str, Any]], **options: Any
    ) -> None:
        """One life; what it saw, or its error."""
        import torch

        begun = time.monotonic()
        try:
            alive = Life(self.model, extra, **{**OPTIONS, **options})
            watch = Watch()
            try:
                self.seen[name] = what(alive)
                if extra is not None:
                    self.seen[name].update({"pages": watch.loaded, "wrong pages": watch.wrong, **alive.side.stats()})
            finally:
                watch.close()
                alive.end()
                torch.cuda.empty_cache()
        except BaseException as error:
            traceback.print_exc()
            self.seen[name] = {"error": f"{type(error).__name__}: {error}"[:400]}
        self.seen[name]["seconds"] = round(time.monotonic() - begun, 1)
        print(name, self.seen[name], flush=True)

    def alone(self, alive: Life) -> dict[str, Any]:
        """vLLM without a connector: what is right, and how much it differs from itself."""
        self.right = one_by_one(alive, self.prompts)
        alive.forget()
        return compared(self.right, one_by_one(alive, self.prompts))

    def cold_and_warm(self, alive: Life) -> dict[str, Any]:
        """All prompts, then again when vLLM has forgotten them."""
        found = one_by_one(alive, self.prompts)
        alive.forget()
        return compared(self.right * 2, found + one_by_one(alive, self.prompts))

    def twice(self, alive: Life) -> dict[str, Any]:
        """All prompts twice, which are many times more than vLLM keeps."""
        return compared(self.right * 2, one_by_one(alive, self.prompts * 2))

    def once(self, alive: Life) -> dict[str, Any]:
        """All prompts once; what was stored reaches the tiers."""
        found = compared(self.right, one_by_one(alive, self.prompts))
        alive.settle()
        return found

    def few(self, alive: Life) -> dict[str, Any]:
        """Half of the prompts, cold and warm."""
        asked = self.prompts[: max(5, len(self.prompts) // 2)]
        found = one_by_one(alive, asked)
        alive.forget()
        return compared(self.right[: len(asked)] * 2, found + one_by_one(alive, asked))

    def at_once(self, alive: Life) -> dict[str, Any]:
        """All prompts at once, three times, with aborts and preemptions: only bytes can be compared."""
        for turn in range(3):
            names = alive.submit(self.prompts, num_new=NEW)
            for _ in range(20):
                alive.engine.llm_engine.step()
            alive.engine.llm_engine.abort_request(names[turn::7])
            alive.finished()
            alive.forget()
        return {"of": 0, "right": 0}

    def reset(self, alive: Life) -> dict[str, Any]:
        """Nothing is found behind a reset of the connector."""
        asked = self.prompts[:10]
        one_by_one(alive, asked)
        alive.engine.reset_prefix_cache(reset_connector=True)
        before = alive.side.stats()["from_host"]
        found = compared(self.right[:10], one_by_one(alive, asked))
        found["found behind a reset"] = alive.side.stats()["from_host"] - before
        return found

    def broken(self, alive: Life) -> dict[str, Any]:
        """Loads fail: the driver refuses every third copy, and of every fifth load half of the blocks are missing."""
        from kvpool.errors import TransferError

        (worker,) = workers()
        write, land, counts = worker._pages.write, worker._land, {"copies": 0, "loads": 0, "failed": 0}

        def refusing(*arguments: Any) -> Any:
            counts["copies"] += 1
            if counts["copies"] % 3 == 0:
                counts["failed"] += 1
                raise TransferError("the driver refused a batch of copies with error 700")
            return write(*arguments)

        def halving(landing: Sequence[tuple[Any, int]]) -> None:
            counts["loads"] += len(landing)
            land([(load, number // 2 if counts["loads"] % 5 == 0 else number) for load, number in landing])

        worker._pages.write, worker._land = refusing, halving
        found = one_by_one(alive, self.prompts)
        for _ in range(2):
            alive.forget()
            found += one_by_one(alive, self.prompts)
        return {**compared(self.right * 3, found), "failures": counts["failed"]}

    def poisoned(self, alive: Life) -> dict[str, Any]:
        """A control: the host holds zeros, so answers must be wrong."""
        asked = self.prompts[:10]
        one_by_one(alive, asked)
        alive.forget()
        for worker in workers():
            worker._host.array[:] = 0
        return compared(self.right[:10], one_by_one(alive, asked))


def faults(seen: dict[str, dict[str, Any]]) -> list[str]:
    """What a life saw that must not be."""
    told = []
    for name, life in seen.items():
        wrong = life.get("wrong pages", 0)
        if "error" in life:
            told.append(f"{name}: {life['error']}")
        elif name == "poisoned":
            told += [f"{name}: {life['right']} answers count as right"] * (life["right"] > 0)
        else:
            if life.get("right", life["of"]) < life["of"]:
                told.append(f"{name}: {life['of'] - life['right']} answers are wrong")
            told += [f"{name}: {wrong} pages are wrong"] * (wrong > 0)
            if name == "reset":
                told += [f"{name}: hits behind a reset"] * (life.get("found behind a reset", 0) > 0)
            elif "cold" not in name:
                told += [f"{name}: nothing was loaded"] * (life.get("hits") == 0)
    return told


def main() -> int:
    """Runs all lives, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=100, help="prompts of a life (default 100)")
    parser.add_argument(
        "--lives", default="", help="only lives whose names contain one of these words, with commas between"
    )
    parser.add_argument("--options", type=json.loads, default={}, help="options of vLLM for all lives, as JSON")
    parser.add_argument(
        "--models", default="", help=f"small models of these kinds instead, or all: {', '.join(OTHERS)}"
    )
    given = parser.parse_args()
    OPTIONS.update(given.options)
    words = given.lives.split(",")
    with tempfile.TemporaryDirectory() as folder:
        if given.models:
            kinds = list(OTHERS) if given.models == "all" else given.models.split(",")
            seen = {}
            for kind in kinds:
                found = run_other(Path(folder), kind, given.prompts, words)
                seen.update({f"{kind}, {name}": life for name, life in found.items()})
        else:
            lives = Lives(model(Path(folder) / "model"), prompts(given.prompts))
            seen = run_all(lives, Path(folder), words)
        print(json.dumps(seen))
        for fault in (told := faults(seen)):
            print(f"FAULT {fault}", file=sys.stderr)
    return len(told) > 0


SMALL: dict[str, Any] = {"host_bytes": 256 << 20, "host_write": "through"}  # the host has what vLLM forgets
OTHERS: dict[str, dict[str, Any]] = {
    "deepseek_v2": dict(block_size=64),
    "deepseek_v3": dict(block_size=64),
    "gemma3": {},
    "gpt_oss": {},
    "lfm2": {},
    "qwen3_next": dict(additional_config={"gdn_prefill_backend": "triton"}),  # vLLM's first choice needs flashinfer
    "falcon_h1": {},
    "minimax_m2": {},
}
"""Kinds of models with latents, windows, states and experts, and options of vLLM for them."""


def run_other(folder: Path, kind: str, number: int, words: list[str]) -> dict[str, dict[str, Any]]:
    """The lives that matter for a kind of layers."""
    lives = Lives(tiny_models.write(kind, folder / kind), prompts(number, tiny_models.VOCABULARY))
    disk = {**SMALL, "disk": f"{folder}/{kind} disk", "disk_bytes": 1 << 30}
    options = dict(enforce_eager=True, num_gpu_blocks_override=800) | OTHERS[kind]
    few = 40 if kind == "falcon_h1" else 200  # its blocks are as large as a state
    short = dict(options, num_gpu_blocks_override=few, max_num_batched_tokens=512)
    for name, extra, what, given in (
        ("alone", None, lives.alone, options),
        ("host", SMALL, lives.cold_and_warm, options),
        ("write-back", {"host_bytes": 256 << 20}, lives.twice, short),
        ("disk cold", disk, lives.once, options),
        ("disk warm after a restart", disk, lives.once, options),
    ):
        if name == "alone" or any(word in name for word in words):
            lives.run(name, extra, what, **given)
    for (
        life
    ) in lives.seen.values():  # answers of models drawn so wide depend on the length of steps: bytes are the proof
        life["alike"] = life.pop("right", 0)
    return lives.seen


def run_all(lives: Lives, folder: Path, words: list[str]) -> dict[str, dict[str, Any]]:
    """Every life of one model, or those that are named."""
    disk = {**SMALL, "disk": f"{folder}/disk", "disk_bytes": 1 << 30}
    plain, graphs = dict(enforce_eager=True), dict(enforce_eager=False)
    short = dict(plain, max_num_batched_tokens=256)  # steps
    grams = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1)
    with node(folder) as shared:
        remote = {**SMALL, "remote": shared}
        all_lives: list[tuple[str, dict[str, Any] | None, Any, dict[str, Any]]] = [
            ("alone", None, lives.alone, plain),
            ("host", SMALL, lives.cold_and_warm, plain),
            ("evictions", {"host_blocks": 200, "policy": "adaptive"}, lives.cold_and_warm, plain),
            ("write-back", {"host_bytes": 256 << 20}, lives.twice, short),
            ("write-back to a small host", {"host_blocks": 400}, lives.twice, short),
            ("write-back where memory is short", {"host_blocks": 400}, lives.twice, plain),
            ("write-back at once with aborts", {"host_blocks": 400}, lives.at_once, short),
            ("write-back and graphs", {"host_bytes": 256 << 20}, lives.twice, dict(short, enforce_eager=False)),
            ("disk cold", disk, lives.once, plain),
            ("disk warm after a restart", disk, lives.once, plain),
            ("node cold", remote, lives.once, plain),
            ("node warm in another engine", remote, lives.once, plain),
            ("at once with aborts", SMALL, lives.at_once, plain),
            ("reset", SMALL, lives.reset, plain),
            ("broken loads", SMALL, lives.broken, plain),
            ("poisoned", SMALL, lives.poisoned, plain),
            ("graphs", SMALL, lives.few, graphs),
            ("chunked prompts", SMALL, lives.few, short),
            ("no prefix caching", SMALL, lives.few, dict(plain, enable_prefix_caching=False)),
            ("drafts by n-grams", SMALL, lives.few, dict(plain, speculative_config=grams)),
        ]
        for name, extra, what, options in all_lives:
            if name == "alone" or any(word in name for word in words):
                lives.run(name, extra, what, **options)
    return lives.seen


@contextmanager
def node(folder: Path) -> Iterator[str]:
    """A node of its own, as a process; its address."""
    directory = folder / "node"
    process = subprocess.Popen([sys.executable, "-m", "kvpool", "node", str(directory), "--bytes", "512MB"])
    try:
        yield f"node:{directory}"
    finally:
        process.terminate()
        process.wait(20)


if __name__ == "__main__":
    sys.exit(main())
