"""Figures as text for Prometheus, for what answers `/metrics` without its client library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping


def metric_lines(name: str, kind: str, about: str, rows: Iterable[tuple[Mapping[str, object], float]]) -> Iterator[str]:
    """The lines of one metric, with a line for each row: its labels and its value.

    >>> list(metric_lines("kvpool_blocks", "gauge", "Blocks.", [({"tier": "GPU"}, 3)]))
    ['# HELP kvpool_blocks Blocks.', '# TYPE kvpool_blocks gauge', 'kvpool_blocks{tier="GPU"} 3']
    """
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"
    for labels, value in rows:
        shown = ",".join(f'{label}="{_escaped(str(text))}"' for label, text in labels.items())
        yield f"{name}{{{shown}}} {value}" if shown else f"{name} {value}"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
