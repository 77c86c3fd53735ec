"""The torch backend computes what the float64 reference says, for every feature, stored type and shape of a batch."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from paged_cases import Case, feature_cases, shape_cases

from kvpool.attention import create_backend

CASES = feature_cases() + shape_cases()


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_given_a_poisoned_store_then_the_output_is_that_of_the_reference(case: Case) -> None:
    built = case.build()

    built.check(built.run(create_backend("torch", "cpu")))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_given_a_poisoned_store_on_a_gpu_then_the_output_is_that_of_the_reference(case: Case) -> None:
    built = case.build("cuda")

    built.check(built.run(create_backend("torch", "cuda")))


def test_given_no_output_tensor_then_a_new_one_holds_the_same() -> None:
    built = Case("mixed", CASES[0].spec).build()
    backend = create_backend("torch", "cpu")
    plan = backend.plan(built.case.spec, built.batch)

    assert torch.equal(backend.run(built.q, built.cache, plan), built.run(backend))


def test_given_one_plan_when_it_is_used_for_many_layers_then_each_gets_its_own_answer() -> None:
    first, second = Case("first", CASES[0].spec, seed=1).build(), Case("second", CASES[0].spec, seed=1).build()
    second.cache["k"].data.mul_(0.5)  # another layer: other bytes under the same block table
    backend = create_backend("torch", "cpu")
    plan = backend.plan(first.case.spec, first.batch)

    first.check(backend.run(first.q, first.cache, plan))
    second.check(backend.run(second.q * 2, second.cache, plan))
    first.check(backend.run(first.q, first.cache, plan))
