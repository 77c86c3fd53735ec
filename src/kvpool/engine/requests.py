"""Makes requests of prompts: checks token ids, parameters and hints before anything is queued."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import logging
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, NamedTuple

from kvpool.checks import as_flag, show
from kvpool.engine.generation import Chunk, Completion, Generation
from kvpool.engine.params import SamplingParams
from kvpool.engine.pictures import PicturedPrompt
from kvpool.engine.scoring import PromptScores
from kvpool.engine.text import Decoder
from kvpool.errors import InvalidArgumentError, KVPoolError
from kvpool.pools.arrays import Int32Array
from kvpool.scheduling import Request
from kvpool.scope import Retention, ReuseHint, ReuseScope, check_hint

TOOL_CALL_MARKS: Final = (
    "<tool_call",
    "<|tool_call",
    "<function=",
    "<function_call",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<|call|>",
    "<｜tool",
)
_CALL: Final = ReuseHint(stop="tool_calls")


class ToolCalls:
    """For `Request.hint`: called with the tokens of an answer, returns a hint if the answer calls a tool, else None.

    After a tool call, the conversation goes on as soon as the tool is done; eviction should know that. Models write calls in
    different forms. Either the answer contains a mark that only calls have, or all of it is JSON with a name and arguments.
    A wrong guess costs little: policies learn what follows such answers.
    """

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer

    def __call__(self, answer: Int32Array) -> ReuseHint | None:
        text = self._tokenizer.decode(answer.tolist(), skip_special_tokens=False)
        if any(mark in text for mark in TOOL_CALL_MARKS):
            return _CALL
        is_json = text.lstrip()[:1] in ("{", "[")
        return (
            _CALL if is_json and _are_calls(self._tokenizer.decode(answer.tolist(), skip_special_tokens=True)) else None
        )


def _are_calls(text: str) -> bool:
    """Whether a text is nothing but calls as JSON."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    calls = found if isinstance(found, list) else [found]
    return bool(calls) and all(
        isinstance(call, dict) and "name" in call and ("arguments" in call or "parameters" in call) for call in calls
    )


log = logging.getLogger("kvpool")


class NewRequest(NamedTuple):
    """One request as its caller sees it, and as the scheduler does."""

    generation: Generation
    request: Request


class Withheld(NamedTuple):
    """A logits processor: it forbids some tokens as long as fewer than `num_before` precede."""

    tokens: Sequence[int]
    num_before: int

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if input_ids.shape[1] < self.num_before:
            scores[:, list(self.tokens)] = -math.inf
        return scores


@dataclass
class RequestMaker:
    """Makes the requests of one engine."""

    tokenizer: Any
    scope_of: Callable[[str | None, ReuseScope | None], ReuseScope]  # with the adapter of a request
    vocab_size: int
    longest: int | None  # tokens of a prompt and its answer that the context and the memory hold
    defaults: SamplingParams
    eos_ids: frozenset[int]
    clock: Callable[[], float]
    cancel: Callable[[Generation], None]
    not_first: Sequence[int] = ()  # tokens that no answer begins with
    _ids: Any = field(default_factory=itertools.count)

    def make(
        self,
        prompt: PicturedPrompt,
        params: SamplingParams,
        on_chunk: Callable[[Chunk], None] | None = None,
        on_end: Callable[[], None] | None = None,
        *,
        priority: int = 0,
        adapter: str | None = None,
        scope: ReuseScope | None = None,
        deadline: float | None = None,
        session: str | None = None,
        retention: Retention | None = None,
        hint: ReuseHint | None = None,
        offers_tools: bool = False,
        private: bool = False,
        begins: int | None = None,
    ) -> NewRequest:
        """A request for all tokens that follow a prompt; the options are those of `Engine.submit`.

        A `private` one gets a scope of its own, so that all of its prompt is computed. Of a fork, `begins` is the position of
        the first token of the answer that it goes on with.
        """
        tokens, pictures = prompt.token_ids, prompt.pictures
        self._check(params, deadline, on_chunk, on_end)
        if hint is not None:
            check_hint(hint)
        looks = as_flag(offers_tools, "offers_tools") and hint is None and self.tokenizer is not None
        params, notes = self._fitted(len(tokens), params.with_defaults(self.defaults))
        begins = len(tokens) if begins is None else begins
        withheld = tuple(self._withheld(begins, len(tokens), params))
        if withheld:
            params = replace(params, logits_processors=(*withheld, *params.logits_processors))
        told: dict[str, Any] = {"eos_ids": self.eos_ids, "cancel": self.cancel, "notes": notes, "pictures": pictures}
        generation = Generation(next(self._ids), tokens, params, self.tokenizer, on_chunk, on_end, **told)
        generation.adapter, generation.begins = adapter, begins
        if params.prompt_logprobs is not None:
            generation.scores = PromptScores(tokens, params.prompt_logprobs)
        generation.is_private = private or generation.scores is not None
        if generation.is_private:
            scope = replace(scope or ReuseScope(), salt=secrets.token_hex())
        request = Request(
            generation.id,
            tokens,
            params.max_new_tokens,
            n=params.n,
            priority=priority,
            scope=self.scope_of(adapter, scope),
            stop_token_ids=generation.stop_ids,
            deadline=None if deadline is None else self.clock() + deadline,
            session=session,
            retention=retention,
            hint=ToolCalls(self.tokenizer) if looks else hint,
            multimodal=() if pictures is None else pictures.items,
            together=() if pictures is None else pictures.together,
        )
        return NewRequest(generation, request)

    def _withheld(self, begins: int, num_tokens: int, params: SamplingParams) -> Iterator[Withheld]:
        """The tokens that do not begin the answer, and those that do not end it too early."""
        if self.not_first:
            yield Withheld(self.not_first, begins + 1)
        if params.min_new_tokens:
            ends = [token for token in params.stop_ids(self.eos_ids) if token < self.vocab_size]
            if ends:
                yield Withheld(ends, num_tokens + params.min_new_tokens)

    def _check(self, params: SamplingParams, deadline: object, *callbacks: object) -> None:
        """Refuses what this engine's model cannot do."""
        if not isinstance(params, SamplingParams):
            raise InvalidArgumentError(f"params must be SamplingParams, got {show(params)}")
        if params.stop and self.tokenizer is None:
            raise InvalidArgumentError("stop strings need a tokenizer: give stop_token_ids, or Engine(tokenizer=...)")
        outside = [token for token in params.logit_bias if token >= self.vocab_size]
        if outside:
            raise InvalidArgumentError(f"logit_bias names token {outside[0]}; the vocabulary has {self.vocab_size}")
        if deadline is not None and not _is_duration(deadline):
            raise InvalidArgumentError(f"deadline must be seconds from now, got {show(deadline)}")
        check_callbacks(*callbacks)

    def _fitted(self, num_tokens: int, params: SamplingParams) -> tuple[SamplingParams, tuple[str, ...]]:
        """The parameters, with `max_new_tokens` cut to what fits the context, and a note if it was cut."""
        limit, wanted = self.longest, params.max_new_tokens
        room = wanted if limit is None else limit - num_tokens + 1  # K and V of the last token are never needed
        if not 0 < room < wanted:  # a prompt that is too long by itself is refused
            return params, ()
        note = (
            f"max_new_tokens={wanted} was cut to {room}: the prompt has {num_tokens} tokens, there is room for {limit}"
        )
        log.info(note)
        return replace(params, max_new_tokens=room, min_new_tokens=min(params.min_new_tokens, room)), (note,)


_INSTEAD = {  # arguments of transformers' `generate`
    "assistant_model": "Engine(draft_tokens=...) drafts without one",
    "logits_processor": "write SamplingParams(logits_processors=[...])",
    "audio": "it left in 0.3: transformers or vLLM run models that hear",
    "input_ids": "the first argument takes token ids",
    "pixel_values": "images=... takes images, and a prompt may be what the processor gave",
    "stopping_criteria": "SamplingParams has stop, stop_token_ids and max_new_tokens",
    "num_beams": "kvpool.engine.beam_search(engine, prompt, width) searches",
    "streamer": "use Engine.stream, or on_chunk",
    "generation_config": "give SamplingParams",
}


def check_options(options: Mapping[str, object]) -> None:
    """Refuses options that requests do not have, and says where they belong."""
    own = ("self", "prompt", "params", "private", "begins")
    allowed = [name for name in inspect.signature(RequestMaker.make).parameters if name not in own]
    for name in options.keys() - set(allowed):
        if name in {each.name for each in fields(SamplingParams)}:
            remedy = f"write SamplingParams({name}=...)"
        else:
            remedy = _INSTEAD.get(name, f"it has {', '.join(allowed)}")
        raise InvalidArgumentError(f"a request has no option {name!r}: {remedy}")


def check_callbacks(*callbacks: object) -> None:
    """Refuses what cannot be called."""
    for callback in callbacks:
        if callback is not None and not callable(callback):
            raise InvalidArgumentError(f"on_chunk and on_end must be functions, got {show(callback)}")


def checked_generation(given: object) -> Generation:
    """Returns the argument if it is a Generation; raises otherwise."""
    if not isinstance(given, Generation):
        raise InvalidArgumentError(f"a request is the Generation that submit returned, got {show(given)}")
    return given


def list_of_prompts(prompts: object, params: object) -> list[tuple[Any, Any]]:
    """Prompts and the parameters of each. Refuses a single prompt, whose tokens would be taken for prompts."""
    try:
        chosen: list[Any] = list(prompts)  # type: ignore[call-overload]
    except Exception:
        raise InvalidArgumentError(f"prompts must be a list of texts or token ids, got {show(prompts)}") from None
    if isinstance(prompts, (str, bytes, Mapping)) or _is_one_prompt(chosen):
        raise InvalidArgumentError("generate takes a list of prompts; put a single one in a list")
    each = list(params) if isinstance(params, Sequence) else [params] * len(chosen)
    if len(each) != len(chosen):
        raise InvalidArgumentError(f"got {len(each)} SamplingParams for {len(chosen)} prompts")
    return list(zip(chosen, each, strict=True))


def images_of_prompts(given: object, num_prompts: int) -> list[Sequence[Any]]:
    """The images of each prompt."""
    if given is None:
        return [()] * num_prompts
    each = list(given) if isinstance(given, Sequence) and not isinstance(given, (str, bytes)) else None
    if each is None or len(each) != num_prompts or not all(isinstance(some, Sequence) for some in each):
        raise InvalidArgumentError(
            f"images must be a list of images for each of the {num_prompts} prompts, got {show(given)}"
        )
    return each


def _is_one_prompt(prompts: Sequence[object]) -> bool:
    """Whether these are the tokens of a single prompt: numbers, perhaps of an array or a tensor."""
    return bool(prompts) and (isinstance(prompts[0], int) or getattr(prompts[0], "ndim", None) == 0)


def results_of(generations: Sequence[Generation]) -> list[Completion]:
    """Waits for all requests, also if some fail. Then raises the first error, with the `results` of all prompts."""
    results: list[Completion | KVPoolError] = []
    for generation in generations:
        try:
            results.append(generation.result())
        except KVPoolError as error:
            results.append(error)
    for index, result in enumerate(results):
        if isinstance(result, KVPoolError):
            failure = of_prompt(result, index, len(results))
            failure.results = results
            raise failure from result
    return [result for result in results if isinstance(result, Completion)]


def of_prompt(error: KVPoolError, index: int, num_prompts: int) -> KVPoolError:
    """A copy of the error that names its prompt. There may be thousands of prompts, and several may share one error."""
    named = copy.copy(error)
    if num_prompts > 1:
        named.args = (f"prompt {index}: {error}", *error.args[1:])
    return named


def _is_duration(seconds: object) -> bool:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        return False
    try:
        return math.isfinite(float(seconds))
    except OverflowError:
        return False
