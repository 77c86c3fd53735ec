"""Whose states are these? What must be equal before one llama.cpp may read what another wrote, and what is not served."""

from __future__ import annotations

import glob
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from kvpool.errors import ConfigError, UnsupportedModelError
from kvpool.integrations.llama_states import BLOCK_TOKENS, GROUPS
from kvpool.tiers import Fingerprint
from kvpool.tiers.identity import files_id, settings_id

IRRELEVANT = frozenset(
    {
        # Who computes, in which pieces, and who is told.
        *(
            f"context.{name}"
            for name in (
                *("n_threads", "n_threads_batch", "n_batch", "n_ubatch", "offload_kqv", "op_offload", "no_perf"),
                *("cb_eval", "cb_eval_user_data", "abort_callback", "abort_callback_data"),
                *("n_outputs_max", "n_outputs_max_per_seq", "samplers", "n_samplers"),  # what becomes of logits
            )
        ),
        # Where weights lie. Those of the file are in the fingerprint, and overrides are beside this one.
        *(
            f"model.{name}"
            for name in (
                *("devices", "tensor_buft_overrides", "n_gpu_layers", "split_mode", "main_gpu", "tensor_split"),
                *("load_mode", "lazy_mode", "use_mmap", "use_mlock", "use_extra_bufts", "no_host", "check_tensors"),
                *("progress_callback", "progress_callback_user_data", "kv_overrides"),
            )
        ),
    }
)
"""Parameters of llama.cpp that reach no key or value; any other makes another fingerprint."""
_KNOWN = re.compile(r"0\.3\.(\d+)")
_FIRST_KNOWN = 36  # of 0.3: earlier ones lack functions that are called here
_PART = re.compile(r"(.+)-\d{5}-of-(\d{5}\.gguf)")


def check_version(version: str) -> None:
    """Raises for a llama-cpp-python whose functions are others."""
    found = _KNOWN.match(version)
    if found is None or int(found[1]) < _FIRST_KNOWN:
        raise ConfigError(
            f"KVPoolCache does not know llama-cpp-python {version}: pip install 'llama-cpp-python>=0.3.{_FIRST_KNOWN},<0.4'"
        )


def check_served(api: Any, llama: Any) -> None:
    """Raises for a model whose memory cannot be cut back to a prefix, or whose tokens do not say what is in it."""
    keeps_state = api.llama_model_is_recurrent(llama.model) or api.llama_model_is_hybrid(llama.model)
    reasons = (
        (keeps_state, "layers that keep a state"),
        (api.llama_model_n_swa(llama.model) > 0, "sliding windows"),
        (api.llama_model_has_encoder(llama.model), "an encoder"),
        (llama.context_params.embeddings, "a context for embeddings"),
        # A state brings no logits, so those of its tokens would be of an earlier prompt.
        (llama._logits_all, "logits_all, which a draft model sets as well"),
        (hasattr(llama.chat_handler, "clip_model_path"), "a handler of images"),
    )
    for has, what in reasons:
        if has:
            raise UnsupportedModelError(f"KVPoolCache does not serve {what}: call no set_cache for {llama.model_path}")


def fingerprint_of(api: Any, llama: Any, model_id: str | None) -> Fingerprint:
    """Everything that must be equal: weights, adapter, what the context was made with, and llama.cpp itself."""
    layout = {
        "llama_cpp_python": api.__version__,
        "llama_cpp": api.llama_version().decode(),
        "library": _library_id(api),
        "settings": settings_id(
            {"context": llama.context_params, "model": llama.model_params, "overrides": llama.kv_overrides}, IRRELEVANT
        ),
        "adapter": None if llama.lora_path is None else [files_id(llama.lora_path), llama.lora_scale],
    }
    return Fingerprint(
        model=f"llama.cpp {llama.metadata.get('general.architecture', '')}".strip(),
        weights=_weights_id(llama.model_path) if model_id is None else model_id,
        block_size=BLOCK_TOKENS,
        groups=GROUPS,
        layout=json.dumps(layout, sort_keys=True),
    )


def _weights_id(model_path: str) -> str:
    """Of the file, or of all files where a model is cut into several and the first one was named."""
    path = Path(model_path)
    parts = [path]
    if found := _PART.fullmatch(path.name):
        parts = sorted(path.parent.glob(f"{glob.escape(found[1])}-?????-of-{found[2]}"))
    return hashlib.sha256("".join(files_id(part) for part in parts).encode()).hexdigest()


def _library_id(api: Any) -> str:
    """A digest of the library: versions do not tell builds of one's own apart, and no promise covers their states."""
    path = Path(api.llama_cpp._lib._name)
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"cannot read llama.cpp's library {path}: {error.strerror or error}") from None
