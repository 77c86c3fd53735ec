"""How steps call a model, whatever it is: with pictures, or with layers that keep a state."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from kvpool.model.hook import Attend, attending
from kvpool.model.positions import placed
from kvpool.model.state_steps import StateStep, keeping_states
from kvpool.model.vision import Shown, deep_features, embedded


@torch.no_grad()
def forward(
    model: Any,
    input_ids: Tensor,
    positions: Tensor,
    keep: Tensor | None,
    attend: Attend,
    states: StateStep | None = None,
    shown: Shown | None = None,
) -> Tensor:
    """Logits [row of `keep`, vocabulary] of one flattened step.

    `input_ids` and `positions` [token] may belong to any number of sequences, in any order. Only two things mix tokens:
    attention, which `attend` computes, and modules that keep a state, for which `states` says where each sequence begins.
    `keep` lists the tokens whose logits are wanted; None: all. `positions` are [axis, token] where a model has several for
    each token. `shown` are pictures behind placeholder tokens. Nothing waits for the device.
    """
    tokens = {"input_ids": input_ids.unsqueeze(0)}
    if shown is not None:
        tokens = {"inputs_embeds": embedded(model, input_ids, shown).unsqueeze(0)}
    with (
        attending(attend),
        placed(positions),
        nullcontext() if states is None else keeping_states(states),
        deep_features(model, len(input_ids), shown),
    ):
        output = model(
            **tokens,
            position_ids=positions.unsqueeze(-2),
            use_cache=False,
            logits_to_keep=0 if keep is None else keep,
        )
    logits: Tensor = output.logits[0]
    return logits
