"""Requests with LoRA adapters: each answers as a model with its adapter merged, whatever else is in the batch."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from adapter_files import ALL, ATTENTION, merged, write_adapter  # noqa: E402
from fake_graphs import FakeRecorder, graph_runner  # noqa: E402
from models import random_prompt, tiny_model  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from vision_models import own_answer, prompt, vision_model  # noqa: E402

from kvpool import ReuseScope  # noqa: E402
from kvpool.engine import Engine, SamplingParams, engine_parts  # noqa: E402
from kvpool.engine.generation import Chunk, Generation  # noqa: E402
from kvpool.errors import ConfigError, InvalidArgumentError, NeverFitsError, SequenceStateError, UnsupportedModelError  # noqa: E402
from kvpool.model.faster_layers import join_projections  # noqa: E402
from kvpool.model.probing import inspect_model, run_probe  # noqa: E402
from kvpool.scheduling import SchedulerConfig  # noqa: E402
from kvpool.tiers import MemoryTier  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_self_check")

PROMPT = random_prompt(40).tolist()
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)
LIMITS = SchedulerConfig(max_tokens_per_step=100, max_sequences=8)


class Adapters:
    """Some adapters of different targets, ranks and scales, and what the model says with each."""

    def __init__(self, directory: Path, family: str = "llama") -> None:
        self.model = tiny_model(family)
        write = write_adapter
        self.paths = {
            "all": write(directory / "all", self.model, seed=1),
            "values": write(directory / "values", self.model, ("q_proj", "v_proj"), rank=8, alpha=4, seed=2),
            "wide": write(directory / "wide", self.model, ALL, rank=20, alpha=30, seed=3, use_rslora=True),
            "mlp": write(directory / "mlp", self.model, ("up_proj", "down_proj"), rank=2, seed=4),
        }
        self._expected: dict[tuple[str | None, tuple[int, ...]], list[int]] = {}

    def expected(self, name: str | None, prompt: list[int] = PROMPT) -> list[int]:
        """What transformers says, greedily, with an adapter merged."""
        key = name, tuple(prompt)
        if key not in self._expected:
            model = tiny_model("llama")
            model = model if name is None else merged(model, self.paths[name])
            ids = torch.tensor([prompt])
            out = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
            self._expected[key] = out[0, len(prompt) :].tolist()
        return self._expected[key]

    def engine(self, **options: Any) -> Engine:
        options = {"adapters": self.paths, "kv_blocks": 128, "scheduler": LIMITS, **options}
        return Engine(tiny_model("llama"), **options)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("adapters"))


def answer(engine: Engine, name: str | None, prompt: list[int] = PROMPT) -> list[int]:
    return engine.generate([prompt], GREEDY, adapter=name)[0].token_ids


def mixed_answers(engine: Engine, names: list[str | None], prompt: list[int] = PROMPT) -> list[list[int]]:
    """Answers to the same prompt of several adapters, in one batch."""
    running = [engine.submit(prompt, GREEDY, adapter=name) for name in names]
    return [generation.result(60).token_ids for generation in running]


def test_given_adapters_when_asked_one_by_one_then_each_answers_as_its_merged_model(adapters: Adapters) -> None:
    with adapters.engine() as engine:
        answers = {name: answer(engine, name) for name in (None, *adapters.paths)}
    assert answers == {name: adapters.expected(name) for name in answers}
    assert len({tuple(each) for each in answers.values()}) == 5


@pytest.mark.transformers
def test_given_rows_of_several_adapters_and_of_none_then_one_batch_answers_all(adapters: Adapters) -> None:
    names = [None, *adapters.paths, "all", None, "wide"]
    with adapters.engine() as engine:
        assert mixed_answers(engine, names) == [adapters.expected(name) for name in names]
        assert mixed_answers(engine, names) == [adapters.expected(name) for name in names]  # now from the cache
        engine.manager.check()


def test_given_joined_projections_then_each_part_gets_what_its_adapter_adds(
    adapters: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    def joined(model: Any, **options: Any) -> Any:  # as on a GPU
        shape = inspect_model(model, **options)
        assert join_projections(model, lambda: run_probe(model)) == 6
        return shape

    monkeypatch.setattr(engine_parts, "inspect_model", joined)
    names = [None, *adapters.paths]
    with adapters.engine() as engine:
        assert mixed_answers(engine, names) == [adapters.expected(name) for name in names]


@pytest.mark.quick("gpt2")
@pytest.mark.parametrize("family", ["gpt2", "qwen2", "gemma2", "deepseek_v3"])
def test_given_another_family_then_an_adapter_answers_as_its_merged_model(family: str, tmp_path: Path) -> None:
    targets = {"gpt2": ("c_attn", "c_proj"), "deepseek_v3": ("q_b_proj", "kv_a_proj_with_mqa", "o_proj")}
    model = tiny_model(family)
    path = write_adapter(tmp_path, model, targets.get(family, ATTENTION), seed=5)
    with Engine(merged(model, path), kv_blocks=64) as engine:
        expected = answer(engine, None)
    with Engine(model, kv_blocks=64, adapters={"a": path}) as engine:
        plain = answer(engine, None)
        assert answer(engine, "a") == expected != plain


def test_given_another_adapter_then_a_prefix_is_not_reused_and_of_the_same_one_it_is(adapters: Adapters) -> None:
    with adapters.engine() as engine:

        def cached(name: str | None) -> int:
            return engine.generate([PROMPT], GREEDY, adapter=name)[0].num_cached_tokens

        assert [cached(name) for name in (None, "all", "values")] == [0, 0, 0]
        assert [cached(name) for name in (None, "all", "values")] == [39, 39, 39]


def test_given_tiers_then_blocks_are_found_by_the_content_of_an_adapter_not_by_its_name(
    adapters: Adapters, tmp_path: Path
) -> None:
    tier = MemoryTier(2**24)

    def run(path: Path) -> tuple[int, list[int]]:
        with adapters.engine(tiers=[tier], adapters={"mine": path}) as engine:
            out = engine.generate([PROMPT], GREEDY, adapter="mine")[0]
            assert engine._tiers is not None
            assert engine._tiers.flush(60)
            return out.num_cached_tokens, out.token_ids

    assert run(adapters.paths["all"]) == (0, adapters.expected("all"))
    assert run(adapters.paths["wide"]) == (0, adapters.expected("wide"))
    copied = write_adapter(tmp_path / "copy", adapters.model, seed=1)
    assert run(copied) == (32, adapters.expected("all"))


@pytest.mark.slow
def test_given_an_engine_that_runs_when_adapters_are_loaded_then_requests_use_them(adapters: Adapters) -> None:
    with adapters.engine(adapters=None) as engine:
        running = engine.submit(PROMPT, SamplingParams(max_new_tokens=200, ignore_eos=True))
        for name in ("mlp", "values", "wide"):  # each has other targets or a larger rank than those before
            engine.load_adapter(name, adapters.paths[name])
            assert answer(engine, name) == adapters.expected(name)
        assert mixed_answers(engine, ["wide", "mlp", None]) == [adapters.expected(n) for n in ("wide", "mlp", None)]
        assert running.result(60).token_ids[:12] == adapters.expected(None)
        assert set(engine.adapters) == {"mlp", "values", "wide"}
        assert engine.adapters["wide"].rank == 20


def test_given_more_adapters_than_places_then_all_are_answered_and_the_unused_ones_leave(adapters: Adapters) -> None:
    names = [*adapters.paths, None] * 3
    with adapters.engine(max_adapters=2) as engine:
        assert mixed_answers(engine, names) == [adapters.expected(name) for name in names]
        assert sum(info.on_device for info in engine.adapters.values()) == 2
        assert answer(engine, "all") == adapters.expected("all")
        assert answer(engine, "mlp") == adapters.expected("mlp")
        assert [name for name, info in engine.adapters.items() if info.on_device] == ["all", "mlp"]


def test_given_a_request_that_waits_for_a_place_then_it_can_be_cancelled_and_its_deadline_ends_it(
    adapters: Adapters,
) -> None:
    waiting: list[Generation] = []

    def submit_others(_: Chunk) -> None:  # in the engine's thread, so that the first request has the only place
        if not waiting:
            waiting.append(engine.submit(PROMPT, GREEDY, adapter="values"))
            waiting.append(engine.submit(PROMPT, GREEDY, adapter="mlp", deadline=0.0))
            waiting.append(engine.submit(PROMPT, GREEDY, adapter="all"))  # does not pass those who wait
            waiting[0].cancel()

    with adapters.engine(max_adapters=1) as engine:
        first = engine.submit(PROMPT, GREEDY, on_chunk=submit_others, adapter="all")
        assert first.result(60).token_ids == adapters.expected("all")
        ends = [generation.result(60) for generation in waiting]
        assert [end.finish_reason for end in ends] == ["cancelled", "deadline", "length"]
        assert [end.token_ids for end in ends] == [[], [], adapters.expected("all")]
        assert answer(engine, "values") == adapters.expected("values")


def test_given_an_engine_that_is_closed_then_requests_that_wait_for_a_place_end(adapters: Adapters) -> None:
    waiting: list[Generation] = []
    is_waiting = threading.Event()

    def submit_another(_: Chunk) -> None:
        waiting.append(engine.submit(PROMPT, GREEDY, adapter="values"))
        is_waiting.set()
        engine._thread._inbox.closed.wait(60)

    engine = adapters.engine(max_adapters=1)
    engine.submit(PROMPT, GREEDY, on_chunk=submit_another, adapter="all")
    assert is_waiting.wait(60)
    engine.close()
    with pytest.raises(SequenceStateError):
        waiting[0].result(60)


def test_given_little_memory_then_preempted_requests_go_on_with_their_adapter(adapters: Adapters) -> None:
    names = ["all", "values", None, "wide"]
    prompts = [random_prompt(30, seed=seed).tolist() for seed in range(4)]
    with adapters.engine(kv_blocks=9) as engine:
        running = [engine.submit(p, GREEDY, adapter=name) for p, name in zip(prompts, names, strict=True)]
        answers = [generation.result(60).token_ids for generation in running]
        assert engine.stats().scheduler.preemptions > 0
    assert answers == [adapters.expected(name, p) for p, name in zip(prompts, names, strict=True)]


def test_given_samples_and_forks_then_they_have_the_adapter_of_their_request(adapters: Adapters) -> None:
    with adapters.engine() as engine:
        both = engine.generate([PROMPT], SamplingParams(max_new_tokens=12, ignore_eos=True, n=2), adapter="all")[0]
        assert [sample.token_ids for sample in both.samples] == [adapters.expected("all")] * 2
        parent = engine.submit(PROMPT, SamplingParams(max_new_tokens=4, ignore_eos=True), adapter="wide")
        parent.result(60)
        forked = engine.fork(parent, SamplingParams(max_new_tokens=8, ignore_eos=True))
        assert forked.adapter == "wide"
        assert parent.result(60).token_ids + forked.result(60).token_ids == adapters.expected("wide")


@pytest.mark.slow
def test_given_graphs_then_a_mixed_batch_runs_from_them_also_after_another_adapter_was_loaded(
    adapters: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = adapters.engine(adapters={"values": adapters.paths["values"]})
    recorder = FakeRecorder()
    runner = graph_runner(
        engine,
        adapters=engine._loop.runner.adapters,
        max_sequences=LIMITS.max_sequences,
        max_tokens=LIMITS.max_tokens_per_step,
        recorder=recorder,
    )
    runner.warm_up()
    while runner.captures_more:
        runner.capture_next()
    engine._loop.runner = runner
    monkeypatch.setattr(runner, "_run", None)  # nothing runs as it is
    records = 0
    record = recorder.record

    def counted(step: Any) -> Any:
        nonlocal records
        records += 1
        return record(step)

    monkeypatch.setattr(recorder, "record", counted)
    with engine:
        assert mixed_answers(engine, [None, "values"]) == [adapters.expected(n) for n in (None, "values")]
        assert records == 0
        other = adapters.paths["values"].with_name("other values")
        write_adapter(other, adapters.model, ("q_proj", "v_proj"), rank=3, seed=9)
        adapters.paths.setdefault("other values", other)
        engine.load_adapter("other values", other)
        assert mixed_answers(engine, ["other values", None, "values"], PROMPT[1:]) == [
            adapters.expected(n, PROMPT[1:]) for n in ("other values", None, "values")
        ]
        assert records == 0  # the slots are there, so no graph was captured again
        engine.load_adapter("wide", adapters.paths["wide"])
        assert mixed_answers(engine, ["wide", None, "values"]) == [
            adapters.expected(n) for n in ("wide", None, "values")
        ]
        assert records > 0
    del adapters.paths["other values"]


def test_given_an_adapter_in_use_then_it_can_be_unloaded_and_replaced_only_afterwards(adapters: Adapters) -> None:
    refusals: list[str] = []

    def replace(name: str) -> None:
        engine.load_adapter(name, adapters.paths["wide"])

    def unload(_: Chunk) -> None:  # in the engine's thread, while the request runs
        for call in () if refusals else (engine.unload_adapter, replace):
            with pytest.raises(SequenceStateError) as refused:
                call("all")
            refusals.append(str(refused.value))

    with adapters.engine() as engine:
        running = engine.submit(PROMPT, SamplingParams(max_new_tokens=2), on_chunk=unload, adapter="all")
        assert running.result(60).token_ids == adapters.expected("all")[:2]
        assert refusals == [
            f"adapter 'all' cannot be {what}: 1 requests use it; wait for them or cancel them"
            for what in ("unloaded", "replaced")
        ]
        engine.load_adapter("all", adapters.paths["wide"])
        assert answer(engine, "all") == adapters.expected("wide")
        engine.unload_adapter("all")
        with pytest.raises(InvalidArgumentError, match="there is no adapter 'all'; loaded: values, wide, mlp"):
            answer(engine, "all")


def test_given_one_place_and_a_request_that_can_never_run_then_the_next_adapter_gets_the_place(
    adapters: Adapters,
) -> None:
    with adapters.engine(kv_blocks=8, max_adapters=1) as engine:
        with pytest.raises(NeverFitsError):
            engine.submit(PROMPT * 40, SamplingParams(max_new_tokens=2), adapter="all").result(60)
        short = engine.submit(PROMPT, SamplingParams(max_new_tokens=2), adapter="values")
        assert short.result(60).token_ids == adapters.expected("values")[:2]


def test_given_files_that_changed_since_they_were_loaded_then_requests_fail_instead_of_answering_wrongly(
    adapters: Adapters, tmp_path: Path
) -> None:
    mine = write_adapter(tmp_path / "mine", adapters.model, seed=7)
    with adapters.engine(max_adapters=1, adapters={"all": adapters.paths["all"], "mine": mine}) as engine:
        write_adapter(mine, adapters.model, seed=8)
        with pytest.raises(ConfigError, match="has changed since it was loaded"):
            answer(engine, "mine")
        engine.load_adapter("mine", mine)
        assert answer(engine, "mine") != adapters.expected("all")


def test_given_a_scope_that_names_an_adapter_then_it_is_refused(adapters: Adapters) -> None:
    with (
        adapters.engine() as engine,
        pytest.raises(InvalidArgumentError, match="the engine sets that itself, so write adapter=NAME"),
    ):
        engine.generate([PROMPT], GREEDY, scope=ReuseScope(adapter="all"))


def test_given_two_engines_on_one_model_then_adapters_of_one_are_not_in_the_other(adapters: Adapters) -> None:
    with adapters.engine() as engine, Engine(engine.model, kv_blocks=64) as other:
        assert answer(engine, "all") == adapters.expected("all")
        assert answer(other, None) == adapters.expected(None)
        with pytest.raises(InvalidArgumentError, match="there is no adapter 'all'; loaded: none"):
            answer(other, "all")


def test_given_a_closed_engine_then_the_model_has_no_hooks_left(adapters: Adapters) -> None:
    with adapters.engine() as engine:
        model = engine._loop.runner.model
        assert any(module._forward_hooks for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


def test_given_wrong_adapters_then_the_error_names_what_is_wrong(adapters: Adapters, tmp_path: Path) -> None:
    with adapters.engine(adapters=None) as engine:
        head = write_adapter(tmp_path / "head", adapters.model, ("lm_head",))
        with pytest.raises(InvalidArgumentError, match="targets lm_head, a Linear for the logits"):
            engine.load_adapter("a", head)
        other = write_adapter(tmp_path / "other", tiny_model("llama", intermediate_size=128), ("up_proj",))
        with pytest.raises(InvalidArgumentError, match="is for 64 inputs and 128 outputs; the model has 64 and 96"):
            engine.load_adapter("a", other)
        named = write_adapter(tmp_path / "named", tiny_model("gpt2"), ("c_attn",))
        with pytest.raises(InvalidArgumentError, match=r"targets transformer.h.0.attn.c_attn, which LlamaForCausalLM"):
            engine.load_adapter("a", named)
        with pytest.raises(InvalidArgumentError, match="the name of an adapter must be a text"):
            engine.load_adapter("", head)
        assert engine.adapters == {}
    with pytest.raises(ConfigError, match="compile=True with adapters"):
        adapters.engine(compile=True)


def test_given_layers_that_see_only_some_tokens_then_an_adapter_for_them_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    path = write_adapter(tmp_path, model, ("up_proj",))
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: torch.cat([forward(x[:, :1]), forward(x[:, 1:])], 1) if x.shape[1] > 1 else forward(x)
    with Engine(model, kv_blocks=16) as engine:
        with pytest.raises(Exception, match=r"layers.1.mlp.up_proj, which does not compute every token"):
            engine.load_adapter("a", path)
        assert engine.adapters == {}
        assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.quick("llava")
@pytest.mark.parametrize("family", ["llava", "idefics3"])
def test_given_an_adapter_that_names_the_vision_tower_too_then_its_language_part_is_served_if_asked_for(
    family: str, tmp_path: Path
) -> None:
    model = vision_model(family)
    both = write_adapter(tmp_path / "both", model, ("q_proj", "v_proj"))
    language = write_adapter(tmp_path / "language", model, ("q_proj", "v_proj"))
    tensors = load_file(language / "adapter_model.safetensors")
    kept = {key: tensor for key, tensor in tensors.items() if "vision" not in key}
    assert 0 < len(kept) < len(tensors)
    save_file(kept, language / "adapter_model.safetensors")
    given = prompt(family, [5, 6, 7], 1, [8, 9])
    options: dict[str, Any] = {"kv_blocks": 64, "model_defaults": False}
    with Engine(model, **options) as engine:
        with pytest.raises(UnsupportedModelError, match=r"vision.*; language_adapters=True leaves such targets out"):
            engine.load_adapter("a", both)
        engine.load_adapter("language", language)
        wanted = engine.adapters["language"].id
    with Engine(model, **options, adapters={"a": both}, language_adapters=True, max_adapters=1) as engine:
        assert engine.adapters["a"].id == wanted
        engine.load_adapter("other", write_adapter(tmp_path / "other", model, ("q_proj", "v_proj"), seed=5))
        for name in ("a", "other", "a"):  # which is read again
            answered = engine.generate([given], GREEDY, adapter=name)[0].token_ids
        assert answered == own_answer(merged(model, language), given, 12) != own_answer(model, given, 12)
        foreign = write_adapter(tmp_path / "foreign", tiny_model("gpt2"), ("c_attn",))
        with pytest.raises(InvalidArgumentError, match=r"targets transformer.h.0.attn.c_attn, which"):
            engine.load_adapter("foreign", foreign)
        tower = write_adapter(tmp_path / "tower", model, ("fc1",))
        with pytest.raises(InvalidArgumentError, match="adds nothing to the language part"):
            engine.load_adapter("tower", tower)


def test_given_a_model_of_one_part_then_its_language_part_is_all_of_it(adapters: Adapters) -> None:
    with adapters.engine(language_adapters=True) as engine:
        assert answer(engine, "all") == adapters.expected("all")
        head = write_adapter(adapters.paths["all"].parent / "head", adapters.model, ("lm_head",))
        with pytest.raises(InvalidArgumentError, match="targets lm_head, a Linear for the logits"):
            engine.load_adapter("a", head)
