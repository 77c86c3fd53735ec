"""Compiled layers: nobody who looks at a model has them compiled again, and engines one after another share their code."""

from __future__ import annotations

from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from adapter_files import ATTENTION, merged, write_adapter  # noqa: E402
from models import random_prompt, tiny_model  # noqa: E402
from vision_models import vision_model  # noqa: E402

from kvpool.engine import Engine, SamplingParams  # noqa: E402
from kvpool.errors import InvalidArgumentError, UnsupportedModelError  # noqa: E402
from kvpool.model.compiled_layers import compile_each_layer, run_layers  # noqa: E402
from kvpool.model.faster_layers import fuse_experts  # noqa: E402
from kvpool.model.forward import forward  # noqa: E402
from kvpool.model.probing import inspect_model  # noqa: E402

GREEDY = SamplingParams(max_new_tokens=4, temperature=0.0)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that torch.compile found in layers; each runs as it is, without a compiler."""
    found: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        found.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend=keep))
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile has much to say
def test_given_engines_one_after_another_then_the_layers_of_their_model_are_compiled_once(graphs: list[Any]) -> None:
    model, prompts = tiny_model("llama"), [random_prompt(5, seed=1)]  # one: every engine runs steps of the same sizes
    outputs, counts = [], []
    for _ in range(3):
        with Engine(model, kv_blocks=64, compile=True) as engine:
            engine.warm_up()
            counts.append(len(graphs))  # steps of other sizes are compiled already
            outputs.append([output.token_ids for output in engine.generate(prompts, GREEDY)])
        counts.append(len(graphs))
    assert counts == [counts[0]] * 6
    assert counts[0] > 0
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile has much to say
def test_given_an_indexer_then_what_it_chooses_goes_from_one_compiled_layer_to_the_next(graphs: list[Any]) -> None:
    model, prompts = tiny_model("glm_moe_dsa"), [random_prompt(40, seed=1)]
    with Engine(model, kv_blocks=64) as engine:
        expected = engine.generate(prompts, GREEDY)[0].token_ids
    with Engine(model, kv_blocks=64, compile=True) as engine:
        engine.warm_up()
        assert not engine._loop.runner.is_uncompiled
        assert engine.generate(prompts, GREEDY)[0].token_ids == expected
    assert len(graphs) > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile has much to say
def test_given_experts_then_their_layers_are_compiled_for_few_tokens_and_for_many(graphs: list[Any]) -> None:
    model = tiny_model("mixtral")
    inspect_model(model)

    def logits(count: int) -> Any:
        tokens = random_prompt(count, seed=1)
        with torch.inference_mode():
            return forward(model, tokens, torch.arange(count), torch.tensor([count - 1]), lambda call: call.q)

    expected = {count: logits(count) for count in (2, 50, 511, 513)}
    assert fuse_experts(model) == 2
    compile_each_layer(model, 2)
    run_layers(model, lambda call: call.q, 1, one_token=True)
    assert "kvpool.expert_product" in "".join(str(graph.code) for graph in graphs)
    number = len(graphs)
    for count, wanted in expected.items():
        torch.testing.assert_close(logits(count), wanted, rtol=1e-4, atol=1e-4)
    assert len(graphs) == number


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile has much to say
def test_given_compiled_layers_then_adapters_of_peft_answer_inside_them_and_others_are_refused(
    graphs: list[Any], tmp_path: Path
) -> None:
    plain, prompts, first = tiny_model("llama"), [random_prompt(9, seed=1)], SamplingParams(max_new_tokens=1)
    path = write_adapter(tmp_path / "a", plain, ATTENTION, seed=5)
    with Engine(plain, kv_blocks=64, compile=True) as engine:
        with pytest.raises(InvalidArgumentError, match="compiled layers cannot take adapters: use compile=False"):
            engine.load_adapter("a", path)
        assert engine.adapters == {}

    peft = pytest.importorskip("peft")
    with Engine(merged(plain, path), kv_blocks=64) as engine:
        expected = engine.generate(prompts, first)[0].token_ids
    with Engine(peft.PeftModel.from_pretrained(plain, path), kv_blocks=64, compile=True) as engine:
        engine.warm_up()
        assert engine.generate(prompts, first)[0].token_ids == expected
    assert graphs


def test_given_an_image_encoder_of_as_many_layers_then_only_those_of_the_decoder_are_compiled(
    graphs: list[Any],
) -> None:
    model = vision_model("llava")
    compile_each_layer(model, 2)
    compiled = [name for name, module in model.named_modules() if module._compiled_call_impl is not None]
    assert compiled == ["model.language_model.layers.0", "model.language_model.layers.1"]


def test_given_a_model_without_a_list_of_its_layers_then_it_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="Linear has no list of 2 layers; use compile=False"):
        compile_each_layer(torch.nn.Linear(2, 2), 2)
