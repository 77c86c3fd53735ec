"""Makes the tiny models beside these tests importable (collected with --import-mode=importlib), and puts one in a folder."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

# What a model computes must not depend on how many cores the machine has.
if importlib.util.find_spec("torch") is not None:
    import torch

    torch.set_num_threads(1)

CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random Llama and a tokenizer whose words are w0, w1, ..."""
    tokenizers = pytest.importorskip("tokenizers")
    from models import tiny_model
    from transformers import PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("model")
    words = {f"w{number}": number for number in range(160)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", chat_template=CHAT_TEMPLATE)
    fast.save_pretrained(directory)
    tiny_model("llama").save_pretrained(directory)
    return str(directory)
