"""Indexers hand their choice to attention; what does something else with its keys is refused, and stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from models import CHOSEN, random_prompt, tiny_model

from kvpool.errors import UnsupportedModelError
from kvpool.kernels.sparse import Choice
from kvpool.model.hook import use_kvpool_attention
from kvpool.model.indexers import indexers, own_indexers
from kvpool.model.positions import use_positions
from kvpool.model.probing import inspect_model, run_probe

FAMILIES = ["deepseek_v32", "glm_moe_dsa"]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_gets_the_choice_of_the_last_indexer_before_it(family: str) -> None:
    model = tiny_model(family)
    use_kvpool_attention(model)
    use_positions(model)
    first, second = (call.choice for call in run_probe(model)[1])
    assert isinstance(first, Choice)
    assert (first.layer, first.most, first.q.shape, first.k.shape, first.weights.shape) == (
        *(0, CHOSEN),
        *((3, 16, 16), (3, 1, 16), (3, 16)),
    )
    assert (second is first) == (family == "glm_moe_dsa")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_choice_ranks_keys_as_the_indexer_itself(family: str) -> None:
    """Its own forward chooses among its own keys, by a mask that lets the last token see all."""
    model = tiny_model(family)
    (module, *_) = indexers(model)
    hidden, residual = torch.randn(1, 20, 64), torch.randn(1, 20, module.q_lora_rank)
    positions = model.model.rotary_emb(hidden, torch.arange(20).unsqueeze(0))
    mask = torch.ones(1, 20, 20, dtype=torch.bool).tril()
    given = (hidden, residual, positions, mask, None)
    wanted = module(*given)[0, -1]
    use_kvpool_attention(model)
    choice = module(*given)
    scores = (choice.q[-1] @ choice.k[:, 0].T).relu().T @ choice.weights[-1]
    assert scores.topk(CHOSEN).indices.tolist() == wanted.tolist()


def _otherwise(change: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """An indexer's forward that does something else with its keys."""

    def forward(self: Any, hidden: Any, residual: Any, *rest: Any, past_key_values: Any = None, **_: Any) -> Any:
        queries = self.wq_b(residual).view(1, -1, self.n_heads, self.head_dim)
        keys = self.wk(hidden)
        if past_key_values is not None:
            keys = past_key_values.update_indexer(keys, self.layer_idx)
        return change(queries, keys)

    return forward


def _weighed(scores: Any) -> Any:
    return torch.matmul(torch.ones(1, 3, 1, 16), scores)


OTHERWISE = {
    "products with keys may be negative": lambda q, k: _weighed(torch.matmul(q, k.transpose(-1, -2).unsqueeze(1))),
    "scores are multiplied by -1.0": lambda q, k: torch.matmul(q, k.transpose(-1, -2).unsqueeze(1)) * -1.0,
    "it calls softmax for keys": lambda q, k: torch.softmax(torch.matmul(q, k.unsqueeze(1)), -1),
    "no attribute": lambda q, k: k.view(1, -1, 4, 16),
    "not subscriptable": lambda q, k: k[:, ::4],
    "something else with them than scoring each": lambda q, k: torch.zeros(1, 3, CHOSEN, dtype=torch.int32),
}


@pytest.mark.parametrize("reason", OTHERWISE)
def test_an_indexer_that_scores_otherwise_is_refused_and_stays_as_it_was(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("deepseek_v32")
    monkeypatch.setattr(type(indexers(model)[0]), "forward", _otherwise(OTHERWISE[reason]))
    with pytest.raises(UnsupportedModelError, match=f"form that kvpool does not know: .*{reason}"):
        inspect_model(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_an_indexer_without_a_number_of_tokens_is_refused() -> None:
    model = tiny_model("deepseek_v32")
    for module in indexers(model):
        del module.index_topk
    with pytest.raises(UnsupportedModelError, match="it names no index_topk"):
        inspect_model(model)


def test_an_indexer_whose_choice_is_ignored_fails_the_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts of the self-check are longer than what is chosen."""
    model = tiny_model("deepseek_v32")
    attention = type(model.model.layers[0].self_attn)
    own = attention.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.indexer.index_topk = 512 if self.config._attn_implementation == "eager" else CHOSEN
        return own(self, *args, **kwargs)

    monkeypatch.setattr(attention, "forward", forward)
    with pytest.raises(UnsupportedModelError, match="fails the self-check"):
        inspect_model(model)


def test_an_indexer_that_was_handed_over_is_the_models_own_under_other_attention() -> None:
    model, prompt = tiny_model("deepseek_v32"), random_prompt(30)[None]
    before = model(prompt, use_cache=False).logits
    inspect_model(model)
    model.set_attn_implementation("eager")
    assert torch.equal(model(prompt, use_cache=False).logits, before)
    own_indexers(model)
    assert not any("forward" in vars(module) for module in indexers(model))
