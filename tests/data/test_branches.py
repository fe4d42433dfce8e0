"""The branches give the states of the textbook procedure, whatever window, guesses and target."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jacobi_llm.configs.schema import FillPolicy, TargetSource
from jacobi_llm.data.branches import Branch, Target, run_branches
from jacobi_llm.data.collector import Collector, open_branches
from jacobi_llm.data.record import Trajectory
from jacobi_llm.data.sequential import (
    BlockSettings,
    CachedPredictor,
    Chooser,
    Predictor,
    UncachedPredictor,
    first_state_difference,
    run_sequential,
)
from jacobi_llm.infer.models import LoadedModel
from jacobi_llm.infer.row_group import RowGroup
from tests.data.trajectories import make_collector, make_config, make_prompts, settings_of

LoadedFactory = Callable[..., LoadedModel]


@pytest.fixture(scope="module")
def loaded(tiny_loaded: LoadedFactory) -> LoadedModel:
    return tiny_loaded("llama", torch.float64)


def same_as_sequential(trajectory: Trajectory, predictor: Predictor, settings: BlockSettings) -> None:
    given_ids = trajectory.completion_ids if trajectory.target_source is TargetSource.GIVEN else None
    result = run_sequential(predictor, trajectory.prompt_ids, trajectory.source_index, settings, given_ids)
    assert result.completion_ids == trajectory.completion_ids
    assert result.blocks == trajectory.blocks
    assert result.num_unconverged == 0


@pytest.mark.parametrize("window", range(2, 17))
def test_states_are_those_of_the_textbook_procedure(loaded: LoadedModel, window: int) -> None:
    for source in TargetSource:
        for init in FillPolicy:
            prompts = make_prompts(2, with_completions=source is TargetSource.GIVEN, seed=window)
            collector = make_collector(loaded, window=window, init=init, target_source=source, max_tokens=18)
            collected = collector.collect(prompts)
            assert collected.num_unconverged == 0
            settings = settings_of(collector.config, loaded)
            for number, trajectory in enumerate(collected.trajectories):
                trajectory.check()
                predictor = CachedPredictor(collector.engine) if number else UncachedPredictor(loaded.model)
                same_as_sequential(trajectory, predictor, settings)
            collector.engine.check_integrity()
            assert collector.engine.pool.num_free == collector.engine.pool.num_pages


@pytest.mark.parametrize("position", [0, 3, 7, 8, 12])
def test_an_eos_inside_a_block_cuts_the_states_too(loaded: LoadedModel, position: int) -> None:
    prompts = make_prompts(1)
    [endless] = make_collector(loaded).collect(prompts).trajectories
    stop = endless.completion_ids[position]
    first = endless.completion_ids.index(stop)
    stopping = replace(loaded, eos_token_ids=(stop,))
    collector = make_collector(stopping)
    [trajectory] = collector.collect(prompts).trajectories
    trajectory.check()
    assert trajectory.completion_ids == endless.completion_ids[: first + 1]
    assert trajectory.finish_reason == "stop"
    settings = settings_of(collector.config, stopping)
    same_as_sequential(trajectory, CachedPredictor(collector.engine), settings)
    same_as_sequential(trajectory, UncachedPredictor(loaded.model), settings)


def test_an_eos_in_the_prompt_ends_nothing(loaded: LoadedModel) -> None:
    [prompt] = make_prompts(1)
    stop = loaded.eos_token_ids[1]
    prompt = replace(prompt, text=f"one<|im_end|>two{prompt.text}<|im_end|>")
    [trajectory] = make_collector(loaded).collect([prompt]).trajectories
    assert trajectory.prompt_ids.count(stop) == 2
    assert len(trajectory.completion_ids) == 20


def test_given_completions_keep_the_models_own_fixed_points(loaded: LoadedModel) -> None:
    prompts = make_prompts(3, with_completions=True)
    trajectories = make_collector(loaded, target_source=TargetSource.GIVEN).collect(prompts).trajectories
    fixed_points = [block.fixed_point for trajectory in trajectories for block in trajectory.blocks]
    assert None not in fixed_points  # a random model never writes what we do


def test_a_given_completion_that_is_the_models_own_has_no_fixed_point_of_its_own(loaded: LoadedModel) -> None:
    # Every way a block may end, the one included in which its last token becomes right in the last step.
    for seed in range(6):
        prompts = make_prompts(1, seed=seed)
        collector = make_collector(loaded, window=5, max_tokens=17)
        [own] = collector.collect(prompts).trajectories
        target = Target(own.prompt_ids, own.completion_ids, [], own.source_index, TargetSource.GIVEN)
        engine = collector.engine
        table: list[int] = []
        assert engine.pool.grow(table, len(own.prompt_ids) + 17)
        engine.runner.forward([RowGroup(table, 0, [*own.prompt_ids, *own.completion_ids])])
        branches = open_branches(replace(target, block_table=table), collector.config, 5)
        run_branches(branches, engine.runner, 64)
        assert [branch.block() for branch in branches] == own.blocks
        assert all(branch.is_converged for branch in branches)


def test_passes_are_cut_to_the_row_limit_and_states_stay_the_same(loaded: LoadedModel) -> None:
    prompts = make_prompts(4)
    wide = make_collector(loaded)
    narrow = make_collector(loaded)
    narrow.engine.scheduler.max_num_rows = 9
    sizes: list[int] = []
    forward = narrow.engine.runner.forward

    def watched(groups: Sequence[RowGroup]) -> torch.Tensor:
        sizes.append(sum(group.num_rows for group in groups))
        return forward(groups)

    narrow.engine.runner.forward = watched  # type: ignore[method-assign]
    assert narrow.collect(prompts) == wide.collect(prompts)
    assert max(sizes) <= 9


def test_a_right_guess_needs_no_pass(loaded: LoadedModel) -> None:
    target = Target([5], [1, 2, 3], [], 0, TargetSource.MODEL)
    branch = Branch(target, 0, [1, 2, 3])
    assert (branch.is_done, branch.is_converged, branch.num_iterations) == (True, True, 0)
    assert branch.block().states == []
    assert branch.block().fixed_point is None


def test_first_state_difference_names_the_place(loaded: LoadedModel) -> None:
    prompts = make_prompts(1)
    [trajectory] = make_collector(loaded).collect(prompts).trajectories
    block = trajectory.blocks[0]
    target = trajectory.target_of(block)
    assert first_state_difference(loaded.model, trajectory.prompt_ids, block, block, target) is None
    changed = [list(state) for state in block.states]
    changed[2][5] += 1
    other = replace(block, states=changed)
    found = first_state_difference(loaded.model, trajectory.prompt_ids, block, other, target)
    assert found is not None
    assert (found.iteration, found.position) == (2, 5)
    assert found.gap > 0
    shorter = replace(block, states=block.states[:-1])
    assert first_state_difference(loaded.model, trajectory.prompt_ids, block, shorter, target) is not None


class FakeModel:
    """The next token is a hash of all tokens before it, modulo a small vocabulary: right guesses happen by chance."""

    def __init__(self, vocab: int, texts: dict[int, list[int]] | None = None) -> None:
        self.vocab = vocab
        self.texts = texts or {}
        self.num_passes = 0
        self.num_rows = 0

    def next_token(self, text: Sequence[int]) -> int:
        return random.Random(repr(list(text))).randrange(self.vocab)

    def forward(self, groups: Sequence[RowGroup]) -> torch.Tensor:
        logits = []
        for group in groups:
            text = self.texts[id(group.block_table)][: group.prefix_len]
            for row in range(group.num_rows):
                one_hot = torch.zeros(self.vocab)
                one_hot[self.next_token([*text, *group.token_ids[: row + 1]])] = 1
                logits.append(one_hot)
        return torch.stack(logits)

    def start(self, prompt_ids: Sequence[int], num_tokens: int, chooser: Chooser) -> None: ...

    def finish(self) -> None: ...

    def predict(self, prefix_ids: Sequence[int], state: Sequence[int]) -> list[int]:
        return [self.next_token([*prefix_ids, *state[:i]]) for i in range(len(state))]


@given(
    vocab=st.integers(1, 4),
    window=st.integers(2, 9),
    prompt_ids=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    num_tokens=st.integers(1, 20),
    policy=st.sampled_from(list(FillPolicy)),
    given_ids=st.none() | st.lists(st.integers(0, 3), min_size=1, max_size=20),
    max_num_rows=st.integers(1, 40),
)
def test_branches_equal_the_textbook_procedure_on_any_function(
    vocab: int,
    window: int,
    prompt_ids: list[int],
    num_tokens: int,
    policy: FillPolicy,
    given_ids: list[int] | None,
    max_num_rows: int,
) -> None:
    settings = BlockSettings(window, num_tokens, policy, 0, frozenset({vocab - 1} if num_tokens % 2 else ()))
    expected = run_sequential(FakeModel(vocab), prompt_ids, 3, settings, given_ids)
    assert expected.num_unconverged == 0
    table = [0]
    source = TargetSource.MODEL if given_ids is None else TargetSource.GIVEN
    target = Target(prompt_ids, expected.completion_ids, table, 3, source)
    branches = open_branches(target, make_config(init=policy), window)
    fake = FakeModel(vocab, {id(table): [*prompt_ids, *expected.completion_ids]})
    run_branches(branches, fake, max_num_rows)  # type: ignore[arg-type]
    assert [branch.block() for branch in branches] == expected.blocks
    assert all(branch.is_converged for branch in branches)


@given(
    window=st.integers(2, 9),
    source=st.sampled_from(TargetSource),
    init=st.sampled_from(FillPolicy),
    jitter=st.booleans(),
    max_iterations=st.none() | st.integers(1, 4),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 3]),
    seed=st.integers(0, 2**32),
)
def test_every_option_gives_the_states_of_the_textbook_procedure(
    collector_and_model: tuple[Collector, LoadedModel],
    window: int,
    source: TargetSource,
    init: FillPolicy,
    jitter: bool,
    max_iterations: int | None,
    temperature: float,
    top_k: int,
    seed: int,
) -> None:
    shared, loaded = collector_and_model
    prompts = make_prompts(2, with_completions=source is TargetSource.GIVEN, seed=seed)
    config = make_config(
        window=[window, window + 3],
        init=init,
        target_source=source,
        jitter_starts=jitter,
        max_iterations=max_iterations,
        temperature=temperature if source is TargetSource.MODEL else 0.0,
        top_k=top_k,
        seed=seed,
        max_tokens=14,
    )
    collected = Collector(shared.engine, loaded, config).collect(prompts)
    assert [(row.source_index, row.window) for row in collected.trajectories] == [
        (prompt.source_index, n) for prompt in prompts for n in (window, window + 3)
    ]
    assert (collected.num_unconverged == 0) or max_iterations is not None
    for row in collected.trajectories:
        row.check()
        again = run_sequential(
            CachedPredictor(shared.engine),
            row.prompt_ids,
            row.source_index,
            settings_of(config, loaded, row.window),
            row.completion_ids,
            row.target_source,
        )
        assert again.blocks == row.blocks
        if max_iterations is None and source is TargetSource.MODEL:
            own = run_sequential(
                UncachedPredictor(loaded.model),
                row.prompt_ids,
                row.source_index,
                settings_of(config, loaded, row.window),
            )
            assert (own.completion_ids, own.blocks) == (row.completion_ids, row.blocks)


@pytest.fixture(scope="module")
def collector_and_model(loaded: LoadedModel) -> tuple[Collector, LoadedModel]:
    return make_collector(loaded), loaded


def test_a_sampled_target_is_what_the_engine_decodes_and_differs_by_prompt(loaded: LoadedModel) -> None:
    [prompt] = make_prompts(1)
    twins = [prompt, replace(prompt, source_index=7)]
    rows = make_collector(loaded, temperature=1.0).collect(twins).trajectories
    assert rows[0].completion_ids != rows[1].completion_ids
    assert rows == make_collector(loaded, temperature=1.0, wave_size=1).collect(twins).trajectories
    assert rows != make_collector(loaded, temperature=1.0, seed=1).collect(twins).trajectories
