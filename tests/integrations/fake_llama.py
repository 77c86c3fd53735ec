"""A stand-in for llama-cpp-python: a Llama that computes with integers, and the calls to its memory that a cache makes.

What a token becomes depends on all tokens before it, as in a model, so that a wrong state gives a wrong answer. The order of
calls is that of `Llama._create_completion` and `Llama.generate` in 0.3.36.
"""

from __future__ import annotations

import ctypes
import types
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = 0x1234
CELL_WORDS = 512  # so that 300 tokens take more than one piece
VOCABULARY = 5000


class BaseLlamaCache(ABC):
    """What llama-cpp-python derives its caches from."""

    def __init__(self, capacity_bytes: int = 2 << 30) -> None:
        self.capacity_bytes = capacity_bytes

    @property
    @abstractmethod
    def cache_size(self) -> int: ...

    @abstractmethod
    def __getitem__(self, key: Sequence[int]) -> Any: ...

    @abstractmethod
    def __contains__(self, key: Sequence[int]) -> bool: ...

    @abstractmethod
    def __setitem__(self, key: Sequence[int], value: Any) -> None: ...


class LlamaState:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class ContextParams:
    """Some of those that llama.cpp has."""

    def __init__(self, **given: Any) -> None:
        self.n_ctx, self.n_seq_max, self.kv_unified = 4096, 1, False
        self.type_k = self.type_v = 1
        self.flash_attn_type = self.attention_type = self.rope_scaling_type = self.yarn_orig_ctx = 0
        self.swa_full, self.embeddings = True, False
        self.rope_freq_base = self.rope_freq_scale = self.yarn_ext_factor = 0.0
        self.yarn_attn_factor = self.yarn_beta_fast = self.yarn_beta_slow = 0.0
        self.__dict__.update(given)


class Llama:
    """Greedy answers, and how many tokens were computed for them."""

    def __init__(self, model_path: str, *, refuses: bool = False, model: dict[str, Any] | None = None, **params: Any):
        self.model_path, self.model = model_path, model or {}
        self.lora_path, self.lora_scale = params.pop("lora_path", None), params.pop("lora_scale", 1.0)
        self.kv_overrides, self.chat_handler = params.pop("kv_overrides", None), params.pop("chat_handler", None)
        self._logits_all = params.pop("logits_all", False)
        self.context_params, self.model_params = ContextParams(**params), types.SimpleNamespace(n_gpu_layers=0)
        self.metadata = {"general.architecture": "fake"}
        self.ctx: list[int] = []  # what each token became; its own memory
        self.refuses = refuses
        self.input_ids: Any = np.zeros(self.context_params.n_ctx, np.intc)
        self.n_tokens = self.num_computed = self._seed = 0
        self.cache: Any = None

    def set_cache(self, cache: Any) -> None:
        self.cache = cache

    def reset(self) -> None:
        self.n_tokens = 0

    def eval(self, tokens: Sequence[int]) -> None:
        del self.ctx[self.n_tokens :]
        for token in tokens:
            before = self.ctx[-1] if self.ctx else 1
            self.ctx.append((before * 6364136223846793005 + int(token) * 1442695040888963407 + 1) % 2**62)
            self.input_ids[self.n_tokens] = token
            self.n_tokens += 1
            self.num_computed += 1

    def answer(self, prompt: Sequence[int], num_tokens: int = 8) -> list[int]:
        """A completion, with the cache where one is set."""
        if self.cache:
            try:
                item = self.cache[prompt]
                assert common(item.input_ids, prompt) == common(self.input_ids[: self.n_tokens], prompt)
            except KeyError:
                pass
        self.num_computed = 0
        reuse = min(common(self.input_ids[: self.n_tokens], prompt), len(prompt) - 1)
        del self.ctx[reuse:]
        self.n_tokens = reuse
        self.eval(prompt[reuse:])
        self.num_prompt = self.num_computed
        answer: list[int] = []
        while len(answer) < num_tokens:
            if answer:
                self.eval(answer[-1:])
            answer.append(self.ctx[-1] % VOCABULARY)
        if self.cache:
            self.cache[[*prompt, *answer]] = None
        return answer


def common(tokens: Any, others: Any) -> int:
    """Tokens that both begin with."""
    pairs = list(zip(tokens, others, strict=False))
    return next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))


def make_module(library: Path, version: str = "0.3.36") -> dict[str, Any]:
    """The package and its modules, by the names under which they are imported."""
    package, inner, caches = (types.ModuleType(name) for name in ("llama_cpp", "inner", "caches"))
    caches.BaseLlamaCache = BaseLlamaCache  # type: ignore[attr-defined]
    inner._lib = types.SimpleNamespace(_name=str(library))  # type: ignore[attr-defined]
    functions = {
        "__version__": version,
        "Llama": Llama,
        "LlamaState": LlamaState,
        "llama_cpp": inner,
        "llama_version": lambda: b"b1",
        "llama_model_is_recurrent": lambda model: model.get("recurrent", False),
        "llama_model_is_hybrid": lambda model: model.get("hybrid", False),
        "llama_model_n_swa": lambda model: model.get("n_swa", 0),
        "llama_model_has_encoder": lambda model: model.get("encoder", False),
        "llama_get_memory": lambda ctx: ctx,
        "llama_memory_clear": lambda memory, data: memory.clear(),
        "llama_memory_seq_pos_min": lambda memory, sequence: 0 if memory else -1,
        "llama_memory_seq_pos_max": lambda memory, sequence: len(memory) - 1,
        "llama_memory_seq_rm": _seq_rm,
        "llama_state_seq_get_size": lambda ctx, sequence: 8 * (2 + CELL_WORDS * len(ctx)),
        "llama_state_seq_get_data": _get_data,
        "llama_state_seq_set_data": _set_data,
    }
    for name, value in functions.items():
        setattr(package, name, value)
    return {"llama_cpp": package, "llama_cpp.llama_cpp": inner, "llama_cpp.llama_cache": caches}


def _seq_rm(memory: list[int], sequence: int, first: int, last: int) -> bool:
    assert (sequence, last) == (0, -1)
    del memory[first:]
    return True


def _get_data(ctx: list[int], data: Any, size: int, sequence: int) -> int:
    cells = np.repeat(np.array(ctx, np.int64), CELL_WORDS)
    state = np.concatenate([np.array([MAGIC, len(ctx)], np.int64), cells]).tobytes()
    assert len(state) == size == len(data)
    ctypes.memmove(data, state, size)
    return size


def _set_data(ctx: list[int], data: Any, size: int, sequence: int) -> int:
    state = np.frombuffer(bytes(data), np.int64)
    if state[0] != MAGIC or len(state) != 2 + CELL_WORDS * state[1]:
        return 0
    ctx[:] = state[2::CELL_WORDS].tolist()
    return size
