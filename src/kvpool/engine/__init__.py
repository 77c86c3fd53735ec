"""Runs Hugging Face causal language models on the cache. Needs torch and transformers (`pip install '.[hf]'`)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpool.engine.adapters import AdapterInfo
    from kvpool.engine.beams import Beam, beam_search
    from kvpool.engine.engine import Engine
    from kvpool.engine.engine_stats import EngineStats, WaitingRequest
    from kvpool.engine.generation import Chunk, Completion, Generation, Sample
    from kvpool.engine.grammar import Grammar, GrammarState
    from kvpool.engine.graphs import CaptureReport
    from kvpool.engine.handover import Prefill, PrefillResult
    from kvpool.engine.params import SamplingParams
    from kvpool.engine.pictures import EncoderStats, PicturedPrompt
    from kvpool.engine.scoring import TokenLogprob
    from kvpool.tiers.transport.tier_transport import TieringStats

# Where each public name lives: torch and transformers are imported when one of them is used, not before.
_HOMES = {
    "Engine": ".engine",
    "EngineStats": ".engine_stats",
    "SamplingParams": ".params",
    "Generation": ".generation",
    "Completion": ".generation",
    "Sample": ".generation",
    "Chunk": ".generation",
    "TokenLogprob": ".scoring",
    "Grammar": ".grammar",
    "GrammarState": ".grammar",
    "Prefill": ".handover",
    "PrefillResult": ".handover",
    "WaitingRequest": ".engine_stats",
    "TieringStats": "kvpool.tiers.transport.tier_transport",
    "CaptureReport": ".graphs",
    "AdapterInfo": ".adapters",
    "PicturedPrompt": ".pictures",
    "EncoderStats": ".pictures",
    "beam_search": ".beams",
    "Beam": ".beams",
}

__all__ = [
    "Engine",
    "EngineStats",
    "SamplingParams",
    "Generation",
    "Completion",
    "Sample",
    "Chunk",
    "TokenLogprob",
    "Grammar",
    "GrammarState",
    "Prefill",
    "PrefillResult",
    "WaitingRequest",
    "TieringStats",
    "CaptureReport",
    "AdapterInfo",
    "PicturedPrompt",
    "EncoderStats",
    "beam_search",
    "Beam",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
