"""A request's body becomes sampling parameters and options of the engine."""

from __future__ import annotations

from typing import Any

from kvpool.engine.sampling.params import SamplingParams
from kvpool.errors import KVPoolError
from kvpool.server.asking.access import Caller
from kvpool.server.asking.limits import Limits
from kvpool.server.asking.problems import Problem, problem_of
from kvpool.server.asking.schema import Sampling
from kvpool.server.asking.served import scope_of


def sampling_params(body: Sampling, limits: Limits, max_new_tokens: int, logprobs: int | None) -> SamplingParams:
    """How the tokens of an answer are chosen."""
    if body.n > limits.samples:
        raise Problem(
            400, f"n={body.n} is over this server's limit of {limits.samples}", code="invalid_value", param="n"
        )
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    try:
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=0 if body.top_k == -1 else body.top_k,  # -1 is how others say that it is off
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
            seed=None if body.seed is None else body.seed % 2**63,
            stop=stop,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=body.ignore_eos,
            logprobs=logprobs,
            n=body.n,
        )
    except KVPoolError as error:
        raise problem_of(error) from error


def request_options(body: Sampling, caller: Caller) -> dict[str, Any]:
    """What the engine is told besides the prompt and the parameters."""
    return {
        "priority": body.priority,
        "scope": scope_of(caller.tenant, body.cache_salt),
        "session": None if body.session_id is None else session_name(caller, body.session_id),
        "deadline": None if body.deadline_ms is None else body.deadline_ms / 1e3,
    }


def session_name(caller: Caller, session_id: str) -> str:
    """A session's name among all tenants': one tenant cannot name, or end, a session of another."""
    return f"{len(caller.tenant)}:{caller.tenant}{session_id}"
