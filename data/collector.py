"""Trajectories of prompts: y* is decoded, and every block of it is iterated from an initial guess.

What comes of some prompts depends on nothing else; batches form only within them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.schema import Augmentation, CollectConfig, OnBadInput, Split, TargetSource
from jacobi_llm.data.augmentation import augmented_states
from jacobi_llm.data.block_starts import block_starts
from jacobi_llm.data.branches import Branch, Target, initial_state, run_branches
from jacobi_llm.data.degeneration import degeneration
from jacobi_llm.data.record import Block, Trajectory
from jacobi_llm.data.stats import profile_block
from jacobi_llm.data.target_sampling import noise_seed, target_sampling
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.models import LoadedModel
from jacobi_llm.infer.prompt import Prompt, render_prompt
from jacobi_llm.infer.request import DecodeParams, Request, RequestOutput
from jacobi_llm.infer.rule import FinishReason

# Settings that change nothing in the content of a set: it may be moved, and bad lines are told by the prompts' hash.
_FREE_SETTINGS = frozenset(("output", "on_bad_input", "executor", "num_workers"))
_NOT_FINITE = "logits are not finite"


@dataclass(frozen=True)
class _Job:
    """A prompt that will be collected; ``given_ids`` is its completion unless the model decodes it."""

    prompt: Prompt
    prompt_ids: list[int]
    given_ids: list[int] | None


@dataclass
class Collected:
    """What came of some prompts.

    Attributes:
        trajectories: in the order of the prompts; one for each window.
        skipped: reason -> source indices of prompts that gave none.
        num_unconverged: blocks whose iteration hit its bound.
        num_passes: of the block procedure at batch 1 (the TPF that these trajectories have is tokens over these).
    """

    trajectories: list[Trajectory] = field(default_factory=list)
    skipped: dict[str, list[int]] = field(default_factory=dict)
    num_unconverged: int = 0
    num_passes: int = 0

    @property
    def num_tokens(self) -> int:
        """Completion tokens, once for each window."""
        return sum(len(trajectory.completion_ids) for trajectory in self.trajectories)


class Collector:
    """Decodes y* for every prompt and runs all blocks' Jacobi iterations."""

    def __init__(self, engine: LLMEngine, loaded: LoadedModel, config: CollectConfig) -> None:
        self.engine = engine
        self.loaded = loaded
        self.config = config
        self.sampling = target_sampling(config)

    def collect(self, prompts: Sequence[Prompt]) -> Collected:
        """Trajectories of ``prompts``.

        Raises:
            UsageError: a prompt that cannot be rendered (on_bad_input=fail), or that does not fit the K/V pages alone.
        """
        # What other shards left in the pages depends on kills, and in low precision the content would with it.
        self.engine.reset_prefix_cache()
        collected = Collected()
        for wave in self._waves(self._jobs_of(prompts, collected.skipped)):
            self._collect_wave(wave, collected)
        return collected

    def _jobs_of(self, prompts: Sequence[Prompt], skipped: dict[str, list[int]]) -> list[_Job]:
        jobs: list[_Job] = []
        for prompt in prompts:
            try:
                job = self._job_of(prompt)
            except _SkipPrompt as reason:
                skipped.setdefault(str(reason), []).append(prompt.source_index)
            else:
                jobs.append(job)
        return jobs

    def prompt_ids_of(self, prompt: Prompt) -> list[int]:
        """The tokens that the model reads before it answers ``prompt``."""
        return render_prompt(prompt, self.loaded.tokenizer, self.config.format)

    def _job_of(self, prompt: Prompt) -> _Job:
        try:
            prompt_ids = self.prompt_ids_of(prompt)
        except UsageError:
            if self.config.on_bad_input is OnBadInput.FAIL:
                raise
            raise _SkipPrompt("prompt cannot be rendered") from None
        if len(prompt_ids) > self.config.max_prompt_tokens:
            raise _SkipPrompt("prompt longer than collect.max_prompt_tokens")
        if len(prompt_ids) >= self.engine.max_context:
            raise _SkipPrompt("prompt fills the model's context")
        if self.config.target_source is TargetSource.MODEL:
            return _Job(prompt, prompt_ids, None)
        given_ids = given_completion_ids(prompt, self.loaded, self._max_tokens(prompt_ids))
        if not given_ids:
            raise _SkipPrompt("no completion given")
        return _Job(prompt, prompt_ids, given_ids)

    def _max_tokens(self, prompt_ids: Sequence[int]) -> int:
        return min(self.config.max_tokens, self.engine.max_context - len(prompt_ids))

    def _waves(self, jobs: Sequence[_Job]) -> Iterator[list[_Job]]:
        """Split into runs of at most ``wave_size`` whose pages all fit at the same time."""
        wave: list[_Job] = []
        num_pages = 0
        for job in jobs:
            num_tokens = self._max_tokens(job.prompt_ids) if job.given_ids is None else len(job.given_ids)
            needed = self.engine.pool.pages_for(len(job.prompt_ids) + num_tokens - 1)
            if wave and (len(wave) == self.config.wave_size or num_pages + needed > self.engine.pool.num_pages):
                yield wave
                wave, num_pages = [], 0
            wave.append(job)
            num_pages += needed
        if wave:
            yield wave

    def _collect_wave(self, wave: Sequence[_Job], collected: Collected) -> None:
        outputs = self.engine.generate(self._target_request(job) for job in wave)
        try:
            decoded = [self._target_of(job, output) for job, output in zip(wave, outputs, strict=True)]
            wave, targets = self._without_degenerate(wave, decoded, collected)
            runs = [[open_branches(target, self.config, window) for window in self.config.window] for target in targets]
            run_branches(
                [branch for by_window in runs for branches in by_window for branch in branches],
                self.engine.runner,
                self.engine.scheduler.max_num_rows,
            )
        finally:
            for output in outputs:
                self.engine.release(output.id)
        for job, by_window in zip(wave, runs, strict=True):
            branches = [branch for branches in by_window for branch in branches]
            if all(branch.is_finite for branch in branches):
                rows = [
                    self._trajectory(job.prompt, window, branches)
                    for window, branches in zip(self.config.window, by_window, strict=True)
                ]
                collected.trajectories += rows
                collected.num_unconverged += sum(not branch.is_converged for branch in branches)
                collected.num_passes += sum(
                    profile_block(block.states, row.fixed_point_of(block)).num_passes
                    for row in rows
                    for block in row.blocks
                )
            else:
                collected.skipped.setdefault(_NOT_FINITE, []).append(job.prompt.source_index)

    def _without_degenerate(
        self, wave: Sequence[_Job], targets: Sequence[Target], collected: Collected
    ) -> tuple[Sequence[_Job], Sequence[Target]]:
        """Those to go on with; held-out sets keep all, since hard cases end in loops and must be measured too."""
        if not self.config.filter_outputs or self.config.split is Split.HELDOUT:
            return wave, targets
        kept = []
        for job, target in zip(wave, targets, strict=True):
            reason = degeneration(target.completion_ids)
            if reason is None:
                kept.append((job, target))
            else:
                collected.skipped.setdefault(reason, []).append(job.prompt.source_index)
        return [job for job, _ in kept], [target for _, target in kept]

    def _target_request(self, job: _Job) -> Request:
        """Decode y*; a given completion is prefilled instead (all but its last token needs K/V)."""
        if job.given_ids is None:
            prompt_ids = job.prompt_ids
            params = DecodeParams(
                max_tokens=self.config.max_tokens,
                window=self.config.decode_window,
                stop_token_ids=frozenset(self.loaded.eos_token_ids),
                seed=noise_seed(self.config.seed, job.prompt.source_index),
                sampling=self.sampling,
            )
        else:
            prompt_ids = job.prompt_ids + job.given_ids[:-1]
            params = DecodeParams(max_tokens=1, window=1)
        return Request(str(job.prompt.source_index), tuple(prompt_ids), params, keep_pages=True)

    def _target_of(self, job: _Job, output: RequestOutput) -> Target:
        return Target(
            job.prompt_ids,
            list(output.token_ids) if job.given_ids is None else job.given_ids,
            self.engine.pages_of(output.id),
            job.prompt.source_index,
            self.config.target_source,
            self.sampling,
            noise_seed(self.config.seed, job.prompt.source_index),
        )

    def _trajectory(self, prompt: Prompt, window: int, branches: Sequence[Branch]) -> Trajectory:
        target = branches[0].target
        is_stopped = target.completion_ids[-1] in self.loaded.eos_token_ids
        return Trajectory(
            id=prompt.id,
            source_index=prompt.source_index,
            source=prompt.source,
            prompt_ids=list(target.prompt_ids),
            completion_ids=list(target.completion_ids),
            finish_reason=(FinishReason.STOP if is_stopped else FinishReason.LENGTH).value,
            window=window,
            target_source=self.config.target_source,
            blocks=[self._augmented(branch) for branch in branches],
        )

    def _augmented(self, branch: Branch) -> Block:
        block = branch.block()
        if self.config.augment is Augmentation.NONE:
            return block
        key = (self.config.seed, branch.target.source_index, block.start, len(branch.state), "augment")
        states = augmented_states(
            self.config.augment,
            block.states,
            branch.right if block.fixed_point is None else block.fixed_point,
            vocab_size=self.engine.vocab_size,
            share=self.config.augment_share,
            rng=random.Random("/".join(map(str, key))),
        )
        return replace(block, augmented_states=states)


class _SkipPrompt(Exception):
    """A prompt gives no trajectory; the text is the reason that is counted."""


def open_branches(target: Target, config: CollectConfig, window: int) -> list[Branch]:
    """One branch per block of ``target``, at its initial state."""
    key = (config.seed, target.source_index)
    num_tokens = len(target.completion_ids)
    starts = block_starts(num_tokens, window, config.jitter_starts, key)
    branches = []
    for start, end in zip(starts, [*starts[1:], num_tokens], strict=True):
        state = initial_state(config.init, target.prompt_ids, target.completion_ids, start, end - start, key)
        branches.append(Branch(target, start, state, config.max_iterations))
    return branches


def given_completion_ids(prompt: Prompt, loaded: LoadedModel, max_tokens: int) -> list[int]:
    """Tokens of a given completion with one EOS at the end, cut to ``max_tokens`` (an EOS that is cut off is absent).

    Text after an EOS that the completion spells out itself is cut off; without a completion the list is empty.
    """
    if not prompt.completion:
        return []
    ids: list[int] = loaded.tokenizer(prompt.completion, add_special_tokens=False)["input_ids"]
    stops = loaded.eos_token_ids
    eos = loaded.tokenizer.eos_token_id
    end = next((index for index, token in enumerate(ids) if token in stops), None)
    if end is not None:
        ids = ids[: end + 1]
    elif stops:
        ids = [*ids, eos if eos in stops else stops[0]]
    return ids[:max_tokens]


def collection_settings(config: CollectConfig, loaded: LoadedModel, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Everything the set's content depends on; two runs may share a folder only when these are equal."""
    settings = config.model_dump(mode="json", exclude=set(_FREE_SETTINGS))
    template = loaded.tokenizer.chat_template
    return {
        **settings,
        "model_sha256": model_sha256(loaded.model),
        "tokenizer_sha256": tokenizer_sha256(loaded.tokenizer),
        "template_sha256": hashlib.sha256(str(template).encode()).hexdigest() if template else None,
        "prompts_sha256": hashlib.sha256(repr(list(prompts)).encode()).hexdigest(),
        "eos_token_ids": list(loaded.eos_token_ids),
    }


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the vocabulary: token ids mean the same text under equal hashes."""
    return hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


@torch.inference_mode()
def model_sha256(model: torch.nn.Module) -> str:
    """Hash of all weights, by name."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
