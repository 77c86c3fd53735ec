"""Layers that torch.compile has made faster: it fuses the small operations between the matrix products of each layer.

Compiling takes seconds, also where everything is kept on disk. Meanwhile a copy of the model with plain layers can answer.
"""

from __future__ import annotations

import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvpool.errors import UnsupportedModelError
from kvpool.model.faster_layers import JoinedProduct, fuse_norms, has_experts
from kvpool.model.forward import forward
from kvpool.model.gguf_conversion import cache_directory
from kvpool.model.hook import Attend
from kvpool.model.private_copy import private_copy

# Tokens of the first step. torch takes equal sizes for one: if a layer had so many heads or numbers, every other number of
# tokens would be compiled again. So it is a prime, like that of a step in which experts multiply many tokens.
_NUM_TOKENS, _MANY_TOKENS = 67, 1031

# After so long the compiler hands Python over to steps that wait for it. With Python's 5 ms a step of 8B parameters on an
# H200 took 91 ms while layers were compiled, with this 14 ms.
_SWITCH_SECONDS = 0.0001


def layers_folder() -> Path:
    """Where compiled layers are kept. Torch's own place, in /tmp, does not outlive the machine.

    Torch writes its own place, `torchinductor_USER`, into the variable when its compiler is imported, which takes seconds: so
    it is known by its name. It stays where no other can be written.
    """
    temporary = Path(tempfile.gettempdir())
    given = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or temporary / "torchinductor_kvpool")
    if given.parent != temporary or not given.name.startswith("torchinductor_"):
        return given
    try:
        folder = cache_directory() / "layers"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # the user has no directory
        return given
    return folder if os.access(folder, os.W_OK) else given


def compile_each_layer(model: Any, num_layers: int) -> None:
    """Has every decoder layer compiled when it first runs, for any number of tokens; attention stays as it is (see `hook`).

    What is compiled is kept in `layers_folder`, and found there by the next process.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(layers_folder())
    # Among the layers of an image encoder may be as many.
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    lists = [m for m in decoder.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == num_layers]
    if not lists:
        raise UnsupportedModelError(f"{type(model).__name__} has no list of {num_layers} layers; use compile=False")
    for layer in lists[0]:
        layer._compiled_call_impl = partial(_compile, layer)


def _compile(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """The first call of a layer. Even to say that a layer is to be compiled, torch imports its compiler for seconds."""
    layer.compile(dynamic=True)
    return layer(*args, **kwargs)


def plain_copy(model: Any) -> Any:
    """A copy of a model whose layers are to be compiled: they stay plain, and another thread may run it at the same time."""
    plain = private_copy(model)
    for module in plain.modules():
        if isinstance(module, JoinedProduct):
            module.share_no_product()
    if model.device.type == "cuda":
        fuse_norms(plain)
    return plain


@torch.inference_mode()
def run_layers(model: Any, attend: Attend, num_axes: int, *, one_token: bool) -> None:
    """Runs a model so that its layers are compiled for any number of tokens above one, and for `one_token`, if asked to.

    Experts multiply few tokens and many in different ways, so their layers are compiled for both.

    Meanwhile threads take turns more often than usual. Only one thread at a time may call this.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        counts = [_NUM_TOKENS] + [_MANY_TOKENS] * has_experts(model) + [1] * one_token
        for count in counts:
            tokens = torch.zeros(count, dtype=torch.int64, device=model.device)
            positions = tokens.expand(num_axes, count).contiguous() if num_axes > 1 else tokens.clone()
            forward(model, tokens, positions, tokens[:1], attend)
    finally:
        sys.setswitchinterval(interval)
