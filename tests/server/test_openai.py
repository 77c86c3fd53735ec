"""OpenAI's own client against a real server."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest
import torch
from models import tiny_model

PROMPT = "w5 w6 w7 w8 w9 w10 w11 w12 w13"
MESSAGES = [{"role": "user", "content": PROMPT}]


def told(engine: Any, tokens: Any, **params: Any) -> str:
    """What the engine itself answers."""
    from kvpool.engine import SamplingParams

    (result,) = engine.generate([tokens], SamplingParams(**params))
    return str(result.text)


def test_given_a_prompt_then_the_completion_is_the_engines(client: Any, engine: Any) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=6, temperature=0)
    assert answer.choices[0].text == told(engine, PROMPT, max_new_tokens=6, temperature=0)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (9, 6, 15)
    assert answer.model == "tiny"


def test_given_a_conversation_then_the_answer_is_the_engines(client: Any, engine: Any) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=5, temperature=0)
    tokens = engine.chat_prompt(MESSAGES)
    assert answer.choices[0].message.content == told(engine, tokens, max_new_tokens=5, temperature=0)
    assert answer.choices[0].message.role == "assistant"


def test_given_a_repeated_prompt_then_usage_says_what_was_cached(client: Any) -> None:
    first = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2)
    second = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == 8


@pytest.mark.parametrize("n", [1, 3])
def test_given_a_stream_then_its_parts_are_the_whole_answer(client: Any, n: int) -> None:
    wanted = dict(model="tiny", messages=MESSAGES, max_completion_tokens=6, temperature=1, seed=3, n=n)
    whole = client.chat.completions.create(**wanted)
    texts, finishes, usage = [""] * n, [None] * n, None
    for part in client.chat.completions.create(**wanted, stream=True, stream_options={"include_usage": True}):
        usage = part.usage or usage
        for choice in part.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert finishes == ["length"] * n
    assert usage is not None
    assert usage.completion_tokens == 6 * n


def test_given_several_prompts_then_each_has_its_samples_in_order(client: Any) -> None:
    wanted = dict(model="tiny", max_tokens=3, temperature=0)
    alone = [client.completions.create(prompt=prompt, **wanted).choices[0].text for prompt in ("w5 w6", "w7 w8")]
    together = client.completions.create(prompt=["w5 w6", "w7 w8"], n=2, **wanted)
    assert [choice.text for choice in together.choices] == [alone[0], alone[0], alone[1], alone[1]]
    streamed = [""] * 4
    for part in client.completions.create(prompt=["w5 w6", "w7 w8"], n=2, stream=True, **wanted):
        for choice in part.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in together.choices]


def test_given_token_ids_then_they_are_the_prompt(client: Any) -> None:
    by_ids = client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=3, temperature=0)
    by_text = client.completions.create(model="tiny", prompt="w5 w6 w7", max_tokens=3, temperature=0)
    assert by_ids.choices[0].text == by_text.choices[0].text


def test_given_echo_then_the_prompt_comes_first(client: Any) -> None:
    plain = client.completions.create(model="tiny", prompt="w5 w6", max_tokens=2, temperature=0).choices[0].text
    echoed = client.completions.create(model="tiny", prompt="w5 w6", max_tokens=2, temperature=0, echo=True)
    assert echoed.choices[0].text == "w5 w6" + plain


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_given_echo_and_logprobs_then_the_prompt_has_its_own_whatever_is_cached(
    client: Any, engine: Any, max_tokens: int
) -> None:
    prompt = " ".join(f"w{number}" for number in range(20, 41))
    asked = dict(model="tiny", prompt=prompt, max_tokens=max_tokens, temperature=0, echo=True, logprobs=2)
    client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
    whole = client.completions.create(**asked)
    choice = whole.choices[0]
    told = choice.logprobs
    assert whole.usage.prompt_tokens_details.cached_tokens == 0, "what is cached has no logits"
    assert whole.usage.completion_tokens == max_tokens
    assert choice.finish_reason == "length"
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == 21 + max_tokens
    assert (told.token_logprobs[0], told.top_logprobs[0]) == (None, None)
    ids = engine.tokenizer(prompt)["input_ids"]
    with torch.no_grad():
        wanted = tiny_model("llama")(torch.tensor([ids])).logits[0].log_softmax(-1)
    own = [float(wanted[at, token]) for at, token in enumerate(ids[1:])]
    assert told.token_logprobs[1:21] == pytest.approx(own, abs=1e-3)
    for token, offset in zip(told.tokens, told.text_offset, strict=True):
        assert choice.text[offset:].lstrip().startswith(token)
    parts = [part.choices[0] for part in client.completions.create(**asked, stream=True)]
    assert "".join(part.text for part in parts) == choice.text
    assert [at for part in parts if part.logprobs for at in part.logprobs.text_offset] == told.text_offset
    assert parts[-1].finish_reason == "length"


def test_given_prompts_that_end_before_their_samples_begin_then_each_choice_has_the_number_of_its_prompt(
    client: Any,
) -> None:
    asked: dict[str, Any] = dict(model="tiny", prompt=["w1 w2", "w3"], n=2, extra_body={"deadline_ms": 1e-6})
    whole = client.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert {choice.finish_reason for choice in whole.choices} == {"length"}
    parts = list(client.completions.create(**asked, stream=True))
    assert sorted(part.choices[0].index for part in parts if part.choices[0].finish_reason) == [0, 1, 2, 3]


def test_given_logprobs_then_they_are_those_of_the_tokens(client: Any) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 3
    for entry in content:
        assert len(entry.top_logprobs) == 2
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy
        assert entry.token == entry.top_logprobs[0].token
        assert -math.inf < entry.logprob <= 0
    plain = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2, temperature=0, logprobs=1)
    assert len(plain.choices[0].logprobs.tokens) == 2


def test_given_a_bias_and_a_stop_then_both_are_followed(client: Any) -> None:
    wanted = dict(model="tiny", prompt=PROMPT, max_tokens=4, temperature=0, logit_bias={"42": 100})
    assert client.completions.create(**wanted).choices[0].text.split() == ["w42"] * 4
    stopped = client.completions.create(**wanted, stop=["w42"])
    assert (stopped.choices[0].text.strip(), stopped.choices[0].finish_reason) == ("", "stop")


def test_given_tools_then_the_template_sees_them(client: Any) -> None:
    tools = [{"type": "function", "function": {"name": "w33", "parameters": {}}}]
    plain = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=1)
    with_tools = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=1, tools=tools)
    assert with_tools.usage.prompt_tokens == plain.usage.prompt_tokens + 1


def test_given_parts_of_text_then_they_are_joined_and_images_are_refused(client: Any) -> None:
    parts = [{"type": "text", "text": "w5 "}, {"type": "text", "text": "w6"}]
    joined = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": parts}], max_completion_tokens=2, temperature=0
    )
    plain = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "w5 w6"}], max_completion_tokens=2, temperature=0
    )
    assert joined.choices[0].message.content == plain.choices[0].message.content
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(openai.BadRequestError, match="text only"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": image}])


def test_given_the_list_of_models_then_it_names_them(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (dict(temperature=-1), "temperature"),
        (dict(n=0), "n:"),
        (dict(n=17), "n=17 is over"),
        (dict(max_tokens=-1), "max_tokens"),
        (dict(logit_bias={"9999": 1}), "logit_bias names token 9999"),
        (dict(logit_bias={"no": 1}), "logit_bias"),
        (dict(prompt=""), "prompt: String should have at least 1 character"),
        (dict(prompt=[]), "List should have at least 1 item"),
        (dict(prompt=[5, "w5"]), "prompt.1: Input should be a valid integer"),
        (dict(prompt=["w5"] * 257), "257 prompts are over this server's limit of 256"),
        (dict(max_tokens="5"), "max_tokens: Input should be a valid integer"),
        (dict(echo="yes"), "echo: Input should be a valid boolean"),
        (dict(prompt=[999]), "the vocabulary has 160"),
        (dict(stop=[""]), "stop"),
        (dict(suffix="w1"), "suffix is not supported"),
        (dict(extra_body={"foo_bar": 1}), "foo_bar: this server has no such field"),
        (
            dict(extra_body={"guided_json": {}}),
            "guided_json: this server has no such field or cannot do what it asks for: use structured_outputs",
        ),
        (
            dict(extra_body={"include_stop_str_in_output": 0}),
            "include_stop_str_in_output: Input should be a valid boolean",
        ),
        (dict(extra_body={"structured_outputs": {"json_object": 1}}), "json_object: Input should be a valid boolean"),
        (dict(extra_body={"min_tokens": 17}), "min_tokens=17 is over the 16 tokens that the answer may have; lower it"),
        (dict(best_of=2), "best_of: Input should be less than or equal to 1"),
        (dict(extra_body={"retention": [{"pin": True, "tll_seconds": 5}]}), "retention.0.tll_seconds: this server"),
    ],
)
def test_given_a_wrong_field_then_it_is_named(client: Any, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**(dict(model="tiny", prompt=PROMPT) | wrong))
    assert words in refused.value.message
    assert refused.value.type == "invalid_request_error"


def test_given_more_min_tokens_than_the_answer_may_have_then_the_field_is_named_for_programs(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt=PROMPT, extra_body={"min_tokens": 17})
    assert (refused.value.param, refused.value.code) == ("min_tokens", "invalid_value")


def test_given_null_then_a_field_is_as_if_it_were_not_there(client: Any) -> None:
    nothing = dict.fromkeys(
        ("max_tokens", "n", "stream", "echo", "presence_penalty", "logit_bias", "cache_salt", "stop")
    )
    answer = client.completions.create(model="tiny", prompt=PROMPT, extra_body={**nothing, "seed": 3.0})
    assert (answer.usage.completion_tokens, len(answer.choices)) == (16, 1)


def test_given_labels_and_values_that_ask_for_nothing_then_they_are_taken(client: Any) -> None:
    answer = client.chat.completions.create(
        **dict(model="tiny", messages=MESSAGES, max_completion_tokens=1, user="u", metadata={"a": "b"}, store=False),
        **dict(service_tier="auto", prompt_cache_key="k", modalities=["text"], verbosity="medium"),
        extra_body={"min_tokens": 0, "length_penalty": 1, "best_of": 1},
    )
    assert answer.usage.completion_tokens == 1


def test_given_min_tokens_then_no_stop_ends_the_answer_before(client: Any) -> None:
    wanted = dict(model="tiny", prompt=PROMPT, max_tokens=8)
    text = client.completions.create(**wanted, extra_body={"ignore_eos": True}).choices[0].text
    stop = {"stop": [text.split()[1]], "ignore_eos": True}
    short, long = (
        client.completions.create(**wanted, extra_body=stop | {"min_tokens": fewest}).usage.completion_tokens
        for fewest in (0, 5)
    )
    assert short == 2
    assert long >= 5


def test_given_an_unknown_model_then_the_answer_names_those_that_are_there(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="served: tiny"):
        client.completions.create(model="huge", prompt=PROMPT)


def test_given_a_prompt_that_never_fits_then_it_is_refused_also_in_a_stream(client: Any) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="tiny", prompt=[5] * 600, stream=stream)
        assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_given_texts_then_their_embeddings_are_the_models_own(client: Any, pooling: str) -> None:
    texts = ["w5 w6 w7 w8 w9", "w5 w6"]
    more = {"extra_body": {"pooling": pooling}}
    found = client.embeddings.create(model="tiny", input=texts, **more)
    assert found.usage.prompt_tokens == 7
    assert [each.index for each in found.data] == [0, 1]
    model = tiny_model("llama")
    for words, each in zip(texts, found.data, strict=True):
        ids = torch.tensor([[int(word[1:]) for word in words.split()]])
        with torch.no_grad():
            hidden = model(ids, output_hidden_states=True).hidden_states[-1][0]
        wanted = hidden[-1] if pooling == "last" else hidden.mean(0)
        assert each.embedding == pytest.approx((wanted / wanted.norm()).tolist(), abs=1e-3)
    by_ids = client.embeddings.create(model="tiny", input=[5, 6], encoding_format="float", **more)
    assert by_ids.data[0].embedding == pytest.approx(found.data[1].embedding, abs=1e-5)


def test_given_a_wrong_length_of_vectors_then_it_is_refused(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="are not cut to 3"):
        client.embeddings.create(model="tiny", input="w5", dimensions=3)
