"""Packed samples: layout, which rows carry loss, EOS, the noise schedule, the cut at max_length."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from jacobi_llm.configs.schema import ObjectiveConfig, ObjectiveName
from jacobi_llm.data.record import Block, Trajectory
from jacobi_llm.train.sample import NoisyBlock, Sample, build_sample, choose_noise
from tests.train.runs import EOS, make_trajectories, make_trajectory

JACOBI_FORCING = ObjectiveConfig(name=ObjectiveName.JACOBI_FORCING)
CLLM = ObjectiveConfig(name=ObjectiveName.CLLM_GLOBAL)


def sample_of(
    trajectory: Trajectory, noise: list[NoisyBlock], *, include_last_row: bool = True, max_length: int = 1000
) -> Sample:
    return build_sample(
        trajectory, noise, include_last_row=include_last_row, eos_token_ids=(0, EOS), max_length=max_length
    )


def hand_made(completion: list[int], states: list[list[int]], *, window: int = 4) -> Trajectory:
    """Prompt 50, 51; one state per block of ``window``."""
    trajectory = make_trajectory(0, window=window)
    blocks = [Block(b * window, [state], None) for b, state in enumerate(states)]
    return replace(trajectory, prompt_ids=[50, 51], completion_ids=completion, blocks=blocks)


def noise_of(trajectory: Trajectory) -> list[NoisyBlock]:
    """Every block's first state."""
    return [
        NoisyBlock(block.start, block.states[0], _first_wrong(block.states[0], trajectory.target_of(block)))
        for block in trajectory.blocks
    ]


def _first_wrong(state: list[int], target: list[int]) -> int:
    return next((i for i in range(len(state)) if state[i] != target[i]), len(state))


def test_layout_by_hand() -> None:
    trajectory = hand_made([10, 11, 12, 13, 14, 15], [[10, 91, 12, 93], [94, 95]])
    sample = sample_of(trajectory, noise_of(trajectory))
    assert sample.token_ids.tolist() == [50, 51, 10, 91, 12, 93, 10, 11, 12, 13, 94, 95, 14, 15]
    assert sample.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 7, 6, 7]
    assert sample.is_noisy.tolist() == [False] * 2 + [True] * 4 + [False] * 4 + [True] * 2 + [False] * 2
    assert sample.block.tolist() == [-1] * 2 + [0] * 4 + [-1] * 4 + [1] * 2 + [-1] * 2
    assert sample.block_start.tolist() == [0] * 2 + [2] * 4 + [0] * 4 + [6] * 2 + [0] * 2
    # The prompt's last row predicts the first token, and no prompt token is a target.
    assert sample.ar_rows.tolist() == [1, 6, 7, 8, 9, 12]
    assert sample.ar_targets.tolist() == [10, 11, 12, 13, 14, 15]
    # Block 0 is right in row 0 and first wrong in row 1: rows 1, 2, 3 count, also row 2, whose token is right.
    assert sample.student_rows.tolist() == [3, 4, 5, 10, 11]
    assert sample.teacher_rows.tolist() == [7, 8, 9, 12, 13]


def test_student_and_teacher_stand_at_one_position_and_the_student_from_the_first_wrong_token_on() -> None:
    for trajectory in make_trajectories(12):
        noise = choose_noise(trajectory, JACOBI_FORCING, random.Random(1), 1000)
        sample = sample_of(trajectory, noise)
        assert sample.position_ids[sample.student_rows].equal(sample.position_ids[sample.teacher_rows])
        assert sample.is_noisy[sample.student_rows].all()
        assert not sample.is_noisy[sample.teacher_rows].any()
        assert not sample.is_noisy[sample.ar_rows].any()
        for noisy in noise:
            block = next(block for block in trajectory.blocks if block.start == noisy.start)
            assert noisy.num_right == _first_wrong(noisy.state, trajectory.target_of(block))


def test_the_last_row_of_a_block_counts_by_option() -> None:
    trajectory = hand_made([10, 11, 12, 13, 14, 15], [[90, 91, 92, 93], [94, 95]])
    with_last = sample_of(trajectory, noise_of(trajectory)).student_rows.tolist()
    without = sample_of(trajectory, noise_of(trajectory), include_last_row=False).student_rows.tolist()
    assert with_last == [2, 3, 4, 5, 10, 11]
    assert without == [2, 3, 4, 10]


@pytest.mark.parametrize("include_last_row", [True, False])
def test_the_row_that_reads_eos_carries_no_loss_and_eos_is_a_target(include_last_row: bool) -> None:
    trajectory = hand_made([10, 11, 12, EOS], [[90, 91, 92, 93]])
    sample = sample_of(trajectory, noise_of(trajectory), include_last_row=include_last_row)
    assert sample.student_rows.tolist() == [2, 3, 4]
    assert sample.ar_targets.tolist() == [10, 11, 12, EOS]


def test_field_case_t07_tokens_behind_eos_carry_no_loss() -> None:
    trajectory = hand_made([10, EOS, 12, 13, 14, 15], [[90, 91, 92, 93], [94, 95]])
    sample = sample_of(trajectory, noise_of(trajectory))
    assert sample.ar_targets.tolist() == [10, EOS]
    assert sample.student_rows.tolist() == [2]
    # The block behind is not even read.
    assert sample.num_rows == 2 + 4 + 4


def test_blocks_are_cut_from_the_end_clean_and_noisy_together() -> None:
    trajectory = hand_made([10, 11, 12, 13, 14, 15, 16, 17], [[90, 91, 92, 93], [94, 95, 96, 97]])
    whole = sample_of(trajectory, noise_of(trajectory), max_length=18)
    assert whole.num_rows == 18
    for max_length in (17, 14, 10):
        cut = sample_of(trajectory, noise_of(trajectory), max_length=max_length)
        assert cut.num_rows == 10
        assert cut.ar_targets.tolist() == [10, 11, 12, 13]
    # A clean block alone may still fit.
    assert sample_of(trajectory, noise_of(trajectory)[:1], max_length=14).num_rows == 14


def test_a_block_without_states_has_no_noisy_rows() -> None:
    trajectory = hand_made([10, 11, 12, 13, 14, 15], [[90, 91, 92, 93], [94, 95]])
    trajectory = replace(trajectory, blocks=[replace(trajectory.blocks[0], states=[]), trajectory.blocks[1]])
    for objective in (JACOBI_FORCING, CLLM):
        assert [noisy.start for noisy in choose_noise(trajectory, objective, random.Random(0), 1000)] == [4]


def test_ar_has_no_noise_and_cllm_one_block_that_fits() -> None:
    trajectory = make_trajectory(5, length=40)
    prompt_len = len(trajectory.prompt_ids)
    assert choose_noise(trajectory, ObjectiveConfig(name=ObjectiveName.AR), random.Random(0), 1000) == []
    drawn = [choose_noise(trajectory, CLLM, random.Random(seed), 1000) for seed in range(60)]
    assert all(len(noise) == 1 for noise in drawn)
    assert {noise[0].start for noise in drawn} == {0, 8, 16, 24, 32}
    # 16 + 8 clean tokens and 8 noisy ones: the third block is the last that can be trained on.
    drawn = [choose_noise(trajectory, CLLM, random.Random(seed), prompt_len + 32) for seed in range(60)]
    assert {noise[0].start for noise in drawn} == {0, 8, 16}
    assert choose_noise(trajectory, CLLM, random.Random(0), prompt_len + 15) == []


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_the_schedule_takes_the_state_whose_share_of_wrong_tokens_is_nearest(steps: int) -> None:
    objective = ObjectiveConfig(name=ObjectiveName.JACOBI_FORCING, schedule_blocks=steps)
    trajectory = make_trajectory(7, length=80)
    ratios = [1.0] if steps == 1 else [k / (steps - 1) for k in range(steps)]

    def shares(block: Block) -> list[float]:
        target = trajectory.target_of(block)
        return [sum(a != b for a, b in zip(state, target, strict=True)) / len(target) for state in block.states]

    for seed in range(8):
        noise = choose_noise(trajectory, objective, random.Random(seed), 1000)
        assert [noisy.start for noisy in noise] == [block.start for block in trajectory.blocks]
        fitting_offsets = [
            offset
            for offset in range(steps)
            if all(
                abs(shares(block)[block.states.index(noisy.state)] - ratios[(number + offset) % steps])
                == min(abs(share - ratios[(number + offset) % steps]) for share in shares(block))
                for number, (block, noisy) in enumerate(zip(trajectory.blocks, noise, strict=True))
            )
        ]
        assert fitting_offsets
