"""Counts of hand-made trajectories, where every number is known."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from jacobi_llm.configs.schema import TargetSource
from jacobi_llm.data.record import Block, Trajectory
from jacobi_llm.data.stats import (
    BlockProfile,
    draw_png,
    format_table,
    joined,
    make_report,
    profile_block,
    profile_set,
    profile_windows,
)
from jacobi_llm.data.stats_html import bar_chart, html_report
from jacobi_llm.data.store import Manifest, Shard

FIXED = [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        # one token per iteration, as AR: nothing is fast-forwarded; the pass that proves the fourth reads three right
        ([[9, 9, 9, 9], [1, 9, 9, 9], [1, 2, 9, 9], [1, 2, 3, 9]], BlockProfile(4, [1, 1, 1, 1], 0, 4)),
        # the 3 is right in y(1), before the 2 is, and stays: stationary; y(2) fixes two tokens at once
        ([[9, 9, 9, 9], [1, 9, 3, 9], [1, 2, 3, 9]], BlockProfile(3, [1, 2, 1], 1, 3)),
        # the 3 is right in y(1), lost in y(2): not stationary
        ([[9, 9, 9, 9], [1, 9, 3, 9], [1, 2, 8, 8], [1, 2, 3, 8]], BlockProfile(4, [1, 1, 1, 1], 0, 4)),
        # the 4 is right from the guess on, though preceded by wrong ones; one more pass has to prove it
        ([[9, 9, 9, 4], [1, 9, 9, 4], [1, 2, 9, 4]], BlockProfile(3, [1, 1, 2], 1, 4)),
        # all at once
        ([[9, 9, 9, 9]], BlockProfile(1, [4], 0, 2)),
        # a guess that is right in whole, or but for its last token
        ([], BlockProfile(0, [4], 0, 1)),
        ([[1, 2, 3, 9]], BlockProfile(1, [4], 0, 1)),
        # the beginning of the guess was right: it counts for the pass that proves it
        ([[1, 2, 9, 9], [1, 2, 3, 9]], BlockProfile(2, [3, 1], 0, 2)),
    ],
)
def test_known_blocks(states: list[list[int]], expected: BlockProfile) -> None:
    assert profile_block(states, FIXED) == expected


def test_a_block_of_one_token_and_one_that_rounding_disturbed() -> None:
    assert profile_block([[9]], [1]) == BlockProfile(1, [1], 0, 1)
    assert profile_block([], [1]) == BlockProfile(0, [1], 0, 1)
    disturbed = profile_block([[9, 9, 9], [1, 2, 9], [1, 9, 9], [1, 2, 9]], [1, 2, 3])
    assert sum(disturbed.tokens_fixed) == 3


TRAJECTORY = Trajectory(
    id="a",
    source_index=0,
    source="test",
    prompt_ids=[7, 8, 9],
    completion_ids=[1, 2, 3, 4, 5, 6],
    finish_reason="stop",
    window=4,
    target_source=TargetSource.GIVEN,
    blocks=[Block(0, [[9, 9, 9, 9], [1, 9, 3, 9], [1, 2, 3, 9]], None), Block(4, [[9, 9]], [5, 7])],
)


def test_sums_over_a_set() -> None:
    profile = profile_set([TRAJECTORY, TRAJECTORY])
    assert (profile.num_trajectories, profile.num_blocks, profile.num_tokens, profile.num_states) == (2, 4, 12, 8)
    assert profile.iterations == Counter({3: 2, 1: 2})
    assert profile.tokens_fixed == Counter({1: 4, 2: 4})
    assert profile.num_other_fixed_points == 2
    report = make_report(Manifest({"window": 4}, {}, 1, {0: Shard("f", 2, "", {"too long": [1]}, 3)}), profile)
    assert report["tokens_per_forward"] == pytest.approx(12 / (2 * (3 + 2)))
    assert report["iterations_per_block"] == 2
    assert report["tokens_fixed_per_iteration"] == 1.5
    assert report["fast_forwarded_per_block"] == 1
    assert report["stationary_per_block"] == 0.5
    assert report["cllm_fast_forward_count"] == pytest.approx((4 / 3 + 2) / 2, abs=1e-4)
    assert report["skipped"] == {"too long": 1}
    assert report["unconverged_blocks"] == 3
    assert report["finish_reasons"] == {"stop": 2}
    table = format_table("here", report)
    assert "shards                      1 of 1" in table
    assert table.splitlines()[-1].split()[:2] == ["3", "2"]


def test_an_empty_set_has_no_means() -> None:
    report = make_report(Manifest({}, {}, 0), profile_set([]))
    assert report["tokens_per_forward"] is None
    assert "tokens per forward" in format_table("here", report)


def test_the_histogram_is_a_png() -> None:
    pytest.importorskip("matplotlib")
    assert draw_png(profile_set([TRAJECTORY]), "here").startswith(b"\x89PNG")


def test_windows_are_told_apart() -> None:
    other = replace(TRAJECTORY, window=8)
    by_window = profile_windows([other, TRAJECTORY, TRAJECTORY])
    assert list(by_window) == [4, 8]
    report = make_report(Manifest({}, {}, 0), joined(by_window.values()), by_window)
    assert {window: figures["trajectories"] for window, figures in report["by_window"].items()} == {"4": 2, "8": 1}
    assert report["trajectories"] == 3
    assert "window 8" in format_table("here", report)


def test_the_report_is_one_file_that_fetches_nothing() -> None:
    by_window = profile_windows([TRAJECTORY, replace(TRAJECTORY, window=8)])
    profile = joined(by_window.values())
    manifest = Manifest({"model": "<b>m</b>"}, {"torch": "2"}, 1, {0: Shard("f", 2, "", {"too <long>": [1]}, 3)})
    manifest.cleaning = {"exact duplicates": {"removed": 12}}
    manifest.parents = [{"name": "first", "num_rows_taken": 2}]
    page = html_report("a & b", manifest, make_report(manifest, profile, by_window), profile)
    assert re.findall(r"<script|<link|<img|src=|href=|url\(|http", page) == []
    assert "<b>m</b>" not in page
    for text in ("a &amp; b", "too &lt;long&gt;", "removed: 12", "Made of: first", "By window", "tokens per forward"):
        assert text in page
    document = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>").replace('<meta charset="utf-8">', "")
        .replace('<meta name="viewport" content="width=device-width">', ""))  # fmt: skip
    assert len(document.findall(".//svg")) == 3
    bars = document.findall(".//svg")[0].findall("rect")
    assert [bar.findtext("title") for bar in bars] == ["1: 2", "2: 0", "3: 2"]


def test_many_values_share_bars() -> None:
    chart = bar_chart("lengths", "tokens", "completions", Counter({1: 2, 1000: 3}))
    counts = [int(count) for count in re.findall(r"<title>[\d-]+: (\d+)</title>", chart)]
    assert len(counts) <= 60
    assert (counts[0], counts[-1], sum(counts)) == (2, 3, 5)
