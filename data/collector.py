"""jacobi-data collect: prompts in, a trajectory set out.

A shard is the unit of work and of resume; batches form only within it, so that content does not depend on kills.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Never

import torch
from tqdm import tqdm

from jacobi_llm.configs.cli import Options
from jacobi_llm.configs.errors import RunError, UsageError
from jacobi_llm.configs.loader import save_resolved
from jacobi_llm.configs.schema import CollectConfig, Recipe, TargetSource
from jacobi_llm.data.branches import Branch, Target, initial_state, run_branches
from jacobi_llm.data.record import Trajectory
from jacobi_llm.data.sources import read_source
from jacobi_llm.data.store import Manifest, Shard, read_shard, write_shard
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.models import LoadedModel, load_model
from jacobi_llm.infer.prompt import Prompt, render_prompt
from jacobi_llm.infer.request import DecodeParams, Request, RequestOutput
from jacobi_llm.infer.rule import FinishReason

RESUME_KEYS = ("model", "dtype", "input", "split", "format", "limit", "target_source", "window", "max_tokens")
RESUME_KEYS += ("max_prompt_tokens", "init", "decode_window", "wave_size", "shard_size", "seed")


def run(recipe: Recipe, options: Options) -> int:
    """Collect, or go on where an earlier run with the same settings stopped."""
    config = recipe.collect
    source = read_source(
        config.input, config.split, limit=config.limit, seed=config.seed, on_bad_input=config.on_bad_input
    )
    if not source.prompts:
        raise UsageError(f"collect.input: {config.input} has no prompts in its {config.split.value} part")
    if options.dry_run:
        print(_plan(config, len(source.prompts)), file=sys.stderr)
        return 0
    loaded = load_model(config.model, dtype=config.dtype)
    engine = LLMEngine(loaded, recipe.engine)
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    save_resolved(recipe, folder)
    collector = Collector(engine, loaded, config, source.prompts)
    manifest = collector.run(folder)
    num_rows = sum(shard.num_rows for shard in manifest.shards.values())
    print(f"{folder}: {num_rows} trajectories in {len(manifest.shards)} shards", file=sys.stderr)
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

    def run(self, folder: Path) -> Manifest:
        """Write every shard that ``folder`` does not hold yet; returns the complete manifest."""
        manifest = self._open_manifest(folder)
        size = self.config.shard_size
        with tqdm(total=len(self.prompts), desc="collect", unit="prompt", file=sys.stderr, disable=None) as progress:
            for number in range(manifest.num_shards):
                prompts = self.prompts[number * size : (number + 1) * size]
                if number not in manifest.shards:
                    manifest.shards[number] = self._collect_shard(folder, number, prompts, progress)
                    manifest.write(folder)
                else:
                    progress.update(len(prompts))
        return manifest

    def collect(self, prompts: Sequence[Prompt]) -> tuple[list[Trajectory], dict[str, list[int]], int]:
        """Trajectories of ``prompts`` in order, skipped source indices by reason, and the unconverged blocks' count."""
        requests, skipped = self._requests_of(prompts)
        trajectories: list[Trajectory] = []
        num_unconverged = 0
        for wave in self._waves(requests):
            done, unconverged = self._collect_wave(wave)
            trajectories += done
            num_unconverged += unconverged
        return trajectories, skipped, num_unconverged

    def _collect_shard(self, folder: Path, number: int, prompts: Sequence[Prompt], progress: tqdm[Never]) -> Shard:
        started_s = time.perf_counter()
        trajectories, skipped, num_unconverged = self.collect(prompts)
        name, digest = write_shard(folder, number, trajectories)
        num_tokens = sum(len(trajectory.completion_ids) for trajectory in trajectories)
        progress.set_postfix_str(f"{num_tokens / (time.perf_counter() - started_s):.0f} completion tokens/s")
        progress.update(len(prompts))
        return Shard(name, len(trajectories), digest, skipped, num_unconverged)

    def _requests_of(
        self, prompts: Sequence[Prompt]
    ) -> tuple[list[tuple[Prompt, list[int], list[int] | None]], dict[str, list[int]]]:
        requests: list[tuple[Prompt, list[int], list[int] | None]] = []
        skipped: dict[str, list[int]] = {}
        for prompt in prompts:
            given: list[int] | None = None
            prompt_ids = render_prompt(prompt, self.loaded.tokenizer, self.config.format)
            reason = self._reason_to_skip(prompt, prompt_ids)
            if reason is None and self.config.target_source is TargetSource.GIVEN:
                given = given_completion_ids(prompt, self.loaded, self.config.max_tokens)
            if reason is None:
                requests.append((prompt, prompt_ids, given))
            else:
                skipped.setdefault(reason, []).append(prompt.source_index)
        return requests, skipped

    def _reason_to_skip(self, prompt: Prompt, prompt_ids: Sequence[int]) -> str | None:
        if len(prompt_ids) > self.config.max_prompt_tokens:
            return "prompt longer than collect.max_prompt_tokens"
        if len(prompt_ids) >= self.engine.max_context:
            return "prompt fills the model's context"
        if self.config.target_source is TargetSource.GIVEN and not prompt.completion:
            return "no completion given"
        return None

    def _waves(
        self, requests: Sequence[tuple[Prompt, list[int], list[int] | None]]
    ) -> Iterator[list[tuple[Prompt, list[int], list[int] | None]]]:
        """Split into runs of at most ``wave_size`` whose pages all fit at the same time."""
        wave: list[tuple[Prompt, list[int], list[int] | None]] = []
        num_pages = 0
        for request in requests:
            needed = self.engine.pool.pages_for(len(request[1]) + self.config.max_tokens)
            if wave and (len(wave) == self.config.wave_size or num_pages + needed > self.engine.pool.num_pages):
                yield wave
                wave, num_pages = [], 0
            wave.append(request)
            num_pages += needed
        if wave:
            yield wave

    def _collect_wave(self, wave: Sequence[tuple[Prompt, list[int], list[int] | None]]) -> tuple[list[Trajectory], int]:
        outputs = self.engine.generate(self._target_request(*request) for request in wave)
        per_completion: list[list[Branch]] = []
        for (prompt, prompt_ids, given), output in zip(wave, outputs, strict=True):
            target = Target(
                prompt_ids,
                list(output.token_ids) if given is None else given,
                self.engine.pages_of(output.id),
                prompt.source_index,
                self.config.target_source,
            )
            per_completion.append(open_branches(target, self.config))
        run_branches(
            [branch for branches in per_completion for branch in branches],
            self.engine.runner,
            self.engine.scheduler.max_num_rows,
        )
        for output in outputs:
            self.engine.release(output.id)
        trajectories = [
            self._trajectory(prompt, branches, output)
            for (prompt, _, _), branches, output in zip(wave, per_completion, outputs, strict=True)
        ]
        num_unconverged = sum(not branch.is_converged for branches in per_completion for branch in branches)
        return trajectories, num_unconverged

    def _target_request(self, prompt: Prompt, prompt_ids: list[int], given: list[int] | None) -> Request:
        """Decode y*; a given completion is prefilled instead (all but its last token needs K/V)."""
        params = DecodeParams(
            max_tokens=self.config.max_tokens,
            window=self.config.decode_window,
            stop_token_ids=frozenset(self.loaded.eos_token_ids),
            seed=self.config.seed,
        )
        if given is not None:
            prompt_ids = prompt_ids + given[:-1]
            params = DecodeParams(max_tokens=1, window=1)
        return Request(str(prompt.source_index), tuple(prompt_ids), params, keep_pages=True)

    def _trajectory(self, prompt: Prompt, branches: Sequence[Branch], output: RequestOutput) -> Trajectory:
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

    def _open_manifest(self, folder: Path) -> Manifest:
        num_shards = -(-len(self.prompts) // self.config.shard_size)
        fresh = Manifest(collection_settings(self.config, self.loaded, self.prompts), package_versions(), num_shards)
        if not (folder / "manifest.json").exists():
            return fresh
        manifest = Manifest.read(folder)
        differing = sorted(
            key for key in fresh.settings | manifest.settings if fresh.settings.get(key) != manifest.settings.get(key)
        )
        if differing:
            raise UsageError(
                f"{folder}: holds a set collected with other settings ({_differences(differing, manifest, fresh)}); "
                "choose another collect.output, or the same settings"
            )
        for number in sorted(manifest.shards):
            try:
                read_shard(folder, manifest.shards[number])
            except RunError as error:
                print(f"warning: {error}; collecting it again", file=sys.stderr)
                del manifest.shards[number]
        return manifest


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
    """Tokens of a given completion with one EOS at the end, cut to ``max_tokens`` (an EOS that is cut off is absent)."""
    text_ids: list[int] = loaded.tokenizer(prompt.completion or "", add_special_tokens=False)["input_ids"]
    eos = loaded.tokenizer.eos_token_id
    end = [eos if eos in loaded.eos_token_ids else loaded.eos_token_ids[0]] if loaded.eos_token_ids else []
    return [*text_ids, *end][:max_tokens]


def collection_settings(config: CollectConfig, loaded: LoadedModel, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Everything the set's content depends on; two runs may share a folder only when these are equal."""
    settings = {key: value for key, value in config.model_dump(mode="json").items() if key in RESUME_KEYS}
    template = loaded.tokenizer.chat_template
    vocabulary = repr(sorted(loaded.tokenizer.get_vocab().items()))
    return {
        **settings,
        "model_sha256": model_sha256(loaded.model),
        "tokenizer_sha256": hashlib.sha256(vocabulary.encode()).hexdigest(),
        "template_sha256": hashlib.sha256(str(template).encode()).hexdigest() if template else None,
        "prompts_sha256": hashlib.sha256(repr(list(prompts)).encode()).hexdigest(),
        "eos_token_ids": list(loaded.eos_token_ids),
    }


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


def _differences(keys: Sequence[str], before: Manifest, now: Manifest) -> str:
    return ", ".join(f"{key}: {before.settings.get(key)!r} there, {now.settings.get(key)!r} now" for key in keys)


def _plan(config: CollectConfig, num_prompts: int) -> str:
    num_shards = -(-num_prompts // config.shard_size)
    return (
        f"would collect {num_prompts} prompts of {config.input} ({config.split.value}) with {config.model} in "
        f"{config.dtype.value}, window {config.window}, at most {config.max_tokens} tokens each, targets: "
        f"{config.target_source.value}; {num_shards} shards into {config.output}"
    )
