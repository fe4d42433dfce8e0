"""jacobi-data validate: every promise of a trajectory set, checked; nothing is modified.

Without the model: manifest, hashes, schema, row counts, each prompt once, blocks that cover the completion, nothing
after EOS, states in time order. With ``--rerun N``: N completions are iterated again by the textbook procedure, and
their states must be the same. In float64 any difference is a fault; in float32 one is explained by a gap of the two
best logits below 1e-4; in bfloat16 rounding depends on the rows that share a pass, so differences are counted only, and
so are those of sampled targets in float32, whose noise is not in the gap.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jacobi_llm.configs.cli import Options
from jacobi_llm.configs.errors import JacobiError, RunError
from jacobi_llm.configs.schema import CollectConfig, Dtype, EngineConfig, Recipe, SplitConfig, TargetSource
from jacobi_llm.configs.wording import counted
from jacobi_llm.data.collector import model_sha256
from jacobi_llm.data.record import Block, Trajectory
from jacobi_llm.data.sequential import (
    BlockSettings,
    CachedPredictor,
    StateDifference,
    first_state_difference,
    run_sequential,
)
from jacobi_llm.data.split import SIDES, key_function, side_of
from jacobi_llm.data.store import Manifest, Shard, read_shard
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.models import LoadedModel, load_model
from jacobi_llm.infer.near_tie import FP32_BOUND
from jacobi_llm.infer.rule import FinishReason, first_wrong


@dataclass
class Rerun:
    """What recomputing a sample gave.

    Attributes:
        num_trajectories, num_blocks, num_states: recomputed.
        num_differing: blocks whose states are not the stored ones.
        num_explained: those of them that rounding explains (float32), or that are only counted (bfloat16).
    """

    num_trajectories: int = 0
    num_blocks: int = 0
    num_states: int = 0
    num_differing: int = 0
    num_explained: int = 0


@dataclass
class Report:
    """What was found.

    Attributes:
        num_shards, num_trajectories, num_blocks, num_states: that could be read.
        num_other_fixed_points: blocks whose fixed point is not y*'s tokens.
        num_time_order_breaks: blocks in which a final token changed; a fault unless bfloat16 rounding allows it.
        faults: one line each.
        rerun: None when none was asked for.
    """

    num_shards: int = 0
    num_trajectories: int = 0
    num_blocks: int = 0
    num_states: int = 0
    num_other_fixed_points: int = 0
    num_time_order_breaks: int = 0
    faults: list[str] = field(default_factory=list)
    rerun: Rerun | None = None


def run(recipe: Recipe, options: Options) -> int:
    """``jacobi-data validate``; the exit code is 0 when there is no fault.

    Raises:
        UsageError: no trajectory set there.
        RunError: a manifest that cannot be read, or the faults, one line each.
    """
    folder = Path(recipe.stats.path).expanduser()
    manifest = Manifest.read(folder)
    report, sample = check_set(folder, manifest, recipe.stats.rerun)
    if recipe.stats.rerun:
        try:
            _rerun(manifest, sample, recipe.engine, report)
        except JacobiError as error:
            report.faults += [f"rerun: {line}" for line in error.faults]
    if options.json:
        print(json.dumps({"path": str(folder), "ok": not report.faults, **asdict(report)}, ensure_ascii=False))
    else:
        print(_summary(str(folder), manifest, report))
    if report.faults:
        raise RunError(report.faults)
    return 0


def check_set(folder: Path, manifest: Manifest, num_samples: int = 0) -> tuple[Report, list[Trajectory]]:
    """Everything that needs no model.

    Returns:
        The report, and ``num_samples`` trajectories without a fault (or all, if fewer): those with fixed points other
        than y* first, then a draw that is the same for every run.
    """
    report = Report()
    sample: list[Trajectory] = []
    seen: Counter[tuple[str, int, int]] = Counter()
    skipped_before: set[int] = set()
    if not manifest.is_complete:
        report.faults.append(f"{folder}: {len(manifest.shards)} of {manifest.num_shards} shards; {manifest.remedy}")
    for number in sorted(manifest.shards):
        shard = manifest.shards[number]
        try:
            rows = read_shard(folder, shard, manifest.remedy)
        except RunError as error:
            report.faults += error.faults
            continue
        report.num_shards += 1
        seen.update((row.source, row.source_index, row.window) for row in rows)
        if not manifest.parents:
            report.faults += _share_faults(shard, number, rows, manifest, skipped_before)
        report.faults += _count_faults(shard, rows)
        for row in rows:
            faults = [*check_trajectory(row, manifest.settings), *_side_faults(row, manifest)]
            report.faults += [f"{shard.file}: {fault}" for fault in faults]
            _count(row, report, is_exact=_dtype_of(manifest) is not Dtype.BFLOAT16)
            if not faults:
                sample.append(row)
        sample = sorted(sample, key=_sample_key)[:num_samples]
    report.faults += _parent_faults(folder, manifest)
    report.faults += [
        f"source {source}, source index {index}, window {window}: {count} times in the set"
        for (source, index, window), count in seen.items()
        if count > 1
    ]
    return report, sample


def _share_faults(
    shard: Shard, number: int, rows: Sequence[Trajectory], manifest: Manifest, skipped_before: set[int]
) -> list[str]:
    """Whether a shard of a collected set accounts for each of its prompts once: a row per window, or a reason."""
    faults = []
    skipped = [index for indices in shard.skipped.values() for index in indices]
    collected = {row.source_index for row in rows}
    size, windows = manifest.settings.get("shard_size"), manifest.windows
    if len(rows) != len(collected) * len(windows):
        faults.append(f"{shard.file}: {len(rows)} trajectories of {len(collected)} prompts at windows {windows}")
    if number < manifest.num_shards - 1 and len(collected) + len(skipped) != size:
        faults.append(
            f"{shard.file}: {len(collected)} prompts + {len(skipped)} skipped ones, collect.shard_size is {size}"
        )
    again = sorted(set(skipped) & (collected | skipped_before)) + sorted(collected & skipped_before)
    faults += [f"{shard.file}: source index {index} is skipped, and in the set once more" for index in again]
    skipped_before.update(skipped)
    return faults


def _count_faults(shard: Shard, rows: Sequence[Trajectory]) -> list[str]:
    """Whether the figures of a shard are those of its rows, where it has any."""
    num_tokens = sum(len(row.completion_ids) for row in rows)
    if shard.num_block_passes and shard.num_completion_tokens != num_tokens:
        return [f"{shard.file}: {num_tokens} completion tokens, the manifest says {shard.num_completion_tokens}"]
    return []


def _parent_faults(folder: Path, manifest: Manifest) -> list[str]:
    """Whether a set that was made of others has the rows that it took from them.

    An import that was told to skip bad records has fewer, and says why in ``bad_input``.
    """
    if not manifest.parents:
        return []
    num_taken = sum(int(parent.get("num_rows_taken", 0)) for parent in manifest.parents)
    if manifest.num_rows == num_taken or (manifest.num_rows < num_taken and manifest.bad_input):
        return []
    names = ", ".join(str(parent.get("name")) for parent in manifest.parents)
    return [f"{folder}: {manifest.num_rows} trajectories, but {num_taken} were taken from {names}"]


def _side_faults(row: Trajectory, manifest: Manifest) -> list[str]:
    """Whether a row of a split set is on its side; a group file is not there to ask."""
    if len(manifest.parents) != 1 or manifest.parents[0].get("side") not in SIDES:
        return []
    how = manifest.parents[0].get("split", {})
    if how.get("groups") is not None:
        return []
    config = SplitConfig.model_validate({key: how[key] for key in ("heldout_share", "by", "seed") if key in how})
    side = side_of(row, config, key_function(config))
    return [] if side == manifest.parents[0]["side"] else [f"trajectory {row.id}: belongs to the set {side}"]


def check_trajectory(trajectory: Trajectory, settings: dict[str, Any]) -> list[str]:
    """Faults of one trajectory, one line each.

    Args:
        trajectory: as it was read.
        settings: of the manifest: what it was collected with.
    """
    try:
        trajectory.check()
    except RunError as error:
        # Without sound blocks nothing else can be told.
        return error.faults
    name = f"trajectory {trajectory.id}"
    faults = []
    completion = trajectory.completion_ids
    stops = set(settings.get("eos_token_ids", ()))
    early = next((i for i, token_id in enumerate(completion[:-1]) if token_id in stops), None)
    if early is not None:
        faults.append(f"{name}: tokens after the end-of-sequence token at {early}")
    elif (trajectory.finish_reason == FinishReason.STOP) != (completion[-1] in stops):
        faults.append(f"{name}: finish reason {trajectory.finish_reason}, but the last token says otherwise")
    if trajectory.window not in settings.get("window", ()):
        faults.append(f"{name}: window {trajectory.window}, the manifest says {settings.get('window')}")
    if settings.get("target_source", trajectory.target_source) != trajectory.target_source:
        faults.append(
            f"{name}: target_source {trajectory.target_source.value}, the manifest says {settings['target_source']}"
        )
    for key, ids in (("max_tokens", completion), ("max_prompt_tokens", trajectory.prompt_ids)):
        if len(ids) > settings.get(key, len(ids)):
            faults.append(f"{name}: {len(ids)} tokens, collect.{key} is {settings[key]}")
    dtype = settings.get("dtype")
    for number, block in enumerate(trajectory.blocks):
        where = f"{name}, block {number}"
        if dtype == Dtype.FLOAT64 and trajectory.target_source is TargetSource.MODEL and block.fixed_point is not None:
            faults.append(f"{where}: a fixed point other than y*, which the model decoded itself")
        j = first_forgotten(trajectory, block)
        if j is not None:
            faults.append(f"{where}: state {j} loses tokens that state {j - 1} had right; states are not in time order")
        elif dtype != Dtype.BFLOAT16 and (j := first_unsettled(trajectory, block)) is not None:
            faults.append(f"{where}: state {j} changes a token that was final; states are not in time order")
    return faults


def first_forgotten(trajectory: Trajectory, block: Block) -> int | None:
    """Index of the first state with fewer leading tokens of y* than the one before it, where y* was decoded.

    Holds in every precision: the collector keeps tokens that equal a y* the model decoded.
    """
    if trajectory.target_source is TargetSource.GIVEN:
        return None
    target = trajectory.target_of(block)
    rights = [first_wrong(state, target) for state in [*block.states, trajectory.fixed_point_of(block)]]
    return next((j for j in range(1, len(rights)) if rights[j] < rights[j - 1]), None)


def first_unsettled(trajectory: Trajectory, block: Block) -> int | None:
    """Index of the first state that changes a final token: one that no token before it had changed when it was written.

    Every iteration makes at least one more token final.
    """
    states = [*block.states, trajectory.fixed_point_of(block)]
    num_final = 0
    for j in range(1, len(states)):
        unchanged = first_wrong(states[j - 1], states[j])
        if unchanged < num_final:
            return j
        num_final = unchanged + 1
    return None


def rerun_trajectory(
    trajectory: Trajectory, engine: LLMEngine, loaded: LoadedModel, settings: BlockSettings
) -> list[StateDifference]:
    """Iterate the blocks of one trajectory again, each from the stored prefix; returns where states differ."""
    completion = trajectory.completion_ids
    again = run_sequential(
        CachedPredictor(engine),
        trajectory.prompt_ids,
        trajectory.source_index,
        settings,
        completion,
        trajectory.target_source,
    )
    differences = []
    for stored, rerun in zip(trajectory.blocks, again.blocks, strict=True):
        prefix_ids = [*trajectory.prompt_ids, *completion[: stored.start]]
        target = trajectory.target_of(stored)
        difference = first_state_difference(loaded.model, prefix_ids, stored, rerun, target)
        if difference is not None:
            differences.append(difference)
    return differences


def block_settings(settings: dict[str, Any]) -> dict[int, BlockSettings]:
    """What the states of a set depend on, from its manifest, by window.

    Raises:
        RunError: the manifest does not say.
    """
    try:
        known = {key: settings[key] for key in CollectConfig.model_fields if key in settings}
        config = CollectConfig.model_validate(known)
        return {window: BlockSettings.of(config, window, settings["eos_token_ids"]) for window in config.window}
    except (KeyError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise RunError(f"the manifest's settings cannot be used ({reason})") from error


def _rerun(manifest: Manifest, sample: Sequence[Trajectory], config: EngineConfig, report: Report) -> None:
    if manifest.parents:
        raise RunError("the set was made of others, each with settings of its own; rerun those")
    settings = block_settings(manifest.settings)
    dtype = _dtype_of(manifest)
    is_sampled = bool(manifest.settings.get("temperature"))
    loaded = load_model(str(manifest.settings.get("model")), dtype=dtype)
    if model_sha256(loaded.model) != manifest.settings.get("model_sha256"):
        report.faults.append(f"rerun: the weights of {loaded.name} are not those that the set was collected with")
        return
    engine = LLMEngine(loaded, config)
    counts = report.rerun = Rerun()
    for trajectory in sample:
        differences = rerun_trajectory(trajectory, engine, loaded, settings[trajectory.window])
        counts.num_trajectories += 1
        counts.num_blocks += len(trajectory.blocks)
        counts.num_states += sum(len(block.states) for block in trajectory.blocks)
        counts.num_differing += len(differences)
        for found in differences:
            is_near = found.gap < FP32_BOUND or is_sampled
            if dtype is Dtype.BFLOAT16 or (dtype is Dtype.FLOAT32 and is_near):
                counts.num_explained += 1
            else:
                report.faults.append(
                    f"rerun: trajectory {trajectory.id}, block at {found.start}: state {found.iteration} differs at "
                    f"token {found.position} (the two best logits are {found.gap:.3g} apart)"
                )


def _sample_key(trajectory: Trajectory) -> tuple[bool, bytes]:
    is_plain = all(block.fixed_point is None for block in trajectory.blocks)
    return is_plain, hashlib.sha256(str(trajectory.source_index).encode()).digest()


def _dtype_of(manifest: Manifest) -> Dtype:
    try:
        return Dtype(manifest.settings["dtype"])
    except (KeyError, ValueError) as error:
        raise RunError(f"the manifest's settings name no dtype ({error})") from error


def _count(trajectory: Trajectory, report: Report, *, is_exact: bool) -> None:
    report.num_trajectories += 1
    for block in trajectory.blocks:
        report.num_blocks += 1
        report.num_states += len(block.states)
        report.num_other_fixed_points += block.fixed_point is not None
        if not is_exact and len({len(s) for s in [*block.states, trajectory.fixed_point_of(block)]}) == 1:
            report.num_time_order_breaks += first_unsettled(trajectory, block) is not None


def _summary(title: str, manifest: Manifest, report: Report) -> str:
    size = f"{report.num_trajectories} trajectories, {report.num_blocks} blocks, {report.num_states} states"
    lines = [
        f"{title}: {report.num_shards} of {manifest.num_shards} shards, {size}",
        f"fixed points other than y*: {report.num_other_fixed_points}",
    ]
    if report.num_time_order_breaks:
        lines.append(f"blocks in which rounding changed a final token: {report.num_time_order_breaks}")
    if report.rerun is not None:
        lines.append(
            f"rerun: {report.rerun.num_trajectories} trajectories, {report.rerun.num_blocks} blocks, "
            f"{report.rerun.num_states} states; {report.rerun.num_differing} blocks differ, "
            f"{report.rerun.num_explained} of them by rounding"
        )
    lines.append(counted(len(report.faults), "fault") if report.faults else "ok")
    return "\n".join(lines)
