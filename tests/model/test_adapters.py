"""Adapters as peft saves them: what is read, what is refused, and that engines answer as peft does."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from adapter_files import ALL, write_adapter  # noqa: E402
from models import random_prompt, tiny_model  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from kvpool.engine import Engine, Sample, SamplingParams  # noqa: E402
from kvpool.errors import ConfigError, InvalidArgumentError, UnsupportedModelError  # noqa: E402
from kvpool.model.adapters import read_adapter  # noqa: E402
from kvpool.tiers.model_tiers import model_id  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_self_check")

PROMPT = random_prompt(20).tolist()
SCORED = SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=3)


def test_given_an_adapter_then_scales_and_ranks_are_those_of_its_modules(tmp_path: Path) -> None:
    write_adapter(
        *(tmp_path, tiny_model("llama"), ("q_proj", "v_proj")),
        rank=4,
        alpha=8,
        rank_pattern={"v_proj": 2},
        alpha_pattern={"layers.1.self_attn.q_proj": 16},
    )
    pairs = read_adapter(tmp_path).pairs
    found = {name: (len(pair.a), pair.scale) for name, pair in pairs.items()}
    attention = "model.layers.{}.self_attn.{}_proj"
    assert found == {
        attention.format(0, "q"): (4, 2.0),
        attention.format(1, "q"): (4, 4.0),
        attention.format(0, "v"): (2, 4.0),
        attention.format(1, "v"): (2, 4.0),
    }


def test_given_any_change_of_content_then_the_id_changes_and_of_names_it_does_not(tmp_path: Path) -> None:
    model = tiny_model("llama")
    first = write_adapter(tmp_path / "first", model)
    same = write_adapter(tmp_path / "same", model, base_model_name_or_path="elsewhere", lora_dropout=0.1)
    others = [
        write_adapter(tmp_path / "alpha", model, alpha=9),
        write_adapter(tmp_path / "rslora", model, use_rslora=True),
        write_adapter(tmp_path / "seed", model, seed=1),
        write_adapter(tmp_path / "targets", model, ALL[:3]),
    ]
    ids = [read_adapter(path).id for path in (first, same, *others)]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' is not served; LORA is"),
        ({"use_dora": True}, "use_dora=True is not served"),
        ({"bias": "all"}, "bias='all' is not served"),
        ({"lora_bias": True}, "lora_bias=True is not served"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not served"),
        (
            {"target_parameters": ["q_proj.weight"], "alpha_pattern": {"q_proj.weight": 2}},
            "patterns say one thing of .*q_proj and another of its weight",
        ),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens=.* is not served"),
        ({"a_field_of_next_year": 1}, "a_field_of_next_year=1 is not served"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' changed the model's own weights"),
        ({"r": 5}, "has rank 4; adapter_config.json says r=5"),
    ],
    ids=str,
)
def test_given_what_is_not_served_then_the_error_names_it(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_adapter(tmp_path, tiny_model("llama"))
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    with pytest.raises(ConfigError, match=message):
        read_adapter(tmp_path)


def test_given_files_that_are_no_adapter_then_the_error_names_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no directory of an adapter: adapter_config.json: No such file"):
        read_adapter(tmp_path)
    write_adapter(tmp_path, tiny_model("llama"))
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 160)}, file)
    with pytest.raises(ConfigError, match=r"holds base_model.model.model.embed_tokens.lora_embedding_A; served are"):
        read_adapter(tmp_path)
    save_file({key: tensor for key, tensor in tensors.items() if "layers.1.mlp.up_proj.lora_B" not in key}, file)
    with pytest.raises(ConfigError, match=r"layers.1.mlp.up_proj needs lora_A \[rank, in\] and lora_B"):
        read_adapter(tmp_path)
    file.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="is no file of safetensors"):
        read_adapter(tmp_path)
    file.unlink()
    with pytest.raises(ConfigError, match=r"cannot be read: No such file or directory: adapter_model.safetensors"):
        read_adapter(tmp_path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_given_a_fifo_in_place_of_a_file_then_reading_an_adapter_does_not_wait_for_it(
    name: str, tmp_path: Path
) -> None:
    write_adapter(tmp_path, tiny_model("llama"))
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match="not a plain file but a FIFO"):
        read_adapter(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 100_000])
def test_given_a_configuration_that_is_no_json_then_the_error_names_it(content: bytes, tmp_path: Path) -> None:
    write_adapter(tmp_path, tiny_model("llama"))
    (tmp_path / "adapter_config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"adapter_config.json cannot be read: it is not JSON"):
        read_adapter(tmp_path)


# --- beside peft ---------------------------------------------------------------------------------------------------------


def saved_by_peft(directory: Path, seed: int, family: str = "llama", **settings: Any) -> Path:
    """An adapter with random weights that peft itself made and saved."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    model = peft.get_peft_model(tiny_model(family), peft.LoraConfig(init_lora_weights=False, **settings))
    model.save_pretrained(directory)
    return directory


def said_by(model: Any) -> tuple[list[int], Any]:
    """The tokens of a model's greedy answer, and their log probabilities."""
    ids = torch.tensor([PROMPT])
    out = model.generate(input_ids=ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    tokens = out[0, len(PROMPT) :].tolist()
    logprobs = model(out).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    return tokens, logprobs[range(len(tokens)), tokens].detach()


def said_by_engine(engine: Engine, name: str | None = None) -> tuple[list[int], Any]:
    sample = engine.submit(PROMPT, SCORED, adapter=name).result(60).samples[0]
    return sample.token_ids, torch.tensor([each.logprob for each in sample.logprobs])


@pytest.mark.slow
def test_given_adapters_saved_by_peft_then_tokens_and_logits_are_those_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    paths = {
        "all": saved_by_peft(tmp_path / "all", 1, r=4, target_modules="all-linear"),
        "some": saved_by_peft(
            tmp_path / "some",
            2,
            r=8,
            lora_alpha=20,
            use_rslora=True,
            target_modules=["q_proj", "down_proj"],
            rank_pattern={"q_proj": 3},
            alpha_pattern={"layers.1.mlp.down_proj": 2},
        ),
    }
    with Engine(tiny_model("llama"), kv_blocks=64, adapters=paths) as engine:
        running = {name: engine.submit(PROMPT, SCORED, adapter=name) for name in (None, *paths)}
        for name, path in paths.items():
            tokens, logprobs = said_by(peft.PeftModel.from_pretrained(tiny_model("llama"), path))
            mixed = running[name].result(60).samples[0]
            alone, of_alone = said_by_engine(engine, name)
            assert mixed.token_ids == alone == tokens
            torch.testing.assert_close(of_alone, logprobs, rtol=1e-4, atol=1e-4)
            mine = torch.tensor([each.logprob for each in mixed.logprobs])
            torch.testing.assert_close(mine, logprobs, rtol=1e-4, atol=1e-4)


PEFTS_OWN = pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning")  # of its own file
EXPERTS = ["gate_up_proj", "down_proj"]


def experts_of(family: str, folder: Path) -> dict[str, Path]:
    """Adapters as peft writes them: for all that is linear, and for some parameters of experts."""
    some = {"target_modules": ["o_proj"], "target_parameters": [f"experts.{name}" for name in EXPERTS]}
    every: dict[str, Any] = {"target_modules": "all-linear"}
    if family.startswith("deepseek"):
        every["exclude_modules"] = ["kv_b_proj"]  # which is folded
    return {
        "all": saved_by_peft(folder / "all", 1, family, r=4, lora_alpha=12, **every),
        "some": saved_by_peft(folder / "some", 2, family, r=5, use_rslora=True, lora_alpha=6, **some),
        "down": saved_by_peft(folder / "down", 3, family, r=17, lora_alpha=40, target_parameters=EXPERTS[1:]),
    }


@pytest.mark.quick("mixtral")
@PEFTS_OWN
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "granitemoe", "deepseek_v3"])
def test_given_adapters_of_experts_then_a_mixed_batch_answers_as_peft_does(family: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    paths = experts_of(family, tmp_path)
    with Engine(tiny_model(family), kv_blocks=64, max_adapters=3) as engine:
        for name in ("down", "some", "all"):  # with a larger rank than the next ones, which have more targets
            engine.load_adapter(name, paths[name])
        running = {name: engine.submit(PROMPT, SCORED, adapter=name) for name in (None, *paths)}
        answers = {name: one.result(60).samples[0] for name, one in running.items()}
    for name, answer in answers.items():
        model = tiny_model(family)
        tokens, logprobs = said_by(model if name is None else peft.PeftModel.from_pretrained(model, paths[name]))
        assert answer.token_ids == tokens
        mine = torch.tensor([each.logprob for each in answer.logprobs])
        torch.testing.assert_close(mine, logprobs, rtol=1e-4, atol=1e-4)
    assert len({tuple(each.logprob for each in answer.logprobs) for answer in answers.values()}) == len(answers)


@PEFTS_OWN
def test_given_more_choices_of_experts_than_a_kernel_looks_at_then_adapters_add_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = experts_of("mixtral", tmp_path)
    answers = []
    for choices in (1024, 7):
        monkeypatch.setattr("kvpool.model.expert_adapters.MOST_CHOICES", choices)
        with Engine(tiny_model("mixtral"), kv_blocks=64, max_adapters=3, adapters=paths) as engine:
            running = [engine.submit(PROMPT, SCORED, adapter=name) for name in (*paths, None)]
            answers.append([one.result(60).samples[0].token_ids for one in running])
    assert answers[0] == answers[1]


@PEFTS_OWN
def test_given_a_place_that_another_adapter_had_then_nothing_of_it_is_left(tmp_path: Path) -> None:
    paths = experts_of("mixtral", tmp_path)
    with Engine(tiny_model("mixtral"), kv_blocks=64, max_adapters=1, adapters=paths) as engine:
        first = {name: said_by_engine(engine, name)[0] for name in paths}
        assert {name: said_by_engine(engine, name)[0] for name in reversed(paths)} == first
        modules = list(engine._loop.runner.model.modules())
        assert any("forward" in vars(module) for module in modules)
    assert not any("forward" in vars(module) for module in modules)


@PEFTS_OWN
def test_given_experts_that_are_not_served_then_the_error_names_them(tmp_path: Path) -> None:
    path = experts_of("mixtral", tmp_path)["some"]
    replaced = tiny_model("mixtral")
    experts = replaced.model.layers[1].mlp.experts
    experts.forward = partial(experts.forward)
    for model, message in (
        (tiny_model("mixtral", num_local_experts=8), r"experts.down_proj has rank 2.5; adapter_config.json says r=5"),
        (
            tiny_model("mixtral", intermediate_size=80),
            r"fits not one parameter of the model's module: it has gate_up_proj",
        ),
        (tiny_model("llama"), r"mlp.experts.* has rank 20"),
        (replaced, r"layers.1.mlp.experts.* has rank 20"),
    ):
        with Engine(model, kv_blocks=16) as engine, pytest.raises(ConfigError, match=message):
            engine.load_adapter("a", path)


@pytest.mark.gpu
@PEFTS_OWN
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_given_a_gpu_then_adapters_of_experts_answer_from_graphs_as_without_and_as_on_a_cpu(
    family: str, tmp_path: Path
) -> None:
    paths = experts_of(family, tmp_path)

    def answers(device: str, dtype: torch.dtype, graphs: bool) -> list[Sample]:
        model = tiny_model(family).to(device, dtype)
        with Engine(model, kv_blocks=64, max_adapters=3, adapters=paths, cuda_graphs=graphs) as engine:
            running = [engine.submit(PROMPT, SCORED, adapter=name) for name in (None, *paths)]
            return [one.result(60).samples[0] for one in running]

    # torch multiplies grouped matrices of float32 by a loop on the host, which no graph records
    for dtype, exact, graphs, allowed in ((torch.float32, "cpu", False, 1e-3), (torch.bfloat16, "cuda", True, 2e-2)):
        for wanted, mine in zip(answers(exact, dtype, False), answers("cuda", dtype, graphs), strict=True):
            assert mine.token_ids == wanted.token_ids
            logprobs = [torch.tensor([each.logprob for each in one.logprobs]) for one in (mine, wanted)]
            torch.testing.assert_close(*logprobs, rtol=allowed, atol=allowed)


def test_given_a_peft_model_then_it_is_served_with_its_active_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    one = saved_by_peft(tmp_path / "one", 1, r=4, target_modules="all-linear")
    two = saved_by_peft(tmp_path / "two", 2, r=8, target_modules=["q_proj", "v_proj"])
    model = peft.PeftModel.from_pretrained(tiny_model("llama"), one, adapter_name="one")
    model.load_adapter(two, adapter_name="two")
    ids = set()
    for name in ("one", "two"):
        model.set_adapter(name)
        tokens, logprobs = said_by(model)
        with Engine(model, kv_blocks=64) as engine:
            ids.add(model_id(engine.model))
            answer, of_answer = said_by_engine(engine)
            assert answer == tokens
            torch.testing.assert_close(of_answer, logprobs, rtol=1e-4, atol=1e-4)
            model.set_adapter("two" if name == "one" else "one")  # the engine runs a copy of the layers
            assert said_by_engine(engine)[0] == tokens
            with pytest.raises(InvalidArgumentError, match="the model has adapters of peft in its layers"):
                engine.load_adapter("a", one)
    assert len(ids) == 2  # tiers tell them apart, though the weights of both are in the model


def test_given_a_peft_model_with_learned_prompts_then_it_is_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(UnsupportedModelError, match="changes more than the layers of the model"):
        Engine(peft.get_peft_model(tiny_model("llama"), config), kv_blocks=16)
