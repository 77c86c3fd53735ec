"""A tiny random model with a chat template that shows tools, calls and their results, as agents need it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from letters import letters_tokenizer
from models import tiny_model

TEMPLATE = """\
{%- if tools %}<s>system
{%- if messages[0].role == 'system' %} {{ messages[0].content }}{% endif %} <tools>
{%- for tool in tools %} {{ tool | tojson }}{% endfor %} </tools></s>
{%- elif messages[0].role == 'system' %}<s>system {{ messages[0].content }}</s>{% endif %}
{%- for m in messages %}{% if not (loop.first and m.role == 'system') %}<s>{{ m.role }} {{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}</s>
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<s>assistant {% endif %}"""
_ENDS = 0.1  # how likely each token of an answer is the last one
_STEADY = 8.0  # the first number of all embeddings: large, so that it is nearly the same behind all layers


def agent_tokenizer() -> Any:
    """Reads and writes letters."""
    tokenizer = letters_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def words_tokenizer(texts: list[str]) -> Any:
    """Reads and writes any text, with four thousand parts of words that are frequent in `texts`."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=4096, special_tokens=["<pad>", "<s>", "</s>"], initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", chat_template=TEMPLATE)


def agent_model(**settings: Any) -> Any:
    """Random weights and a long context."""
    return tiny_model("llama", max_position_embeddings=1 << 17, **settings)


def brief_model(tokenizer: Any) -> Any:
    """The same for a tokenizer, with answers of some ten tokens, whatever the prompt says."""
    import torch

    small = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = agent_model(vocab_size=len(tokenizer), spread=1.0, **small)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = _STEADY
        last = model.model(torch.tensor([[5, 6, 7]])).last_hidden_state[0, -1, 0]
        head = model.get_output_embeddings().weight
        head[:, 0] = 0
        head[tokenizer.eos_token_id, 0] = torch.log(torch.tensor(len(tokenizer) * _ENDS)) / last
    return model


def save_agent(directory: Path, tokenizer: Any | None = None, model: Any | None = None) -> None:
    """Both as files, for a server of its own process."""
    (tokenizer or agent_tokenizer()).save_pretrained(directory)
    (model or agent_model()).save_pretrained(directory)
