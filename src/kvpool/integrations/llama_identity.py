"""What must be equal before one llama.cpp may read states of another, and which models are not supported."""

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
        # Threads, batch sizes and callbacks.
        *(
            f"context.{name}"
            for name in (
                *("n_threads", "n_threads_batch", "n_batch", "n_ubatch", "offload_kqv", "op_offload", "no_perf"),
                *("cb_eval", "cb_eval_user_data", "abort_callback", "abort_callback_data"),
                *("n_outputs_max", "n_outputs_max_per_seq", "samplers", "n_samplers"),  # what is done with logits
            )
        ),
        # Where weights lie. The weights themselves and overrides are in the fingerprint.
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
_FIRST_KNOWN = 36  # of 0.3; earlier versions lack functions that are called here
_PART = re.compile(r"(.+)-\d{5}-of-(\d{5}\.gguf)")


def check_version(version: str) -> None:
    """Raises if llama-cpp-python has a version with other functions."""
    found = _KNOWN.match(version)
    if found is None or int(found[1]) < _FIRST_KNOWN:
        raise ConfigError(
            f"KVPoolCache does not know llama-cpp-python {version}: pip install 'llama-cpp-python>=0.3.{_FIRST_KNOWN},<0.4'"
        )


def check_served(api: Any, llama: Any) -> None:
    """Raises if the memory of a model cannot be cut to a prefix, or depends on more than its tokens."""
    keeps_state = api.llama_model_is_recurrent(llama.model) or api.llama_model_is_hybrid(llama.model)
    reasons = (
        (keeps_state, "layers that keep a state"),
        (api.llama_model_n_swa(llama.model) > 0, "sliding windows"),
        (api.llama_model_has_encoder(llama.model), "an encoder"),
        (llama.context_params.embeddings, "a context for embeddings"),
        # A state has no logits, so those of its tokens would come from an earlier prompt.
        (llama._logits_all, "logits_all, which a draft model sets as well"),
        (hasattr(llama.chat_handler, "clip_model_path"), "a handler of images"),
    )
    for has, what in reasons:
        if has:
            raise UnsupportedModelError(f"KVPoolCache does not serve {what}: call no set_cache for {llama.model_path}")


def fingerprint_of(api: Any, llama: Any, model_id: str | None) -> Fingerprint:
    """Everything that must be equal: weights, adapter, parameters of the context, and llama.cpp itself."""
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
    """A digest of the file; of all files if the model is split and the first one is named."""
    path = Path(model_path)
    parts = [path]
    if found := _PART.fullmatch(path.name):
        parts = sorted(path.parent.glob(f"{glob.escape(found[1])}-?????-of-{found[2]}"))
    return hashlib.sha256("".join(files_id(part) for part in parts).encode()).hexdigest()


def _library_id(api: Any) -> str:
    """A digest of the library, because different builds of one version may write different states."""
    path = Path(api.llama_cpp._lib._name)
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"cannot read llama.cpp's library {path}: {error.strerror or error}") from None
