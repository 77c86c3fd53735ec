"""Encoder-decoder models behind the server: a prompt is what the encoder reads."""

from __future__ import annotations

import torch
from encoder_models import encoder_model, own_answer
from live import Live, openai_client, word_tokenizer

from kvpool.engine import Engine
from kvpool.server import ServedModel, create_app


def test_given_a_model_with_an_encoder_then_completions_are_those_of_transformers() -> None:
    model = encoder_model("t5")
    tokens = torch.randint(3, 119, (23,), generator=torch.Generator().manual_seed(4)).tolist()
    expected = own_answer(model, {"input_ids": torch.tensor([tokens])}, 6, eos_token_id=120)
    assert 0 not in expected  # which has no text
    text = " ".join(f"w{token}" for token in tokens)

    with Engine(model, tokenizer=word_tokenizer(), device="cpu", kv_blocks=64, block_size=4) as engine:
        live = Live(create_app([ServedModel("t5", engine)]))
        try:
            with openai_client(live) as client:
                asked = {"model": "t5", "prompt": text, "max_tokens": 6, "extra_body": {"ignore_eos": True}}
                whole = client.completions.create(**asked)
                parts = client.completions.create(**asked, stream=True)
                streamed = "".join(part.choices[0].text for part in parts if part.choices)
        finally:
            live.stop()
    assert [int(word[1:]) for word in whole.choices[0].text.split()] == expected
    assert streamed == whole.choices[0].text
    assert whole.usage.prompt_tokens == len(tokens) + 1  # and the one that the decoder begins with
