"""Converts a GGUF file to a directory with safetensors, once: transformers reads the first in minutes, this in seconds."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from errno import EACCES
from pathlib import Path
from typing import Any

import torch

from kvpool.errors import ModelLoadError
from kvpool.tiers.identity import files_id

_CONVERSION = 2  # raise it when the result changes, so that files are converted again
_PLAIN, _CONTROL, _OF_USER = 1, 3, 4  # types of tokens in GGUF files; the last are never cut
_NEEDED_PACKAGES = ("gguf", "accelerate")  # by transformers


def cache_directory() -> Path:
    """The directory for conversions: `KVPOOL_CACHE`, else the user's cache directory."""
    if configured := os.environ.get("KVPOOL_CACHE"):
        return Path(configured).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kvpool"


def _tell(message: str) -> None:
    print(f"kvpool: {message}", file=sys.stderr, flush=True)


def converted(gguf_file: Path, *, tell: Callable[[str], None] = _tell) -> Path:
    """The directory with the model of a GGUF file in float32, with tokenizer and chat template. Converts it if needed.

    If another process converts the same file, it waits for that. A directory is always complete, because it is moved into
    place at the end. `tell` gets a message before and after the slow part.
    """
    from filelock import FileLock

    target = cache_directory() / "models" / f"{gguf_file.stem}-{_fingerprint(gguf_file)}"
    if target.is_dir():
        return target
    if missing := [name for name in _NEEDED_PACKAGES if importlib.util.find_spec(name) is None]:
        raise ModelLoadError(f"reading {gguf_file.name} needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    _make_writable(target.parent)
    with FileLock(f"{target}.lock"):
        if not target.is_dir():
            tell(f"converting {gguf_file.name} to safetensors, once; this takes a minute or more")
            unfinished = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
            try:
                _convert(gguf_file, unfinished)
                unfinished.rename(target)
            except Exception as error:  # readers may raise anything
                raise ModelLoadError(f"{gguf_file} could not be converted: {error!r}") from error
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
            tell(f"converted; kept in {target}")
    return target


def _make_writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            raise PermissionError(EACCES, os.strerror(EACCES))
    except OSError as error:
        raise ModelLoadError(
            f"the converted model cannot be kept in {directory} ({error.strerror}); set KVPOOL_CACHE to a directory of yours"
        ) from None


def _fingerprint(gguf_file: Path) -> str:
    """A digest that depends on every tensor of a file."""
    with gguf_file.open("rb") as file:
        beginning = file.read(4)
    if beginning != b"GGUF":
        raise ModelLoadError(f"{gguf_file} is no GGUF file: it begins with {beginning!r}")
    return hashlib.sha256(f"{_CONVERSION} {files_id(gguf_file)}".encode()).hexdigest()[:16]


def _convert(gguf_file: Path, directory: Path) -> None:
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    _repair_tokenizer(tokenizer, GGUFReader(gguf_file).fields)
    tokenizer.save_pretrained(directory)
    _serializable(AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)).save_pretrained(directory)


def _repair_tokenizer(tokenizer: Any, fields: Mapping[str, Any]) -> None:
    """Takes special tokens and merges from the file.

    transformers swaps BOS and EOS, does not add BOS, and cuts text of Gemma by scores that only order merges.
    """
    from tokenizers import models

    def value(name: str) -> Any:
        field = fields.get(f"tokenizer.ggml.{name}")
        return None if field is None else field.contents()

    for role, name in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("pad", "padding_token_id")):
        if (token_id := value(name)) is not None:
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(int(token_id)))
    add_bos = value("add_bos_token")
    if add_bos is None:
        add_bos = value("model") == "llama"  # readers of GGUF files assume this if a file does not say it
    tokenizer.clean_up_tokenization_spaces = False  # decoding gives back the text that was encoded
    tokenizer.add_bos_token = bool(add_bos) and tokenizer.bos_token is not None
    if value("model") == "llama" and value("merges") is None and isinstance(tokenizer._tokenizer.model, models.Unigram):
        _join_by_scores(
            tokenizer._tokenizer, *(value(name) for name in ("tokens", "scores", "token_type", "unknown_token_id"))
        )


def _join_by_scores(
    tokenizer: Any, tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], unknown: int | None
) -> None:
    """Makes SentencePiece's BPE of a tokenizer: two tokens become a third one, in the order of its score."""
    from tokenizers import AddedToken, models

    tokens = [token.replace(" ", "▁") for token in tokens]
    score = dict(zip(tokens, scores, strict=True))
    found = [
        (-score[token], -score[token[:at]], -score[token[at:]], token, at)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_PLAIN, _OF_USER)
        for at in range(1, len(token))
        if token[:at] in score and token[at:] in score
    ]
    merges = [(token[:at], token[at:]) for *_, token, at in sorted(found)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    options = {} if unknown is None else {"unk_token": tokens[unknown]}
    tokenizer.model = models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, **options)
    for kind, add in ((_CONTROL, tokenizer.add_special_tokens), (_OF_USER, tokenizer.add_tokens)):
        add([AddedToken(token, normalized=False) for token, its in zip(tokens, types, strict=True) if its == kind])


def _serializable(model: Any) -> Any:
    """The same weights in a model that can be saved: transformers refuses to save one that came from a GGUF file."""
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        fresh = type(model)(config)
    fresh.load_state_dict(model.state_dict(), assign=True)
    fresh.tie_weights()
    fresh.generation_config = model.generation_config
    return fresh
