"""The ways in which a cache can be wrong, each a function that asks a `Trial` and lets it judge."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from kvpool.errors import EndpointError
from kvpool.prove.endpoint import DEVICE
from kvpool.prove.prompts import Probe
from kvpool.prove.trial import Asked, Trial

_FEW: Final = 4
_MISSES: Final = 3  # prompts that were found nowhere
_SAME: Final = 3  # prompts from one tier, until the next one is looked for


def asked_again(trial: Trial) -> None:
    """Each prompt once, and at once again."""
    found = []
    for probe in trial.probes:
        found += [trial.ask(probe), trial.ask(probe)]
    trial.judge("asked again", found)


def branches(trial: Trial) -> None:
    """Prompts that begin like others and part from them in the middle of what is cached."""
    name = "begins like another"
    if trial.cannot_compare(name):
        return
    others = [trial.prompts.branch(probe) for probe in trial.probes]
    for other in others:
        trial.learn(other)
    found = []
    for probe, other in zip(trial.probes, others, strict=True):
        trial.ask(probe)  # what is cached of it may have been pushed out meanwhile
        found.append(trial.ask(other))
    trial.judge(name, found)


def unsaid(trial: Trial) -> None:
    """The control: what no prompt says can only come out of another one's cache."""
    name = "asked for what was never said"
    if not trial.has_needles:
        trial.skip(name, "the model finds no needles: its answers are compared, not read")
        return
    if trial.cannot_compare(name):
        return
    found = []
    for probe in trial.probes:
        trial.ask(probe)
        found.append(trial.ask(trial.prompts.unsaid(probe, trial.probes)))
    trial.judge(name, found)


def other_traffic(trial: Trial) -> None:
    """More and more prompts of our own push the probes out, tier by tier; each round looks at one of them.

    A probe that nobody finds any more was pushed too far: then between that number of prompts and the last one that left it
    in the tier above.
    """
    by_source: dict[str, list[Asked]] = {}
    due = time.monotonic() + trial.plan.fill_seconds
    low, high, misses, shared, same = 0, 0, 0, 0, 0
    number = trial.plan.num_probes

    def look(probe: Probe) -> str:
        """Asks it, and says where most of it was."""
        asked = trial.ask(probe)
        source = max(asked.hits, key=lambda name: asked.hits[name]) if asked.is_shared else ""
        if source:
            by_source.setdefault(source, []).append(asked)
        return source

    for probe in trial.probes:
        if time.monotonic() > due or misses == _MISSES or low < high <= low + 1:
            break
        look(probe)
        fill(trial, number, due)
        source = look(probe)
        if source and trial.way == "salt":
            shared += trial.ask(probe, salt=trial.new_salt()).num_cached
        same += bool(source) and source not in DEVICE
        if not source:
            misses, high = misses + 1, number
        elif source in DEVICE or same == _SAME:
            low, same = number, 0
        else:
            continue
        number = (low + high) // 2 if high else 2 * number
    if shared and trial.promises_salts:
        trial.salts_share += shared
    for source, found in by_source.items():
        trial.judge(f"after other traffic, from {source}", found)
    if set(by_source) <= {*DEVICE}:
        trial.skip("after other traffic, from a lower tier", "no prompt came from anywhere but the engine's own memory")


def fill(trial: Trial, number: int, due: float) -> None:
    """Asks so many prompts that nobody asks again, until the time is over."""

    def ask(probe: Probe) -> None:
        if time.monotonic() < due:
            trial.endpoint.ask(probe.prompt, num_tokens=1)

    trial.at_once([partial(ask, trial.prompts.probe()) for _ in range(number)])
    trial.hits_since([])


def crowd(trial: Trial) -> None:
    """Many at once: prompts that are cached, prompts that are not, and streams whose clients leave."""
    found: list[Asked] = []
    left: list[Probe] = []
    for _ in range(trial.plan.crowds):
        for probe in trial.probes:  # what was pushed out comes back
            trial.ask(probe)
        leaving = [trial.prompts.probe() for _ in trial.probes[::2]]
        jobs: list[Callable[[], Any]] = [partial(trial.answer, probe) for probe in trial.probes]
        if trial.way == "salt":
            jobs += [partial(trial.answer, probe, trial.new_salt()) for probe in trial.probes]
        judged = len(jobs)
        jobs += [partial(trial.endpoint.leave, probe.prompt) for probe in leaving]
        order = list(range(len(jobs)))
        trial.rng.shuffle(order)
        results: dict[int, Any] = dict(zip(order, trial.at_once([jobs[at] for at in order]), strict=True))
        answers = [results[at] for at in range(judged)]
        hits = trial.hits_since(answers)
        found += [
            Asked(trial.probes[at % len(trial.probes)], answer, {} if at else hits) for at, answer in enumerate(answers)
        ]
        left += leaving
    trial.judge("many at once, some leaving", found)
    name = "what was left in the middle, asked again"
    if not trial.cannot_compare(name):
        trial.judge(name, [asked for probe in left for asked in (trial.ask(probe), trial.ask(probe))])


def salts(trial: Trial) -> None:
    """Equal prompts with other salts, which must not find each other's cache."""
    name = "other salts"
    if not trial.endpoint.takes_salts or not trial.promises_salts:
        trial.skip(name, "the endpoint does not say that it keeps cache_salt apart; --salts tests it")
        return
    found, more = [], []
    if trial.salts_share:
        more.append(f"{trial.salts_share} tokens of prompts with a new salt came from the cache")
    for probe in trial.probes[:_FEW]:
        given = [f"prove-{trial.seed}-{probe.name}-{which}" for which in "ab"]
        for salt in given:
            asked = trial.ask(probe, salt=salt)
            found.append(asked)
            if asked.num_cached and not trial.salts_share:
                more.append(f"{probe.name} with a new salt found {asked.num_cached} tokens")
        found.append(trial.ask(probe, salt=given[0]))
    trial.judge(name, found, more=more)


def adapters(trial: Trial, names: Sequence[str]) -> None:
    """Equal prompts with the model and its adapters, none of which may find what another one computed."""
    name = "other adapters"
    if not names:
        trial.skip(name, "--adapters names none")
        return
    models = (None, *names)
    found, more = [], []
    probes = [trial.prompts.probe() for _ in range(_FEW // 2)]
    for probe in probes:
        for model in models:
            trial.learn(probe, model)
        if trial.way != "salt":
            trial.new_salt()
        trial.hits_since([])
        for model in models:
            asked = trial.ask(probe, adapter=model)
            found.append(asked)
            if asked.is_shared and trial.way:
                more.append(f"{probe.name} with {model or 'no adapter'} found {asked.num_cached} tokens of another one")
        found += [trial.ask(probe, adapter=model) for model in models]
    answers = {tuple(trial.right[probe.name, model].text for probe in probes) for model in models}
    if len(answers) < len(models):
        trial.skip(name, f"{', '.join(names)} and the model itself do not answer differently")
        return
    trial.judge(name, found, more=more)


def restarted(trial: Trial, command: str, seconds: float) -> None:
    """What the endpoint finds of earlier prompts when it has been started again."""
    before_restart(trial)
    trial.say("restarting")
    done = subprocess.run(command, shell=True, check=False)
    if done.returncode:
        raise EndpointError(f"the restart command ended with status {done.returncode}: {command}")
    trial.endpoint.wait(seconds)
    after_restart(trial)


def before_restart(trial: Trial) -> None:
    """Makes the prompts those that every tier used last."""
    for probe in trial.probes:
        trial.ask(probe)


def after_restart(trial: Trial) -> None:
    """The prompts of before, asked by the process that came after."""
    trial.hits_since([])
    trial.judge("after a restart", [trial.ask(probe) for probe in trial.probes])


def forgotten(trial: Trial) -> None:
    """Behind a reset nothing is found, and what is asked then is right."""
    name = "after a reset"
    if not trial.may_reset:
        trial.skip(name, "--no-reset")
        return
    for probe in trial.probes[:_FEW]:
        trial.ask(probe)
    if not trial.endpoint.reset():
        trial.skip(name, "the endpoint has no way to empty its cache (vLLM: VLLM_SERVER_DEV_MODE=1)")
        return
    found, more = [], []
    trial.hits_since([])
    for probe in trial.probes[:_FEW]:
        asked = trial.ask(probe)
        found += [asked, trial.ask(probe)]
        if asked.is_shared:
            where = " and ".join(asked.hits)
            more.append(f"{probe.name} found {asked.num_cached} tokens of before the reset, from {where}")
    trial.judge(name, found, more=more)
