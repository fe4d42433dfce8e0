"""jacobi-data collect: prompts in, a trajectory set out.

A shard is the unit of work and of resume; batches form only within it, so that content does not depend on kills.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from jacobi_llm.configs.cli import Options
from jacobi_llm.configs.errors import RunError, UsageError
from jacobi_llm.configs.loader import save_resolved
from jacobi_llm.configs.schema import CollectConfig, OnBadInput, Recipe, TargetSource
from jacobi_llm.data.branches import Branch, Target, initial_state, run_branches
from jacobi_llm.data.record import Trajectory
from jacobi_llm.data.sources import read_source
from jacobi_llm.data.store import MANIFEST, Manifest, Shard, locked_for_writing, read_shard, write_shard
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.models import LoadedModel, load_model
from jacobi_llm.infer.prompt import Prompt, render_prompt
from jacobi_llm.infer.request import DecodeParams, Request, RequestOutput
from jacobi_llm.infer.rule import FinishReason

# Settings that change nothing in the content of a set: it may be moved, and bad lines are told by the prompts' hash.
_FREE_SETTINGS = frozenset(("output", "on_bad_input"))
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
        trajectories: in the order of the prompts.
        skipped: reason -> source indices of prompts that gave none.
        num_unconverged: blocks whose iteration hit its bound.
    """

    trajectories: list[Trajectory] = field(default_factory=list)
    skipped: dict[str, list[int]] = field(default_factory=dict)
    num_unconverged: int = 0


def run(recipe: Recipe, options: Options) -> int:
    """Collect, or go on where an earlier run with the same settings stopped.

    Raises:
        UsageError: a prompt source, model or folder that cannot be used, or a folder with a set of other settings.
        RunError: a damaged manifest, a full disk, a folder in use, or not one trajectory.
    """
    config = recipe.collect
    source = read_source(
        config.input, config.split, limit=config.limit, seed=config.seed, on_bad_input=config.on_bad_input
    )
    if options.dry_run:
        print(
            json.dumps(_plan(config, len(source.prompts))) if options.json else _plan_line(config, len(source.prompts))
        )
        return 0
    folder = Path(config.output).expanduser()
    with locked_for_writing(folder):
        loaded = load_model(config.model, dtype=config.dtype)
        engine = LLMEngine(loaded, recipe.engine)
        collector = Collector(engine, loaded, config, source.prompts)
        manifest = collector.open_manifest(folder, source.num_skipped)
        save_resolved(recipe, folder)
        started_s = time.perf_counter()
        collector.complete(folder, manifest)
    for reason, count in sorted([*manifest.bad_input.items(), *manifest.num_skipped.items()]):
        print(f"skipped {count}: {reason}", file=sys.stderr)
    if not manifest.num_rows:
        raise RunError(f"{folder}: no trajectory; every prompt was skipped ({', '.join(manifest.num_skipped)})")
    if manifest.num_unconverged:
        print(f"warning: {manifest.num_unconverged} blocks did not converge within n + 1 iterations", file=sys.stderr)
    print(f"{folder}: {manifest.num_rows} trajectories in {len(manifest.shards)} shards", file=sys.stderr)
    if options.json:
        print(json.dumps(_report(folder, manifest, engine, time.perf_counter() - started_s), ensure_ascii=False))
    return 0


class Collector:
    """Decodes y* for every prompt and runs all blocks' Jacobi iterations."""

    def __init__(
        self, engine: LLMEngine, loaded: LoadedModel, config: CollectConfig, prompts: Sequence[Prompt]
    ) -> None:
        self.engine = engine
        self.loaded = loaded
        self.config = config
        self.prompts = prompts

    def open_manifest(self, folder: Path, bad_input: dict[str, int] | None = None) -> Manifest:
        """The manifest to go on from: a new one, or that in ``folder`` without the shards that are damaged.

        Args:
            folder: of the set; may be empty.
            bad_input: input lines that were no prompts, by reason.

        Raises:
            UsageError: the set in ``folder`` was collected with other settings.
            RunError: its manifest is damaged.
        """
        num_shards = -(-len(self.prompts) // self.config.shard_size)
        settings = collection_settings(self.config, self.loaded, self.prompts)
        fresh = Manifest(settings, package_versions(), num_shards, bad_input=bad_input or {})
        if not (folder / MANIFEST).exists():
            if orphans := sorted(path.name for path in folder.glob("shard-*.parquet"))[1:]:
                raise UsageError(
                    f"collect.output: {folder} holds shards ({orphans[0]} and others) but no {MANIFEST}; "
                    "restore it, or choose another folder"
                )
            return fresh
        manifest = Manifest.read(folder)
        differences = _differences(manifest.settings, fresh.settings)
        if differences:
            raise UsageError(
                f"{folder}: holds a set collected with other settings ({differences}); "
                "choose another collect.output, or the same settings"
            )
        for number in sorted(manifest.shards):
            try:
                read_shard(folder, manifest.shards[number])
            except RunError as error:
                print(f"warning: {str(error).partition(';')[0]}; collecting this shard again", file=sys.stderr)
                del manifest.shards[number]
        return manifest

    def complete(self, folder: Path, manifest: Manifest) -> None:
        """Write every shard that ``manifest`` does not list, and the manifest after each."""
        size = self.config.shard_size
        parts = [self.prompts[number * size : (number + 1) * size] for number in range(manifest.num_shards)]
        missing = [number for number in range(manifest.num_shards) if number not in manifest.shards]
        num_done = len(self.prompts) - sum(len(parts[number]) for number in missing)
        with tqdm(
            total=len(self.prompts), initial=num_done, desc="collect", unit="prompt", file=sys.stderr, disable=None
        ) as progress:
            for number in missing:
                started_s = time.perf_counter()
                collected = self.collect(parts[number])
                name, digest = write_shard(folder, number, collected.trajectories)
                manifest.shards[number] = Shard(
                    name, len(collected.trajectories), digest, collected.skipped, collected.num_unconverged
                )
                manifest.write(folder)
                num_tokens = sum(len(trajectory.completion_ids) for trajectory in collected.trajectories)
                progress.set_postfix_str(f"{num_tokens / (time.perf_counter() - started_s):.0f} completion tokens/s")
                progress.update(len(parts[number]))
        if not manifest.num_shards:
            manifest.write(folder)

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
            per_completion = [
                open_branches(self._target_of(job, output), self.config)
                for job, output in zip(wave, outputs, strict=True)
            ]
            run_branches(
                [branch for branches in per_completion for branch in branches],
                self.engine.runner,
                self.engine.scheduler.max_num_rows,
            )
        finally:
            for output in outputs:
                self.engine.release(output.id)
        for job, branches in zip(wave, per_completion, strict=True):
            if all(branch.is_finite for branch in branches):
                collected.trajectories.append(self._trajectory(job.prompt, branches))
                collected.num_unconverged += sum(not branch.is_converged for branch in branches)
            else:
                collected.skipped.setdefault(_NOT_FINITE, []).append(job.prompt.source_index)

    def _target_request(self, job: _Job) -> Request:
        """Decode y*; a given completion is prefilled instead (all but its last token needs K/V)."""
        if job.given_ids is None:
            prompt_ids = job.prompt_ids
            params = DecodeParams(
                max_tokens=self.config.max_tokens,
                window=self.config.decode_window,
                stop_token_ids=frozenset(self.loaded.eos_token_ids),
                seed=self.config.seed,
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
        )

    def _trajectory(self, prompt: Prompt, branches: Sequence[Branch]) -> Trajectory:
        target = branches[0].target
        is_stopped = target.completion_ids[-1] in self.loaded.eos_token_ids
        return Trajectory(
            id=prompt.id,
            source_index=prompt.source_index,
            source=prompt.source,
            prompt_ids=list(target.prompt_ids),
            completion_ids=list(target.completion_ids),
            finish_reason=(FinishReason.STOP if is_stopped else FinishReason.LENGTH).value,
            window=self.config.window,
            target_source=self.config.target_source,
            blocks=[branch.block() for branch in branches],
        )


class _SkipPrompt(Exception):
    """A prompt gives no trajectory; the text is the reason that is counted."""


def open_branches(target: Target, config: CollectConfig) -> list[Branch]:
    """One branch per block of ``target``, at its initial state."""
    branches = []
    for start in range(0, len(target.completion_ids), config.window):
        length = min(config.window, len(target.completion_ids) - start)
        key = (config.seed, target.source_index)
        state = initial_state(config.init, target.prompt_ids, target.completion_ids, start, length, key)
        branches.append(Branch(target, start, state))
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


def package_versions() -> dict[str, str]:
    """Versions that a set or a run records."""
    names = ("jacobi-llm", "torch", "transformers", "pyarrow")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


def _differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Settings that differ, with both values; empty when none does."""
    keys = sorted(key for key in before | now if before.get(key) != now.get(key))
    return ", ".join(f"{key}: {_shown(before.get(key))} there, {_shown(now.get(key))} now" for key in keys)


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text[:12]}…" if isinstance(value, str) and len(value) == 64 else text


def _plan(config: CollectConfig, num_prompts: int) -> dict[str, Any]:
    num_shards = -(-num_prompts // config.shard_size)
    return {"num_prompts": num_prompts, "num_shards": num_shards, **config.model_dump(mode="json")}


def _plan_line(config: CollectConfig, num_prompts: int) -> str:
    num_shards = -(-num_prompts // config.shard_size)
    return (
        f"would collect {num_prompts} prompts of {config.input} ({config.split.value}) with {config.model} in "
        f"{config.dtype.value}, window {config.window}, at most {config.max_tokens} tokens each, targets: "
        f"{config.target_source.value}; {num_shards} shards into {config.output}"
    )


def _report(folder: Path, manifest: Manifest, engine: LLMEngine, wall_s: float) -> dict[str, Any]:
    return {
        "output": str(folder),
        "num_trajectories": manifest.num_rows,
        "num_shards": len(manifest.shards),
        "skipped": manifest.num_skipped,
        "bad_input": manifest.bad_input,
        "num_unconverged": manifest.num_unconverged,
        "data_sha256": manifest.data_sha256,
        "forward_passes": engine.runner.num_passes,
        "forward_rows": engine.runner.num_rows,
        "wall_s": round(wall_s, 3),
    }
