"""A real SGLang on a GPU with kvpool's storage and with HiCache's own `file`: the same answers, and how fast they come.

    make test-sglang-gpu            # about six minutes; ARGS="--phases alone kvpool restart" for some of it

Each phase is a process with an engine of its own, with SGLang's deterministic kernels. `alone` computes what all others must
answer. `file` and `kvpool` answer, forget by eviction from the GPU and from the host, answer again from storage, and again
after a flush. `restart` begins with what `kvpool` left. Then bytes are flipped in all stored pages: `file` must answer
wrongly (the control), `restart` rightly. `unified` takes SGLang's unified tree. `speed` has the shape of an 8B model, and
both backends in turn on one disk.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PAGE, VOCABULARY, NEW, NUM_PROMPTS = 64, 8192, 24, 40
PHASES = ("models", "alone", "file", "kvpool", "restart", "unified", "speed")
FOLDER = Path(os.environ.get("SGLANG_GPU_FOLDER", ""))


class Answer(NamedTuple):
    """Tokens, seconds to the first, and how many of the prompt came from storage."""

    tokens: list[int]
    first: float
    stored: int


def models() -> None:
    """A small Llama whose answers depend on all of the prompt, and the shape of an 8B model without weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    kind: dict[str, Any] = dict(num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, dtype="bfloat16")
    small = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16)
    large = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32)
    torch.manual_seed(7)
    config = LlamaConfig(**kind, **small, vocab_size=VOCABULARY, initializer_range=0.08)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(FOLDER / "small")
    LlamaConfig(**kind, **large, vocab_size=128256, architectures=["LlamaForCausalLM"]).save_pretrained(
        FOLDER / "large"
    )


# --- an engine ---


def engine(model: str, **options: Any) -> Any:
    """SGLang on kernels that need neither flashinfer nor a compiler for CUDA graphs."""
    import sglang

    plain = dict(
        **dict(skip_tokenizer_init=True, grammar_backend="none", skip_server_warmup=True, dtype="bfloat16"),
        **dict(attention_backend="triton", sampling_backend="pytorch", page_size=PAGE, max_running_requests=8),
        **dict(disable_cuda_graph=True, disable_prefill_cuda_graph=True, chunked_prefill_size=8192),
    )
    return sglang.Engine(model_path=str(FOLDER / model), **plain, **options)


def small(**options: Any) -> Any:
    """Its GPU holds a half of the prompts at a time."""
    given = dict(max_total_tokens=32768, mem_fraction_static=0.3, enable_deterministic_inference=True)
    return engine("small", **given, **options)


def cached(backend: str, folder: Path) -> dict[str, Any]:
    """Options for a host of twice the GPU's pages, and storage below it."""
    return dict(
        **dict(enable_hierarchical_cache=True, hicache_ratio=2.0, hicache_storage_backend="dynamic"),
        hicache_storage_prefetch_policy="wait_complete",
        hicache_storage_backend_extra_config=extra(backend, folder),
    )


def extra(backend: str, folder: Path) -> str:
    """The extra config of a backend."""
    given: dict[str, Any] = dict(
        backend_name=backend, module_path="sglang_watched", class_name="File", path=str(folder)
    )
    if backend == "kvpool":
        disk = dict(disk=str(folder), disk_bytes="24GB", model_id="live")
        given |= dict(class_name="KVPool", interface_v1=1, kvpool=disk)
    return json.dumps(given)


def ask(made: Any, prompt: list[int], tokens: int = NEW) -> Answer:
    """One prompt alone."""
    sampling = dict(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
    start, first, got, meta = time.monotonic(), 0.0, list[int](), dict[str, Any]()
    for chunk in made.generate(input_ids=prompt, stream=True, sampling_params=sampling):
        first = first or time.monotonic() - start
        new = chunk["output_ids"]  # all so far, or those since the last
        got, meta = new if new[: len(got)] == got else got + new, chunk["meta_info"]
    return Answer(got, first, (meta.get("cached_tokens_details") or {}).get("storage") or 0)


def told(made: Any, call: str, *arguments: Any) -> None:
    """Asks the scheduler for something, until it is idle enough to do it."""
    for _ in range(40):
        answer = made.loop.run_until_complete(getattr(made.tokenizer_manager, call)(*arguments))
        if answer.success:
            return
        time.sleep(0.5)
    raise SystemExit(f"{call}: {answer}")


def moved(what: str, since: int = 0) -> list[dict[str, Any]]:
    """What the scheduler noted since then about one method."""
    watched = Path(os.environ["WATCHED"])
    lines = [json.loads(line) for line in watched.read_text().splitlines()] if watched.exists() else []
    return [line for line in lines if line["what"] == what][since:]


def settle(since: int, pages: int) -> list[dict[str, Any]]:
    """Waits until so many pages were stored."""
    end = time.monotonic() + 60
    while sum(line["pages"] for line in moved("_page_backup", since)) < pages and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(0.3)
    return moved("_page_backup", since)


def prompts(number: int, seed: int, low: int, high: int, shared: int = 0) -> list[list[int]]:
    """Random tokens; every second prompt begins with the same ones."""
    rng = random.Random(seed)
    head = [rng.randrange(10, VOCABULARY) for _ in range(shared)]
    return [
        head * (k % 2) + [rng.randrange(10, VOCABULARY) for _ in range(rng.randint(low, high))] for k in range(number)
    ]


# --- answers ---


def questions() -> list[list[int]]:
    """What every phase is asked."""
    return prompts(NUM_PROMPTS, 1, 600, 2600, shared=320)


def compared(name: str, made: Any, *, right: bool = True) -> None:
    """Asks everything, and compares with what SGLang alone computed."""
    answers = [ask(made, prompt) for prompt in questions()]
    known = json.loads((FOLDER / "known.json").read_text())
    equal = sum(answer.tokens == tokens for answer, tokens in zip(answers, known, strict=True))
    first, stored = 1000 * statistics.median(answer.first for answer in answers), sum(a.stored for a in answers)
    print(f"| {name} | {equal} of {len(known)} | {stored:,} | {first:.0f} ms |", flush=True)
    if right != (equal == len(known)):
        raise SystemExit(f"{name}: {equal} of {len(known)} answers are those of SGLang alone")


def alone() -> None:
    """What all others must answer: computed with nothing cached."""
    made = small()
    known = list[list[int]]()
    for prompt in questions():
        told(made, "flush_cache")
        known.append(ask(made, prompt).tokens)
    (FOLDER / "known.json").write_text(json.dumps(known))
    compared("SGLang alone, again", made)


def lives(made: Any, name: str) -> None:
    """Computes and stores; then answers from storage after an eviction, and after a flush."""
    since = len(moved("_page_backup"))
    compared(f"{name}, computed", made)
    settle(since, sum(len(prompt) // PAGE for prompt in questions()) - 5 * NUM_PROMPTS // 2)
    others, since = prompts(60, 2, 600, 2600), len(moved("_page_backup"))
    for prompt in others:
        ask(made, prompt, 1)
    settle(since, sum(len(prompt) // PAGE for prompt in others))
    compared(f"{name}, evicted from GPU and host", made)
    told(made, "flush_cache")
    compared(f"{name}, after a flush", made)


def poisoned(made: Any, name: str, folder: Path, *, right: bool) -> None:
    """Flips a high bit in each 64 KiB of what is stored: a value of bfloat16 becomes huge."""
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size >= 2**19:
            with path.open("r+b") as file:
                for place in range(40001, path.stat().st_size, 2**16):
                    file.seek(place)
                    (byte,) = file.read(1)
                    file.seek(place)
                    file.write(bytes([byte ^ 0x40]))
    told(made, "flush_cache")
    compared(f"{name}, bytes flipped", made, right=right)


def file() -> None:
    """HiCache's own backend. It hands out damaged pages."""
    made = small(**cached("file", FOLDER / "of-file"))
    lives(made, "`file`")
    poisoned(made, "`file`", FOLDER / "of-file", right=False)


def kvpool() -> None:
    """Ours."""
    lives(small(**cached("kvpool", FOLDER / "of-kvpool")), "kvpool")


def restart() -> None:
    """Ours, in another process."""
    made = small(**cached("kvpool", FOLDER / "of-kvpool"))
    compared("kvpool, after a restart", made)
    poisoned(made, "kvpool", FOLDER / "of-kvpool", right=True)


def unified() -> None:
    """Ours, under the tree that later versions have alone."""
    os.environ["SGLANG_ENABLE_UNIFIED_RADIX_TREE"] = "1"
    lives(small(**cached("kvpool", FOLDER / "of-unified")), "kvpool, unified tree")


# --- speed ---


def rate(lines: Sequence[dict[str, Any]]) -> float:
    """GiB a second of the backend's time."""
    return sum(line["bytes"] for line in lines) / 2**30 / max(1e-9, sum(line["seconds"] for line in lines))


def speed() -> None:
    """Prompts of 8,192 tokens, a gigabyte of keys and values each: computed, and from a disk whose page cache is empty."""
    memory = dict(max_total_tokens=65536, hicache_size=12, mem_fraction_static=0.6, context_length=32768)
    made = engine("large", load_format="dummy", enable_hierarchical_cache=True, **memory)
    ask(made, prompts(1, 5, 8192, 8192)[0])
    print(
        "| backend | first token computed | from storage | writes | reads | tokens from storage | equal |", flush=True
    )
    for number, backend in enumerate(("file", "kvpool", "kvpool", "file", "file", "kvpool")):
        folder, asked = FOLDER / f"speed-{number}", prompts(4, 100 + number, 8192, 8192)
        told(made, "flush_cache")
        told(made, "attach_hicache_storage", "dynamic", extra(backend, folder), "wait_complete")
        since = len(moved("_page_backup"))
        computed = [ask(made, prompt) for prompt in asked]
        writes = settle(since, 4 * 128)
        told(made, "flush_cache")
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
        since = len(moved("_page_transfer"))
        found = [ask(made, prompt) for prompt in asked]
        reads = moved("_page_transfer", since)
        times = [1000 * statistics.median(answer.first for answer in answers) for answers in (computed, found)]
        equal = sum(one.tokens == other.tokens for one, other in zip(computed, found, strict=True))
        cells = [
            backend,
            *(f"{each:.0f} ms" for each in times),
            *(f"{rate(each):.2f} GiB/s" for each in (writes, reads)),
        ]
        print("| " + " | ".join(cells), f"| {sum(a.stored for a in found):,} | {equal} of 4 |", flush=True)
        told(made, "detach_hicache_storage")
        shutil.rmtree(folder)


def main() -> None:
    """Runs phases, each in a process of its own: SGLang ends the whole process if its scheduler fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phases", nargs="*", choices=PHASES, default=PHASES)
    given = parser.parse_args()
    here = str(Path(__file__).parent)
    if FOLDER.name:  # one phase, in the process that was made for it
        phase: Callable[[], None] = globals()[given.phases[0]]
        phase()
        sys.stdout.flush()
        os._exit(0)  # the scheduler ends with its parent
    with tempfile.TemporaryDirectory(prefix="kvpool-sglang-") as folder:
        for name in ("models", *(name for name in given.phases if name != "models")):
            environment = os.environ | dict(SGLANG_GPU_FOLDER=folder, WATCHED=f"{folder}/{name}.jsonl")
            environment["PYTHONPATH"] = f"{here}:{os.environ.get('PYTHONPATH', '')}"
            with open(f"{folder}/{name}.log", "w") as log:
                command = [sys.executable, __file__, "--phases", name]
                code = subprocess.run(command, env=environment, stderr=log, timeout=300).returncode
            if code:
                print(Path(f"{folder}/{name}.log").read_text()[-4000:])
                raise SystemExit(f"{name} failed")


if __name__ == "__main__":
    main()
