"""Needles from end to end: a model that finds them, served by kvpool, with faults that make it say other prompts' codes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from reader import reader, tokenizer
from served import reading

from kvpool.attention.attention_batch import PagedBatch
from kvpool.prove.checks import forgotten, unsaid
from kvpool.prove.endpoint import Answer, Endpoint
from kvpool.prove.prompts import Prompts
from kvpool.prove.prove_command import first_half
from kvpool.prove.trial import NOT_TESTED, RIGHT, WRONG, Plan, Trial

SMALL = Plan(
    num_probes=3,
    num_tokens=160,
    fill_seconds=math.inf,
    num_judged=100,
    num_new=4,
    noise_rounds=1,
    concurrency=2,
    crowds=1,
)
SMALL_SERVER: dict[str, Any] = dict(kv_blocks=40, cache={"host_blocks": 120})  # the device keeps three prompts of SMALL


@pytest.fixture(autouse=True)
def quiet(one_self_check: None) -> None:
    """The engine need not test itself before each test."""


def small(url: str, plan: Plan = SMALL) -> Trial:
    """Asks few short prompts."""
    endpoint = Endpoint(url)
    endpoint.negotiate()
    return Trial(endpoint, plan, seed=7)


def test_given_a_needle_anywhere_then_the_computed_weights_find_it() -> None:
    model, words, prompts = reader(), tokenizer(), Prompts(900, seed=3)
    probes = [prompts.probe((at + 0.5) / 4) for at in range(4)]
    for probe in probes:
        asked = words(probe.prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            said = model.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=12, do_sample=False)
        assert probe.is_found(Answer(words.decode(said[0, asked.shape[1] :])))


def test_given_a_model_that_reads_then_needles_and_the_control_are_right() -> None:
    with reading(**SMALL_SERVER) as live:
        trial = small(live.url)
        first_half(trial, [])
        forgotten(trial)
    verdicts = {check.name: check.verdict for check in trial.checks if not check.name.startswith("after other traffic")}
    assert trial.has_needles
    assert verdicts.pop("other adapters") == NOT_TESTED
    assert set(verdicts.values()) == {RIGHT}, trial.checks
    assert "asked for what was never said" in verdicts
    assert all(probe.is_found(trial.right[probe.name, None]) for probe in trial.probes)
    assert not trial.scale.is_blind


def test_given_pages_of_another_prompt_then_its_code_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    of, tables, confused = PagedBatch.of, list[np.ndarray[Any, Any]](), set[int]()

    def mixed(csr: Any, group: Any, query_lens: Any, kv_lens: Any) -> PagedBatch:
        """What begins with a hit reads the pages of the prompt that came before."""
        indices = csr.indices.copy()
        for at, (asked, whole) in enumerate(zip(query_lens, kv_lens, strict=True)):
            own = indices[csr.indptr[at] : csr.indptr[at + 1]]
            place = next((place for place, table in enumerate(tables) if table[0] == own[0]), len(tables))
            if place == len(tables):
                tables.append(own.copy())
            if 1 < asked < whole and place:
                confused.add(int(own[0]))
            if own[0] in confused:
                before = tables[place - 1][: len(own) - 3]
                own[: len(before)] = before
        return of(csr._replace(indices=indices), group, query_lens, kv_lens)

    with reading(**SMALL_SERVER) as live:
        trial = small(live.url, SMALL._replace(num_probes=2))
        trial.begin()
        trial.measure()
        trial.endpoint.reset()
        monkeypatch.setattr(PagedBatch, "of", mixed)
        for probe in trial.probes:
            trial.ask(probe)
        unsaid(trial)
        monkeypatch.undo()
    control = trial.checks[-1]
    assert (control.name, control.verdict) == ("asked for what was never said", WRONG)
    assert f"answered {trial.probes[0].code}, which only another prompt says" in str(control.wrong), control
