"""Prometheus's text form, read back: numbers by name and labels, what changed between two looks, quantiles of histograms."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

_NUMBER = r"[-+0-9.eE]+|[-+]?Inf|NaN"
_SAMPLE = re.compile(rf'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{{((?:[^"}}]|"(?:[^"\\]|\\.)*")*)\}})?\s+({_NUMBER})(?:\s|$)')
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}

Labels = tuple[tuple[str, str], ...]


@dataclass
class Look:
    """All numbers of a server at one moment.

    >>> look = read_metrics('kvpool_blocks{state="free",tier="GPU"} 12\\nkvpool_generated_tokens_total 7\\n', at=0.0)
    >>> look.total("kvpool_blocks", state="free"), look.total("kvpool_generated_tokens_total")
    (12.0, 7.0)
    """

    at: float
    samples: dict[str, dict[Labels, float]] = field(default_factory=dict)

    def total(self, name: str, **wanted: str) -> float:
        """The sum over all samples with these labels."""
        return sum(
            value for labels, value in self.samples.get(name, {}).items() if wanted.items() <= dict(labels).items()
        )

    def values(self, name: str, label: str) -> list[str]:
        """The values that a label has, in order of appearance."""
        found = (dict(labels).get(label) for labels in self.samples.get(name, {}))
        return list(dict.fromkeys(value for value in found if value is not None))

    def since(self, before: Look) -> Look:
        """What was added to every number; a server that started anew counts from nothing."""
        changed = {}
        for name, samples in self.samples.items():
            known = before.samples.get(name, {})
            olds = ((at, value, known.get(at, 0.0)) for at, value in samples.items())
            changed[name] = {at: value - old if value >= old else value for at, value, old in olds}
        return Look(self.at - before.at, changed)

    def quantile(self, histogram: str, share: float) -> float | None:
        """The value that `share` of a histogram's observations stay within, as its buckets tell; None where it has none."""
        buckets = sorted(
            (_bound(labels), count) for labels, count in self.samples.get(f"{histogram}_bucket", {}).items()
        )
        if not buckets or not buckets[-1][1]:
            return None
        wanted = share * buckets[-1][1]
        for (low, below), (high, within) in pairwise([(0.0, 0.0), *buckets]):
            if within >= wanted and within > below:
                return low if math.isinf(high) else low + (high - low) * (wanted - below) / (within - below)
        return buckets[-1][0]


def read_metrics(text: str, at: float) -> Look:
    """The numbers in a text of /metrics; lines that are none are passed over."""
    look = Look(at)
    for line in text.splitlines():
        found = None if line.startswith("#") else _SAMPLE.match(line)
        if found is not None:
            labels = tuple((name, _unescaped(value)) for name, value in _LABEL.findall(found[2] or ""))
            look.samples.setdefault(found[1], {})[labels] = float(found[3])
    return look


def _bound(labels: Labels) -> float:
    return float(dict(labels)["le"])


def _unescaped(text: str, escapes: Mapping[str, str] = _ESCAPES) -> str:
    return re.sub(r"\\[\\\"n]", lambda found: escapes[found[0]], text)
