"""Counts of hand-made trajectories, where every number is known."""

from __future__ import annotations

from collections import Counter

import pytest

from jacobi_llm.configs.schema import TargetSource
from jacobi_llm.data.record import Block, Trajectory
from jacobi_llm.data.stats import BlockProfile, draw_png, format_table, make_report, profile_block, profile_set
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
