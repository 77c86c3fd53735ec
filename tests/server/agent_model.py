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


def agent_tokenizer() -> Any:
    """Reads and writes letters."""
    tokenizer = letters_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def agent_model(**settings: Any) -> Any:
    """Random weights and a long context."""
    return tiny_model("llama", max_position_embeddings=1 << 17, **settings)


def save_agent(directory: Path) -> None:
    """Both as files, for a server of its own process."""
    agent_tokenizer().save_pretrained(directory)
    agent_model().save_pretrained(directory)
