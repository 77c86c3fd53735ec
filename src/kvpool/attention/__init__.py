"""Attention over paged memory: one interface, backends for CPUs and NVIDIA GPUs."""

from __future__ import annotations

from kvpool.attention.attention_batch import KeyRanges, PagedBatch
from kvpool.attention.backend import AttentionBackend, AttentionPlan, PlanBuffers
from kvpool.attention.registry import available_backends, create_backend, register_backend
from kvpool.kernels.attention_spec import AttentionSpec

__all__ = [
    "AttentionBackend",
    "AttentionPlan",
    "AttentionSpec",
    "KeyRanges",
    "PagedBatch",
    "PlanBuffers",
    "available_backends",
    "create_backend",
    "register_backend",
]
