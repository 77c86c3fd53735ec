"""What `kvpool top` reads and shows: numbers of /metrics, what changed between two looks, a screen of 80 columns."""

from __future__ import annotations

import io

import pytest

pytest.importorskip("rich")

from rich.console import Console

from kvpool.clients.top import Scrape, bar, read_metrics, screen

TEXT = """# HELP kvpool_blocks Blocks by state.
kvpool_blocks{model="m \\"1\\"",pool="0",state="referenced",tier="GPU"} 10.0
kvpool_blocks{model="m \\"1\\"",pool="0",state="cached",tier="GPU"} 50.0
kvpool_blocks{model="m \\"1\\"",pool="0",state="pinned",tier="GPU"} 20.0
kvpool_blocks{model="m \\"1\\"",pool="0",state="free",tier="GPU"} 40.0
kvpool_sequences{model="m",state="running"} 3.0
kvpool_generated_tokens_total 100.0
kvpool_prompt_tokens_total{model="m"} 200.0
kvpool_hit_tokens_total{model="m",tier="GPU"} 50.0
kvpool_http_refused_total{status="429"} 7.0
kvpool_first_token_seconds_bucket{le="0.1"} 50.0
kvpool_first_token_seconds_bucket{le="0.2"} 100.0
kvpool_first_token_seconds_bucket{le="+Inf"} 100.0
this is no metric
"""


def shown(look: Scrape, before: Scrape | None = None, trouble: str = "") -> str:
    out = io.StringIO()
    Console(file=out, width=80, color_system=None).print(screen("http://here", look, before, trouble))
    return out.getvalue()


def test_given_a_text_of_metrics_then_its_numbers_are_found_by_labels() -> None:
    look = read_metrics(TEXT, at=1.0)
    assert look.total("kvpool_blocks", state="cached") == 50
    assert look.total("kvpool_blocks", state="cached", tier="HOST") == 0
    assert look.values("kvpool_blocks", "model") == ['m "1"']
    assert look.total("nothing") == 0


@pytest.mark.parametrize(("share", "expected"), [(0.25, 0.05), (0.5, 0.1), (0.75, 0.15), (1.0, 0.2)])
def test_given_a_histogram_then_quantiles_lie_inside_their_bucket(share: float, expected: float) -> None:
    assert read_metrics(TEXT, at=0.0).quantile("kvpool_first_token_seconds", share) == pytest.approx(expected)


def test_given_observations_over_the_last_bound_then_that_bound_is_told() -> None:
    look = read_metrics('h_bucket{le="1.0"} 0\nh_bucket{le="+Inf"} 4\n', at=0.0)
    assert look.quantile("h", 0.5) == 1.0
    assert look.quantile("other", 0.5) is None


def test_given_two_looks_then_the_change_is_told_also_after_a_restart() -> None:
    first, second = read_metrics("a_total 100\nb_total 5\n", at=1.0), read_metrics("a_total 130\nb_total 2\n", at=3.0)
    change = second.since(first)
    assert (change.at, change.total("a_total"), change.total("b_total")) == (2.0, 30.0, 2.0)


def test_given_blocks_then_the_bar_divides_its_whole_width() -> None:
    drawn = bar({"referenced": 10, "pinned": 20, "cached": 50, "free": 40}, 100, width=20).plain
    assert drawn == "█" * 2 + "▓" * 4 + "▒" * 6 + "░" * 8
    assert bar({"referenced": 0, "pinned": 0, "cached": 0, "free": 0}, 0).plain == ""


def test_given_a_look_then_the_screen_tells_of_memory_requests_and_reuse() -> None:
    text = shown(read_metrics(TEXT, at=1.0), trouble="nobody answers")
    for words in (
        'm "1", pool 0, GPU',
        "3 running",
        "100 tokens",
        "7 with 429",
        "25.0% of prompt tokens",
        "nobody answers",
    ):
        assert words in text
    assert "100 ms" in text


def test_given_two_looks_then_the_screen_tells_rates() -> None:
    later = TEXT.replace("kvpool_generated_tokens_total 100.0", "kvpool_generated_tokens_total 300.0")
    text = shown(read_metrics(later, at=3.0), read_metrics(TEXT, at=1.0))
    assert "100.0 tokens" in text
    assert "no prompts" in text


def test_given_several_models_then_a_quantile_is_that_of_all_their_requests() -> None:
    rows = [("a", "0.1", 4), ("a", "+Inf", 4), ("b", "0.1", 0), ("b", "+Inf", 4)]
    text = "".join(f'h_bucket{{le="{bound}",model="{model}"}} {count}\n' for model, bound, count in rows)
    assert read_metrics(text, at=0.0).quantile("h", 0.5) == pytest.approx(0.1)
