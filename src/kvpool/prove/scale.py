"""How far two answers to one prompt may be apart: noise is measured first, then a fixed rule decides.

The distance of two answers is the largest difference between the logarithms of a token's probability, over the likeliest
tokens of all places up to the first one where the answers part. Behind that place they answer different prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from kvpool.prove.endpoint import Answer

FALSE_ALARMS: Final = 1e-3  # in a run: the share of right engines that may be called wrong
FLOOR: Final = 0.05  # no distance below this counts: half precision rounds so far, and so seldom that noise may miss it
UNMEASURED: Final = 1.0  # the limit where noise cannot be measured


def distance(one: Answer, other: Answer) -> float:
    """How far two answers are apart. Without log probabilities: 0 for equal texts, 1 for others."""
    if not one.best or not other.best:
        return float(one.text != other.text)
    worst = 0.0
    for place in range(min(len(one.best), len(other.best))):
        worst = max(worst, _apart(one.best[place], other.best[place]), _apart(other.best[place], one.best[place]))
        if one.tokens[place] != other.tokens[place]:
            break
    return worst


def _apart(one: dict[str, float], other: dict[str, float]) -> float:
    """The largest difference at one place. A token that the other does not list is at most as likely as its last one."""
    least = min(other.values())
    return max(abs(value - other[token]) if token in other else value - least for token, value in one.items())


@dataclass(frozen=True)
class Scale:
    """What was measured before anything was judged.

    `noise` are distances of cold answers from cold ones, `limit` what follows from them, `effect` how far one wrong block
    takes an answer. Where the endpoint gives no log probabilities, `flips` of `cold` answers were other texts.
    """

    noise: tuple[float, ...]
    effect: float
    limit: float
    factor: int
    has_logprobs: bool
    flips: int = 0

    @classmethod
    def of(cls, noise: Sequence[float], effects: Sequence[float], num_judged: int, has_logprobs: bool) -> Scale:
        """The limit is `factor` times the largest noise.

        Take noise whose tail is no heavier than that of an exponential distribution, and `m` measurements of it. Then a
        further one is more than `f` times the largest with the probability 1 / C(m + f, f). `factor` is the smallest `f`
        for which `num_judged` answers have at most FALSE_ALARMS such cases.
        """
        factor = 1
        while noise and math.comb(len(noise) + factor, factor) * FALSE_ALARMS < num_judged:
            factor += 1
        limit = max(FLOOR, factor * max(noise)) if noise else UNMEASURED
        return cls(tuple(noise), median(effects), limit, factor, has_logprobs, sum(each > 0 for each in noise))

    @property
    def is_blind(self) -> bool:
        """Whether one wrong block could not be told from noise."""
        return self.effect <= (self.limit if self.has_logprobs else 0.0)

    def wrong(self, distances: Sequence[float], num_checks: int) -> list[int]:
        """Which of the answers of a check are wrong.

        Without log probabilities an answer alone proves nothing: all that differ are wrong if Fisher's exact test says that
        so many of them differ by chance, given what differed cold, in fewer than FALSE_ALARMS runs.
        """
        if self.has_logprobs:
            return [at for at, each in enumerate(distances) if each > self.limit]
        differ = [at for at, each in enumerate(distances) if each > 0]
        chance = by_chance(len(differ), len(distances), self.flips, len(self.noise))
        return differ if self.noise and chance * num_checks <= FALSE_ALARMS else []


def by_chance(hits: int, of: int, base_hits: int, base_of: int) -> float:
    """Fisher's exact test: how likely at least so many of the hits fall here, if here and there are alike.

    >>> by_chance(8, 8, 0, 16) < 1e-5 < by_chance(2, 8, 0, 16)
    True
    """
    total, all_hits = of + base_of, hits + base_hits
    ways = sum(
        math.comb(of, k) * math.comb(base_of, all_hits - k)
        for k in range(hits, min(of, all_hits) + 1)
        if all_hits - k <= base_of
    )
    return ways / math.comb(total, all_hits)
