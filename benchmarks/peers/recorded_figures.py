"""Figures of peers measured by hand on another day, for those that cannot be installed beside a benchmark run.

They are thread CPU time (medians) with blocks of 16 tokens and a pool of 65,536 blocks, taken along the path that the
peer's engine takes (match, lock, allocate, page table, insert). vLLM's are here too: where vLLM takes part in a run,
its speed now against its speed then says how the machine of the run compares with the machine of the record.
"""

from __future__ import annotations

from harness import Recorded

MACHINE = "Neoverse-N1 (aarch64), 2 shared cores, CPython 3.11.7, torch 2.13.0 for CPU"
_SGLANG_DATE = "between 2026-09-15 and 2026-11-15"
_VLLM_DATE = "between 2026-10-17 and 2026-11-15"

_VARIANTS = {
    "sglang": "cce0a1244b5, RadixCache, page 16",
    "sglang-unified": "cce0a1244b5, UnifiedRadixCache (its default), page 16",
    "sglang-cpp": "cce0a1244b5, experimental C++ tree, page 16",
    "sglang-events": "cce0a1244b5, RadixCache with events, page 16",
    "mini-sglang": "20fcd7f, page 16",
    "nano-vllm": "bb823b3, block 16",
    "vllm": "0.32.0, sha256, block 16",
}


def _figures(**values: float) -> tuple[Recorded, ...]:
    return tuple(
        Recorded(
            peer=peer,
            value=value,
            variant=_VARIANTS[peer],
            machine=MACHINE,
            date=_VLLM_DATE if peer == "vllm" else _SGLANG_DATE,
        )
        for name, value in values.items()
        if (peer := name.replace("_", "-"))
    )


FIGURES: dict[str, tuple[Recorded, ...]] = {
    # Milliseconds for one token more in every sequence (prompts of 512 tokens). vLLM: allocate_slots alone.
    "decode 64": _figures(
        sglang=0.271, sglang_unified=0.275, sglang_cpp=0.266, mini_sglang=0.284, nano_vllm=0.082, vllm=0.656
    ),
    "decode 1024": _figures(
        sglang=0.514, sglang_unified=0.565, sglang_cpp=0.494, mini_sglang=3.07, nano_vllm=1.77, vllm=12.52
    ),
    # The same with the sampled token appended to the sequence.
    "decode and commit 1024": _figures(mini_sglang=8.47, vllm=16.43),
    # Milliseconds to admit a prompt. vLLM: hash + get_computed_blocks + allocate_slots + block ids.
    "cold 1k": _figures(
        sglang=1.01, sglang_unified=1.17, sglang_cpp=1.13, mini_sglang=0.397, nano_vllm=0.253, vllm=0.555
    ),
    "cold 8k": _figures(
        sglang=1.32, sglang_unified=1.37, sglang_cpp=2.64, mini_sglang=0.614, nano_vllm=2.29, vllm=3.39
    ),
    "cold 128k": _figures(
        sglang=3.97, sglang_unified=4.01, sglang_cpp=24.1, mini_sglang=2.91, nano_vllm=40.8, vllm=53.0
    ),
    "full hit 1k": _figures(
        sglang=1.13, sglang_unified=1.30, sglang_cpp=1.20, mini_sglang=0.486, nano_vllm=0.427, vllm=0.409
    ),
    "full hit 8k": _figures(
        sglang=1.31, sglang_unified=1.46, sglang_cpp=2.59, mini_sglang=0.598, nano_vllm=3.74, vllm=3.24
    ),
    "full hit 128k": _figures(
        sglang=2.81, sglang_unified=2.91, sglang_cpp=24.3, mini_sglang=1.23, nano_vllm=65.0, vllm=49.4
    ),
    # Milliseconds to free 1,024 sequences of 45 blocks.
    "free 1024": _figures(
        sglang=141.7, sglang_unified=228.0, sglang_cpp=100.1, mini_sglang=159.4, nano_vllm=14.5, vllm=19.6
    ),
    # Requests per CPU second through a full cache.
    "churn 2k": _figures(sglang=648, sglang_unified=521, sglang_cpp=596, mini_sglang=1030, nano_vllm=1630, vllm=854),
    "churn 2k with events": _figures(sglang_events=340),
    "churn 128": _figures(sglang=148, sglang_unified=98, sglang_cpp=462, mini_sglang=150, nano_vllm=21_269),
    # Milliseconds to admit a 128k prompt with events recorded.
    "announce 128k": _figures(sglang_events=42.7),
    # Bytes per cached block of 16 tokens. SGLang and mini-sglang: by construction (16 and 8 bytes a token).
    "metadata": _figures(sglang=256, mini_sglang=128, nano_vllm=736, vllm=277.1),
    "construction 1M": _figures(vllm=2517),
    # Seconds. SGLang: the better end of 20 to 44 s.
    "import": _figures(sglang=20, mini_sglang=6.7, vllm=12),
}
