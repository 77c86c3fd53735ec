"""A tokenizer that can write JSON with the 160 tokens of a tiny model: the visible letters of ASCII and a few pairs."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

EOS = 2
_SPECIAL = ["<pad>", "<s>", "</s>"]
_MERGES = [("{", '"'), ('"', ":"), ('"', "}"), ("t", "r"), ("u", "e"), ("tr", "ue")]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def letters_tokenizer(without: str = "") -> Any:
    """Bytes are written as letters, as GPT-2 began it."""
    letters = [chr(code) for code in range(33, 127) if chr(code) not in without] + ["Ġ", "Ċ"]
    merges = [(one, other) for one, other in _MERGES if not set(one + other) & set(without)]
    words = [*_SPECIAL, *letters, *(one + other for one, other in merges)]
    tokenizer = Tokenizer(BPE({word: number for number, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()])  # as converted ones have it
    tokenizer.add_special_tokens(_SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", chat_template=TEMPLATE)
