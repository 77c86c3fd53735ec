"""A trial of one endpoint: what is known of it, what its answers are compared with, and what was found. Read this first.

A run goes on so: `measure` learns what the endpoint says when nothing is cached, and how much that varies. The checks
(`checks.py`) then ask the same prompts in every way in which a cache can be wrong. `judge` compares.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any, Final, NamedTuple

from kvpool.errors import EndpointError
from kvpool.prove.endpoint import Answer, Endpoint
from kvpool.prove.prompts import Probe, Prompts, numbers_in
from kvpool.prove.scale import Scale, distance

RIGHT: Final = "right"
WRONG: Final = "wrong"
NOT_TESTED: Final = "not tested"
PROMISE_SALTS: Final = ("kvpool", "vllm")  # engines that keep salts apart wherever they take them
NO_WAY: Final = "no prompt can be made cold again: the endpoint keeps no salts apart, and none of its resets works"
_NUM_CHANGED: Final = 4
_NEEDLE_TOKENS: Final = 16  # of an answer that may say a code
_CONFIRMED: Final = 3  # further cold answers that a wrong one is compared with
_OFTEN: Final = 14  # times the median of noise: 1 in 16,000 of an exponential distribution is above


class Plan(NamedTuple):
    """How much is asked."""

    num_probes: int
    num_tokens: int
    fill_seconds: float
    num_judged: int  # at most so many answers are judged by the log probabilities
    num_new: int  # tokens of an answer
    cold_seconds: float | None = None  # how long a cold prompt may take; where it takes longer, prompts are shorter
    noise_rounds: int = 2
    concurrency: int = 8
    crowds: int = 2  # how often many are asked at once


QUICK: Final = Plan(num_probes=6, num_tokens=320, fill_seconds=4.0, num_judged=150, num_new=8)
FULL: Final = Plan(
    num_probes=16,
    num_tokens=2000,
    fill_seconds=120.0,
    num_judged=400,
    num_new=16,
    cold_seconds=0.4,  # of some 250 that are computed, beside 350 that are cached
    crowds=4,
)
LEAST_TOKENS: Final = 512  # of prompts that a slow endpoint makes shorter


@dataclass
class Check:
    """What one way of asking has shown."""

    name: str
    verdict: str = NOT_TESTED
    num_asked: int = 0
    hits: dict[str, int] = field(default_factory=dict)  # tokens that came from the cache, by where they were
    worst: float = 0.0
    wrong: list[str] = field(default_factory=list)
    why: str = ""


class Asked(NamedTuple):
    """A probe, what came back, and how many of its tokens came from where."""

    probe: Probe
    answer: Answer
    hits: dict[str, int]
    adapter: str | None = None

    @property
    def num_cached(self) -> int:
        """Tokens from anywhere."""
        return sum(self.hits.values())

    @property
    def is_shared(self) -> bool:
        """Whether more of the prompt was found than the first words that it may have in common with others."""
        return self.num_cached > self.answer.num_prompt_tokens / 4


class Trial:
    """Asks, remembers what is right, and judges. `salts` says whether they are promised to be kept apart."""

    def __init__(
        self,
        endpoint: Endpoint,
        plan: Plan,
        seed: int,
        *,
        salts: bool | None = None,
        may_reset: bool = True,
        say: Callable[[str], None] = lambda words: None,
    ) -> None:
        self.endpoint, self.plan, self.seed, self.say = endpoint, plan, seed, say
        self.prompts = Prompts(plan.num_tokens, seed)
        self.may_reset = may_reset
        self.promises_salts = endpoint.owner in PROMISE_SALTS if salts is None else salts
        self.way = ""  # to make a prompt cold again: by salt, by reset, or not at all
        self.salts_share = 0  # tokens that a prompt found behind a salt that was new
        self.caches = self.has_needles = False
        self.probes: list[Probe] = []
        self.right: dict[tuple[str, str | None], Answer] = {}
        self.checks: list[Check] = []
        self.scale: Scale
        self.rng = random.Random(seed)
        self._salts = 0
        self._sources = endpoint.sources()

    # --- asking ------------------------------------------------------------------------------------------------------

    def ask(self, probe: Probe, *, salt: str | None = None, adapter: str | None = None) -> Asked:
        """Asks one prompt while nobody else asks."""
        answer = self.answer(probe, salt, adapter)
        return Asked(probe, answer, self.hits_since([answer]), adapter)

    def cold(self, probe: Probe, adapter: str | None = None) -> Answer:
        """The answer when nothing of the prompt is cached; of a prompt that was never asked in any case."""
        return self.answer(probe, self.new_salt(), adapter)

    def answer(self, probe: Probe, salt: str | None = None, adapter: str | None = None) -> Answer:
        """The answer alone, for those who ask at the same time as others."""
        number = max(self.plan.num_new, _NEEDLE_TOKENS) if self.has_needles else self.plan.num_new
        return self.endpoint.ask(probe.prompt, salt=salt, adapter=adapter, num_tokens=number)

    def new_salt(self) -> str | None:
        """Makes the next prompt cold: a salt that nobody used, or none behind a reset."""
        if self.way == "reset":
            self.endpoint.reset()
        if self.way != "salt":
            return None
        self._salts += 1
        return f"prove-{self.seed}-{self._salts}"

    def at_once(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        """The results of jobs that run at the same time."""
        with ThreadPoolExecutor(self.plan.concurrency) as pool:
            return list(pool.map(lambda job: job(), jobs))

    def hits_since(self, answers: Sequence[Answer]) -> dict[str, int]:
        """Where the cached tokens of these answers came from, which are all that came since the last call."""
        told = [answer.num_cached for answer in answers if answer.num_cached is not None]
        if self._sources is None:
            return {"cache": sum(told)} if sum(told) else {}
        before, found = self._sources, {}
        for _ in range(
            20 if sum(told) else 3 if answers and not told else 1
        ):  # counters may follow an answer by a moment
            self._sources = self.endpoint.sources() or before
            found = {name: round(value - before.get(name, 0.0)) for name, value in self._sources.items()}
            found = {name: value for name, value in found.items() if value > 0}
            if found:
                break
            time.sleep(0.02)
        if (
            told and not sum(told) / 2 <= sum(found.values()) <= sum(told) * 2
        ):  # others ask, too: the answers know better
            return {"cache": sum(told)} if sum(told) else {}
        return found

    # --- what is right -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Finds out how a prompt is made cold, and whether the endpoint says what came from its cache."""
        self.prompts.learn_alphabet(self.endpoint.tokenized(self.prompts.sample_text()))
        self._choose_form()
        one, other = self.prompts.probe(), self.prompts.probe()
        first = self.ask(one)
        again = self.ask(one)
        if {first.answer.num_cached, again.answer.num_cached} == {None} and self._sources is None:
            raise EndpointError(
                "the endpoint does not say how many tokens came from its cache, so nothing can be proved: let it report "
                "usage.prompt_tokens_details (vLLM: --enable-prompt-tokens-details; SGLang: --enable-cache-report) or"
                " /metrics"
            )
        self.caches = again.num_cached > 0
        if self.endpoint.takes_salts and self.caches:
            self.ask(other, salt=f"prove-{self.seed}-a")
            self.salts_share = self.ask(other, salt=f"prove-{self.seed}-b").num_cached
            self.way = "" if self.salts_share else "salt"
        if not self.way and self.may_reset and self.endpoint.reset():
            self.way = "reset"
            if self.ask(one).num_cached:
                self.way = ""

    def _choose_form(self) -> None:
        """Needles where the model finds them; else tokens where it takes them; else texts that are only compared."""
        tries = [self.prompts.probe((at + 0.5) / 4) for at in range(4)]
        answers, began = [], time.monotonic()
        for probe in tries:
            answers.append(self.endpoint.ask(probe.prompt, num_tokens=_NEEDLE_TOKENS))
            self.prompts.learn_length(probe, answers[-1])
        found = sum(probe.is_found(answer) for probe, answer in zip(tries, answers, strict=True))
        self.has_needles = found >= 3
        self.prompts.of_tokens = not self.has_needles and self.endpoint.takes_tokens
        self._shorten((time.monotonic() - began) / len(tries))

    def _shorten(self, seconds: float) -> None:
        """Prompts that the endpoint computes in about the time that the plan has for one."""
        most, asked = self.plan.cold_seconds, self.prompts.num_tokens
        if most is not None and seconds > most and asked > LEAST_TOKENS:
            self.prompts.num_tokens = max(LEAST_TOKENS, round(asked * most / seconds))
            self.say(
                f"a prompt of {asked} tokens takes {seconds:.1f} s: those asked have {self.prompts.num_tokens}; "
                "--tokens asks longer ones"
            )

    def measure(self) -> None:
        """The right answers, and how far answers are apart for no reason and for a reason."""
        number = self.plan.num_probes
        self.probes = [self.prompts.probe((at + 0.5) / number) for at in range(number)]
        for probe in self.probes:
            self.learn(probe)
        effects = []
        for probe in self.probes[:_NUM_CHANGED]:
            other = self.prompts.changed(probe)
            effects.append(distance(self.cold(other), self.right[probe.name, None]))
        crowd: list[tuple[Probe, float]] = []
        if self.way:
            for _ in range(self.plan.noise_rounds):
                alone = [self._from_right(probe, self.cold(probe)) for probe in self.probes]
                found = self.at_once([partial(self.answer, probe, self.new_salt()) for probe in self.probes])
                crowd += [
                    (probe, max(lonely, self._from_right(probe, answer)))
                    for probe, lonely, answer in zip(self.probes, alone, found, strict=True)
                ]
        self.hits_since([])
        noise, wrong = _split(crowd, median(effects), self.endpoint.has_logprobs)
        self.scale = Scale.of(noise, effects, self.plan.num_judged, self.endpoint.has_logprobs)
        self.checks.append(self._of_crowd(crowd, wrong))

    def learn(self, probe: Probe, adapter: str | None = None) -> Answer:
        """Asks for the right answer to a prompt, once."""
        if (probe.name, adapter) not in self.right:
            self.right[probe.name, adapter] = self.cold(probe, adapter)
        return self.right[probe.name, adapter]

    def _from_right(self, probe: Probe, answer: Answer, adapter: str | None = None) -> float:
        return distance(answer, self.right[probe.name, adapter])

    def _of_crowd(self, crowd: Sequence[tuple[Probe, float]], wrong: Sequence[str]) -> Check:
        """Cold prompts that were asked at once: what is far from its own answer is no noise."""
        check = Check("cold, many at once", num_asked=len(crowd), wrong=list(wrong))
        check.worst = max((each for _, each in crowd), default=0.0)
        check.why = "" if crowd else NO_WAY
        check.verdict = WRONG if wrong else RIGHT if crowd else NOT_TESTED
        return check

    # --- judging -----------------------------------------------------------------------------------------------------

    def judge(self, name: str, asked: Iterable[Asked], *, more: Sequence[str] = ()) -> Check:
        """Compares answers with the right ones. `more` is what else was wrong. Nothing is right where nothing was hit.

        Prompts may have a first token in common, so less than a quarter of one prompt counts as nothing.
        """
        given, check = list(asked), Check(name)
        check.num_asked = len(given)
        for each in given:
            for source, number in each.hits.items():
                check.hits[source] = check.hits.get(source, 0) + number
        distances = [distance(each.answer, self.learn(each.probe, each.adapter)) for each in given]
        check.worst = max(distances, default=0.0)
        suspects = self.scale.wrong(distances, num_checks=12)
        check.wrong = [self._told(given[at], distances[at]) for at in suspects if self._stays_wrong(given[at])]
        check.wrong += [*more, *(words for each in given if (words := self._leaked(each)))]
        if check.wrong:
            check.verdict = WRONG
        elif any(each.is_shared for each in given):
            check.verdict = RIGHT
        else:
            check.why = "hardly anything was found in the cache" if check.hits else "nothing was found in the cache"
        self.checks.append(check)
        self.say(f"{check.verdict}: {name}")
        return check

    def skip(self, name: str, why: str) -> None:
        """Says why something was not tested."""
        self.checks.append(Check(name, why=why))

    def cannot_compare(self, name: str) -> bool:
        """Skips a check of prompts that begin like cached ones, where no prompt can be made cold."""
        if not self.way:
            self.skip(name, NO_WAY)
        return not self.way

    def _stays_wrong(self, asked: Asked) -> bool:
        """Whether an answer is far from further cold answers, too, where those can be had beside what is cached."""
        if self.way != "salt" or not self.scale.has_logprobs:
            return True
        others = [self.cold(asked.probe, asked.adapter) for _ in range(_CONFIRMED)]
        self.hits_since([])
        return min(distance(asked.answer, other) for other in others) > self.scale.limit

    def _told(self, asked: Asked, far: float) -> str:
        """A wrong answer in words."""
        right = self.right[asked.probe.name, asked.adapter]
        hits = ", ".join(f"{number} tokens from {source}" for source, number in asked.hits.items())
        hits = hits or f"{asked.answer.num_cached or 0} tokens cached"
        model = f" with {asked.adapter}" if asked.adapter else ""
        words = f"{asked.probe.name}{model} ({hits}): {asked.answer.text[:60]!r}, but cold {right.text[:60]!r}"
        return f"{words}; {far:.3g} apart" if self.scale.has_logprobs else words

    def _leaked(self, asked: Asked) -> str:
        """The code of another prompt in an answer."""
        if not self.has_needles:
            return ""
        own = "\n".join(asked.probe.lines)
        found = [code for code in numbers_in(asked.answer) if code in self.prompts.codes and code not in own]
        return f"{asked.probe.name} answered {found[0]}, which only another prompt says" if found else ""

    # --- its end -----------------------------------------------------------------------------------------------------

    @property
    def verdict(self) -> str:
        """Wrong if any check found something; right only if something was hit that could have shown a fault."""
        if any(check.verdict == WRONG for check in self.checks):
            return WRONG
        tested = [check for check in self.checks if check.verdict == RIGHT and check.hits]
        return RIGHT if tested and not self.scale.is_blind else NOT_TESTED

    def state(self) -> dict[str, Any]:
        """What another process needs to ask the same prompts after a restart."""
        return {
            "seed": self.seed,
            "model": self.endpoint.model,
            "way": self.way,
            "has_needles": self.has_needles,
            "scale": asdict(self.scale),
            "probes": [asdict(probe) for probe in self.probes],
            "right": [self.right[probe.name, None]._asdict() for probe in self.probes],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over what `state` returned."""
        self.seed, self.way, self.has_needles = state["seed"], state["way"], state["has_needles"]
        self.scale = Scale(**{**state["scale"], "noise": tuple(state["scale"]["noise"])})
        self.probes = [
            Probe(**{**each, "lines": tuple(each["lines"]), "tokens": tuple(each["tokens"])})
            for each in state["probes"]
        ]
        answers = [
            Answer(**{**each, "tokens": tuple(each["tokens"]), "best": tuple(each["best"])}) for each in state["right"]
        ]
        self.right = {(probe.name, None): answer for probe, answer in zip(self.probes, answers, strict=True)}
        self.prompts.of_tokens = bool(self.probes[0].tokens)
        self.prompts.codes = {probe.code for probe in self.probes if probe.code}
        self._salts = random.randrange(10**6, 10**9)  # those of the first half are used


def _split(crowd: Sequence[tuple[Probe, float]], effect: float, has_logprobs: bool) -> tuple[list[float], list[str]]:
    """Noise, and what is none: answers as far from the right one as a wrong block takes them, beside a quiet median."""
    if not crowd:
        return [], []
    usual = median(each for _, each in crowd)
    odd = {at for at, (_, each) in enumerate(crowd) if has_logprobs and each > max(effect / 2, _OFTEN * usual) > 0}
    noise = [each for at, (_, each) in enumerate(crowd) if at not in odd]
    return noise, [f"{crowd[at][0].name}, asked cold beside others, was {crowd[at][1]:.3g} apart" for at in sorted(odd)]
