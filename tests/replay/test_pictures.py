"""What pictures show: who holds the cache, which tier, how old; and what is said when a trace cannot tell."""

from __future__ import annotations

import errno
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from kvpool.cli import main
from kvpool.errors import InvalidArgumentError
from kvpool.replay import ReplayConfig, Trace, TraceBuilder, replay, write_trace
from kvpool.replay.pictures import absent_pictures, all_pictures, sample_occupancy, save_pictures
from kvpool.replay.report import render
from kvpool.replay.runs import run_all
from kvpool.replay.synth import WorkloadModel, fit, synthesise

CONFIG = ReplayConfig("lru", 20, host=10)


def two_tenants() -> Trace:
    """Acme fills the cache, then globex takes what it needs; in between somebody without a name, and an empty prompt."""
    builder = TraceBuilder("shared", unit=16)
    builder.add(0, list(range(12)), 192, 1, tenant="acme")
    builder.add(1000, [], 0, 1, tenant="globex")
    builder.add(60_000, [0, 1, 100, 101, 102], 80, 1, tenant="globex")
    builder.add(120_000, [200, 201], 32, 1)
    builder.add(800_000, list(range(300, 318)), 288, 1, tenant="globex")
    return builder.build()


@pytest.fixture(scope="module")
def report() -> str:
    """The page on `two_tenants`: drawing its pictures takes a second."""
    trace = two_tenants()
    return render(trace, [replay(trace, CONFIG)], [CONFIG])


def test_given_tenants_then_blocks_count_for_who_had_them_computed() -> None:
    found = sample_occupancy(two_tenants(), ReplayConfig("lru", 100))
    assert found.by_tenant == {"acme": [12] * 5, "globex": [0, 0, 3, 3, 21], "no tenant": [0, 0, 0, 2, 2]}
    assert found.minutes == pytest.approx([0, 1 / 60, 1, 2, 800 / 60])


def test_given_tiers_and_time_then_blocks_are_told_apart_by_both() -> None:
    found = sample_occupancy(two_tenants(), CONFIG)
    assert found.by_age["GPU, used < 1 min ago"] == [12, 12, 5, 2, 18]
    assert found.by_age["GPU, 1–10 min"] == [0, 0, 10, 15, 0]
    assert found.by_age["GPU, > 10 min"] == [0, 0, 0, 0, 2]
    assert found.by_age["host"] == [0, 0, 0, 0, 10]
    assert [sum(counts) for counts in zip(*found.by_age.values(), strict=True)] == [
        sum(counts) for counts in zip(*found.by_tenant.values(), strict=True)
    ]


@pytest.mark.slow
def test_given_a_trace_with_or_without_tenants_then_the_picture_is_there_or_its_absence_is_explained(
    chat_trace: Trace,
) -> None:
    with_tenants, without = two_tenants(), chat_trace
    drawn = [picture.title for picture in all_pictures(with_tenants, [replay(with_tenants, CONFIG)], [CONFIG])]
    assert drawn[-2:] == ["What the cache holds, by tier and age", "What the cache holds, by tenant"]
    assert not absent_pictures(with_tenants)
    results = [replay(without, CONFIG)]
    assert not any("tenant" in picture.title for picture in all_pictures(without, results, [CONFIG]))
    assert "does not say who asked" in render(without, results, [CONFIG])


def test_given_many_tenants_then_the_smallest_are_drawn_as_one() -> None:
    trace = synthesise(WorkloadModel(num_tenants=30, num_stems=60), 300)
    config = ReplayConfig("lru", 500)
    (picture,) = (p for p in all_pictures(trace, [replay(trace, config)], [config]) if p.title.endswith("by tenant"))
    (legend,) = picture.draw().legends
    names = [text.get_text() for text in legend.get_texts()]
    assert len(names) == 9
    assert names[-1].endswith(" others")


def test_given_a_synthetic_trace_with_tenants_then_conversations_stay_with_theirs_and_fit_counts_them() -> None:
    trace = synthesise(WorkloadModel(num_tenants=3), 400, seed=5)
    owners: dict[int, set[str]] = {}
    for request in trace:
        for block in request.ids.tolist():
            owners.setdefault(block, set()).add(str(request.tenant))
    assert all(len(names) == 1 for names in owners.values()), "a tenant reuses its own blocks only"
    assert fit(trace).num_tenants == 3
    assert synthesise(WorkloadModel(), 50).tenants is None


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.tags: list[str] = []
        self.metas: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "meta":
            self.metas.append(dict(attrs))
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not (value or "").startswith("#"):
                self.outside.append(f"{tag} {name}={value}")


@pytest.mark.slow
def test_given_a_report_then_it_needs_nothing_from_elsewhere_and_fits_a_phone(report: str) -> None:
    page = _Page()
    page.feed(report)
    assert page.outside == []
    assert not {"script", "link", "iframe", "img"} & set(page.tags)
    assert any(meta.get("name") == "viewport" for meta in page.metas)
    assert "@import" not in report
    assert report.count('<div class="scroll"><table') == page.tags.count("table"), "a wide table scrolls by itself"
    assert page.tags.count("svg") == 6


@pytest.mark.slow
def test_the_report_sets_blocks_time_and_tiers_side_by_side() -> None:
    trace = TraceBuilder("a" * 300, unit=16)
    for number in range(40):
        trace.add(number * 1000.0, [number % 5 * 10 + depth for depth in range(6)], 96, 0)
    loaded = trace.build()
    configs = [
        ReplayConfig(policy, 8, host=12, objective=objective)
        for policy, objective in (
            ("lru", "blocks"),
            ("adaptive", "blocks"),
            ("adaptive", "seconds"),
            ("optimum", "blocks"),
        )
    ]
    page = render(loaded, run_all(loaded, configs, workers=1), configs)
    assert "overflow-wrap: anywhere" in page  # a long name stays in the page
    for heading in ("Hit ratio", "Time saved", "Hits by tier"):
        assert f"<h2>{heading}</h2>" in page
    tables = [part.split("</table>")[0] for part in page.split("<table>")[1:4]]
    for table in tables:
        assert [f"<td>{name}</td>" in table for name in ("lru", "adaptive", "adaptive, seconds", "optimum")] == [
            True
        ] * 4
    assert "<th>GPU</th><th>host</th>" in tables[2]
    assert "Hits by tier" not in render(loaded, run_all(loaded, [ReplayConfig("lru", 8)], workers=1))


@pytest.mark.slow
def test_given_the_same_results_then_the_report_is_the_same_text(report: str) -> None:
    trace = two_tenants()
    assert render(trace, [replay(trace, CONFIG)], [CONFIG]) == report


def test_given_a_folder_then_every_picture_is_there_twice(tmp_path: Path) -> None:
    trace = two_tenants()
    paths = save_pictures(tmp_path / "new", trace, [replay(trace, CONFIG)], [CONFIG])
    assert len(paths) == 12
    assert tmp_path / "new" / "what-the-cache-holds-by-tenant.png" in paths
    assert all(path.stat().st_size > 1000 for path in paths)


def test_cards_of_the_report_read_like_sentences_and_not_like_fields(report: str) -> None:
    cards = {label: value for value, label in re.findall("<div><b>(.*?)</b>(.*?)</div>", report)}
    assert cards["from the first to the last"] == "13.3 min"
    assert cards["of blocks had been used before"] == "5.4%"
    assert cards["tenants"] == "2"
    assert "True" not in cards.values()
    assert not {"name", "reuse known", "tokens per id"} & set(cards)


@pytest.mark.slow
def test_given_several_runs_then_the_picture_shows_the_one_of_the_headline() -> None:
    loaded = synthesise(WorkloadModel(rate=2.0), 60, seed=2)
    configs = [ReplayConfig("lru", size) for size in (400, 8, 40)]
    page = render(loaded, run_all(loaded, configs, workers=1), configs)
    assert "The best run, lru with 400 blocks" in page
    assert "Policy lru, 400 blocks; those on the GPU" in page


@pytest.mark.slow
def test_given_prompts_that_share_nothing_then_replay_and_report_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = TraceBuilder("alone", unit=16)
    for number in range(8):
        trace.add(1000 * number, [3 * number, 3 * number + 1], 32, 4)
    path = tmp_path / "alone.jsonl"
    write_trace(trace.build(), path)
    assert main(["replay", str(path), "--capacity", "4,8", "--report", str(tmp_path / "out.html")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "No size finds anything" in printed
    assert "adaptive" in printed, "what a manager uses is among the policies"
    assert "No size finds anything" in (tmp_path / "out.html").read_text()


@pytest.mark.slow
def test_given_more_load_than_a_gpu_serves_then_replay_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = TraceBuilder("busy", unit=512)
    for number in range(12):
        trace.add(100 * number, [number, number + 100], 1024, 400)
    path, model = tmp_path / "busy.jsonl", tmp_path / "config.json"
    write_trace(trace.build(), path)
    shape = {"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}
    shape |= {"num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256, "torch_dtype": "bfloat16"}
    model.write_text(json.dumps(shape))
    options = ["--capacity", "8", "--model", str(model), "--gpu", "a100"]
    assert main(["replay", str(path), *options]) == 0
    assert "Overload in 2 of 2 runs" in " ".join(capsys.readouterr().out.split())


def test_given_a_full_disk_then_the_error_names_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", fail)
    trace = two_tenants()
    with pytest.raises(InvalidArgumentError, match=r"cannot write .*\.png: No space left on device"):
        save_pictures(tmp_path, trace, [replay(trace, CONFIG)], [CONFIG])
