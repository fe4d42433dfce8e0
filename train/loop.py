"""jacobi-train run: consistency training, from trajectories to a checkpoint.

One update: forward and backward of this rank's micro-batches, every term a mean over its own tokens of the global
batch, then one optimizer step. There is one backward per micro-batch, whatever the objective.

A run can be ended at any moment; the same command goes on from the newest complete checkpoint, and in float32 with one
thread the losses are those of an unbroken run, bit for bit. ``metrics.jsonl`` holds every step once.
"""

from __future__ import annotations

import json
import math
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from jacobi_llm.configs.checkpoint import CheckpointMode, JacobiCheckpointConfig, load_checkpoint_config
from jacobi_llm.configs.cli import Options
from jacobi_llm.configs.errors import JacobiError, RunError, UsageError
from jacobi_llm.configs.files import make_folder, write_atomically
from jacobi_llm.configs.loader import save_resolved
from jacobi_llm.configs.schema import Auto, CompileMode, LrSchedule, Recipe, Tune
from jacobi_llm.data.collector import tokenizer_sha256
from jacobi_llm.data.record import Trajectory
from jacobi_llm.data.store import Manifest, read_trajectories
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.models import LoadedModel
from jacobi_llm.train import checkpointing
from jacobi_llm.train.batch import Batch
from jacobi_llm.train.checkpointing import Checkpoint, RankError
from jacobi_llm.train.data_order import DataOrder, Ranks, num_updates, split_usable
from jacobi_llm.train.deepspeed_engine import (
    TrainingModel,
    build,
    deepspeed_config,
    init_distributed,
    learning_rate,
    num_warmup_steps,
    optimizer_step,
)
from jacobi_llm.train.export import FINAL, export_final
from jacobi_llm.train.forward import loss_sums
from jacobi_llm.train.heldout import HeldOut, acceptance_by_depth, repetition

EXIT_BY_SIGNAL = {signal.SIGINT: 130, signal.SIGTERM: 143}
METRICS = "metrics.jsonl"
# They change memory, speed or what is printed, and the numbers at most by rounding.
FREE_SETTINGS = frozenset(
    (
        *("data", "output", "resume", "deepspeed", "epochs", "max_steps", "warmup_ratio", "micro_batch_size"),
        *("gradient_checkpointing", "num_threads"),
        *("log_every_steps", "save_every_steps", "keep_checkpoints", "eval_every_steps"),
    )
)


@dataclass(frozen=True)
class StepReport:
    """One update, as logged.

    Attributes:
        step: updates done, this one included.
        loss: weighted sum of the two below.
        ar_loss: mean of -log p(y*) over the global batch (nats).
        consistency_loss: mean KL over the student rows (nats).
        grad_norm: global norm of the gradient before clipping.
        num_rows, num_tokens: packed rows and supervised completion tokens of the global batch.
    """

    step: int
    loss: float
    ar_loss: float
    consistency_loss: float
    grad_norm: float
    num_rows: int
    num_tokens: int


def run(recipe: Recipe, options: Options) -> int:
    """Train, or go on from the newest complete checkpoint of ``train.output``."""
    if options.dry_run:
        print(json.dumps({"plan": _plan(recipe)}) if options.json else _plan(recipe))
        return 0
    try:
        return _train(recipe, options)
    except RankError:
        raise
    except JacobiError as error:
        # Every rank meets the same fault: the first one tells.
        if os.environ.get("RANK", "0") != "0":
            return error.exit_code
        raise
    except RuntimeError as error:
        if checkpointing.PEER_ENDED not in str(error):
            raise
        raise RunError("train: another rank has ended; see its message") from error


def _train(recipe: Recipe, options: Options) -> int:
    data = Path(recipe.train.data)
    manifest = Manifest.read(data)
    trajectories = list(read_trajectories(data))
    ranks = init_distributed()
    config = deepspeed_config(recipe.train, ranks)
    training = build(recipe.train, recipe.lora, config)
    check_tokenizer(recipe, training.loaded, manifest)
    usable, unusable = split_usable(trajectories, recipe.train.max_length, training.loaded.max_context)
    pad_token_id = training.loaded.tokenizer.pad_token_id
    order = DataOrder(
        usable,
        recipe.train,
        recipe.objective,
        ranks,
        eos_token_ids=training.loaded.eos_token_ids,
        pad_token_id=0 if pad_token_id is None else int(pad_token_id),
    )
    trainer = Trainer(recipe, training, order, ranks, manifest, is_json=options.json)
    trainer.say_skipped(unusable)
    return trainer.run()


class Trainer:
    """Holds a run together: updates, log, checkpoints, held-out decoding, final export."""

    def __init__(
        self,
        recipe: Recipe,
        training: TrainingModel,
        order: DataOrder,
        ranks: Ranks,
        manifest: Manifest,
        *,
        is_json: bool = False,
    ) -> None:
        self.recipe = recipe
        self.training = training
        self.order = order
        self.ranks = ranks
        self.manifest = manifest
        self.is_json = is_json
        self.folder = Path(recipe.train.output)
        # Read now, so that a fault in it costs no training.
        self.heldout = HeldOut.read(recipe.eval, training.loaded)
        self.num_tokens_trained = 0
        self._settings = run_settings(recipe, manifest.data_sha256, training.zero_stage, order.num_steps)
        self._received: signal.Signals | None = None
        self._saved_step = -1

    def run(self) -> int:
        """Run to the end; returns the exit code (130 or 143 when a signal ended it, after a save)."""
        first = self._resume()
        if first == self.order.num_steps and self._is_exported():
            self._say(f"{self.folder / FINAL}: this run is finished ({first} updates); nothing to do")
            self._print_result(self._evaluated(first))
            return 0
        config = self.recipe.train
        with self._signals_kept():
            for step in range(first, self.order.num_steps):
                if config.eval_every_steps and step % config.eval_every_steps == 0:
                    self._evaluated(step)
                self._update_and_log(step)
                received = self._signal_of_any_rank()
                if received or (step + 1) % config.save_every_steps == 0 or step + 1 == self.order.num_steps:
                    self._save(step + 1)
                if received:
                    self._say(f"{received.name}: saved at step {step + 1}; run the same command to go on")
                    return EXIT_BY_SIGNAL[received]
        record = self._evaluated(self.order.num_steps)
        final = export_final(self.recipe, self.training, self.ranks, self._about(record))
        self._say(f"{final}: loads with transformers; jacobi-infer generate --model {final}")
        self._print_result(record)
        return 0

    def update(self, step: int) -> StepReport:
        """One update of the weights.

        Raises:
            RunError: the loss or the gradient is not finite.
        """
        engine = self.training.engine
        engine.train()
        # For dropout; a function of the step, so that resuming needs no state of a generator.
        torch.manual_seed(random.Random(f"{self.recipe.train.seed}/{step}/{self.ranks.rank}").getrandbits(63))
        for group in engine.optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe.train, step, self.order.num_steps)
        batches = self.order.micro_batches(step)
        num_ar, consistency_weight, num_rows = self._counts(batches)
        ar_sum, consistency_sum = self._backward(batches, num_ar, consistency_weight)
        ar, consistency = ar_sum / max(num_ar, 1), consistency_sum / (consistency_weight or 1.0)
        if not math.isfinite(ar + consistency):
            raise self._not_finite("loss", step, f"ar {ar}, consistency {consistency}")
        norm = optimizer_step(engine)
        if not math.isfinite(norm) or norm < 0:
            raise self._not_finite("gradient", step, f"its norm is {norm}")
        self.num_tokens_trained += num_ar
        objective = self.recipe.objective
        loss = objective.ar_weight * ar + objective.consistency_weight * consistency
        return StepReport(step + 1, loss, ar, consistency, norm, num_rows, num_ar)

    def evaluate(self, step: int) -> dict[str, Any]:
        """Decode the held-out prompts at the configured window; every rank takes part (ZeRO-3 gathers in lockstep)."""
        config = self.recipe.eval
        model = self.training.loaded.model.eval()
        # The weights change after every update: a compiled forward holds copies of them.
        settings = self.recipe.engine.model_copy(update={"compile": CompileMode.OFF, "batch_invariant": False})
        engine = LLMEngine(replace(self.training.loaded, model=model), settings)
        window = self._eval_window()
        measured = self.heldout.decode(engine, window=window)
        record = {
            "kind": "eval",
            "step": step,
            "window": window,
            "tokens_per_forward": round(measured.tpf, 4),
            "repetition": round(repetition(measured.outputs), 4),
            "share_correct": self.heldout.share_correct(measured.outputs, self.training.loaded.tokenizer),
            "acceptance_by_depth": [
                round(share, 4) for share in acceptance_by_depth(measured.outputs, window, config.max_tokens)
            ],
        }
        self._log(record)
        self._say(
            f"held-out step {step}: TPF {measured.tpf:.3f} at window {window} over {len(measured.outputs)} "
            f"prompts, repetition {record['repetition']}"
        )
        return record

    def _eval_window(self) -> int:
        """A fixed window: acceptance is counted by its depths, and ranks in lockstep cannot each choose their own."""
        window = self.recipe.eval.window
        if isinstance(window, Auto):
            window = max(self.manifest.windows, default=16)
        return window

    def say_skipped(self, unusable: list[Trajectory]) -> None:
        """Tell which trajectories are not trained on: those that do not fit, and those not collected yet."""
        if not self.manifest.is_complete:
            self._say(
                f"warning: {self.recipe.train.data}: {len(self.manifest.shards)} of {self.manifest.num_shards} shards "
                "are collected; training on these (the same jacobi-data collect goes on with the rest)"
            )
        if unusable:
            self._say(
                f"warning: {len(unusable)} of {len(unusable) + len(self.order.trajectories)} trajectories skipped: "
                f"longer than the model's context, or the prompt leaves no room for a block in train.max_length = "
                f"{self.recipe.train.max_length} (first: {unusable[0].id})"
            )

    def _resume(self) -> int:
        """Load the checkpoint that is asked for; returns the number of updates done."""
        found = checkpointing.find(self.folder, self.recipe.train.resume, self._settings, self.ranks)
        if found is None and (self.folder / FINAL).exists():
            raise UsageError(
                f"train.output: {self.folder} holds a trained model and no checkpoint to go on from; choose another "
                "folder or delete it"
            )
        if self.ranks.rank == 0:
            make_folder(self.folder, "train.output")
            save_resolved(self.recipe, self.folder)
            self._cut_metrics(found.step if found else 0)
        if found is None:
            return 0
        checkpointing.load(self.training.engine, found)
        self._saved_step = found.step
        self.num_tokens_trained = found.num_tokens_trained
        self._say(f"resumed {found.path} at step {found.step} of {self.order.num_steps}")
        return found.step

    def _counts(self, batches: list[Batch]) -> tuple[int, float, int]:
        """AR tokens, weight of the consistency rows, and rows of the global batch."""
        counts = self._sum_over_ranks(
            [
                sum(batch.num_ar_tokens for batch in batches),
                sum(batch.consistency_weight for batch in batches),
                sum(batch.num_rows for batch in batches),
            ]
        )
        return int(counts[0]), counts[1], int(counts[2])

    def _backward(self, batches: list[Batch], num_ar: int, consistency_weight: float) -> tuple[float, float]:
        """Accumulate the gradient of this update; returns the loss sums of the global batch."""
        engine, objective = self.training.engine, self.recipe.objective
        # DeepSpeed averages over micro-batches and ranks; the sums below are already means over the global batch.
        undo_mean = len(batches) * self.ranks.world_size
        sums = [0.0, 0.0]
        for number, batch in enumerate(batches):
            if number:
                engine.step()  # counts the micro-batch; weights change at the last one only
            losses = loss_sums(engine, self.training.loaded.model, batch, engine.device)
            loss = objective.ar_weight * losses.ar / max(num_ar, 1)
            loss = loss + objective.consistency_weight * losses.consistency / (consistency_weight or 1.0)
            engine.backward(loss * undo_mean)
            sums[0] += float(losses.ar.detach())
            sums[1] += float(losses.consistency.detach())
        ar_sum, consistency_sum = self._sum_over_ranks(sums)
        return ar_sum, consistency_sum

    def _update_and_log(self, step: int) -> None:
        started_s = time.perf_counter()
        report = self.update(step)
        elapsed_s = time.perf_counter() - started_s
        if report.step % self.recipe.train.log_every_steps and report.step != self.order.num_steps:
            return
        record = {
            "kind": "train",
            **asdict(report),
            "lr": learning_rate(self.recipe.train, step, self.order.num_steps),
            "rows_per_s": report.num_rows / elapsed_s,
            "memory_mib": _memory_mib(),
            "eta_s": (self.order.num_steps - report.step) * elapsed_s,
        }
        self._log(record)
        self._say(
            f"step {report.step}/{self.order.num_steps} loss {report.loss:.4f} ar {report.ar_loss:.4f} "
            f"consistency {report.consistency_loss:.4f} grad norm {report.grad_norm:.3f} lr {record['lr']:.2e} "
            f"{record['rows_per_s']:.0f} rows/s {record['memory_mib']} MiB, {record['eta_s']:.0f} s left"
        )

    def _evaluated(self, step: int) -> dict[str, Any]:
        """The held-out record of ``step``, from the log when it is there."""
        logged: list[dict[str, Any] | None] = [None]
        if self.ranks.rank == 0:
            records = [record for record in self._read_metrics() if record["kind"] == "eval" and record["step"] == step]
            logged = [records[-1] if records else None]
        if self.ranks.world_size > 1:
            dist.broadcast_object_list(logged)
        return logged[0] or self.evaluate(step)

    def _about(self, evaluation: dict[str, Any]) -> JacobiCheckpointConfig:
        return JacobiCheckpointConfig(
            mode=CheckpointMode.MERGED,
            window=max(self.manifest.windows, default=self._eval_window()),
            fill=self.recipe.eval.fill,
            acceptance_by_depth=evaluation["acceptance_by_depth"],
            objective=self.recipe.objective.name,
            data_sha256=self.manifest.data_sha256,
            base_model=self.recipe.train.model,
            tokens_trained=self.num_tokens_trained,
        )

    def _is_exported(self) -> bool:
        """Whether ``final/`` is the model of this very step; it appears complete or not at all."""
        about = load_checkpoint_config(self.folder / FINAL)
        return about is not None and about.tokens_trained == self.num_tokens_trained

    def _print_result(self, record: dict[str, Any]) -> None:
        if self.is_json and self.ranks.rank == 0:
            result = {**record, "output": str(self.folder / FINAL), "tokens_trained": self.num_tokens_trained}
            print(json.dumps(result))

    def _save(self, step: int) -> None:
        if self._saved_step != step:
            state = Checkpoint(step, self.num_tokens_trained, self.ranks.world_size, self._settings)
            keep = self.recipe.train.keep_checkpoints
            checkpointing.save(self.training.engine, self.folder, state, self.ranks, keep)
            self._saved_step = step

    def _not_finite(self, what: str, step: int, found: str) -> RunError:
        return RunError(
            f"train: the {what} of step {step + 1} is not finite ({found}); stopped, and nothing of it is saved. Lower "
            f"train.lr or train in float32; checkpoints are in {self.folder / checkpointing.FOLDER}"
        )

    def _sum_over_ranks(self, values: list[float] | list[int]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self.training.engine.device)
        dist.all_reduce(tensor)
        result: list[float] = tensor.tolist()
        return result

    @contextmanager
    def _signals_kept(self) -> Iterator[None]:
        """Within the block a signal is noted instead of ending the process."""
        handlers = {number: signal.signal(number, self._on_signal) for number in EXIT_BY_SIGNAL}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        # A launcher passes Ctrl-C on as SIGTERM after the SIGINT of the terminal: only a second SIGINT is impatience.
        if self._received is signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = self._received or signal.Signals(number)

    def _signal_of_any_rank(self) -> signal.Signals | None:
        """The signal that some rank has received, so that all stop at the same step."""
        numbers = sorted(EXIT_BY_SIGNAL)
        counts = self._sum_over_ranks([float(self._received == number) for number in numbers])
        return next((signal.Signals(number) for number, count in zip(numbers, counts, strict=True) if count), None)

    def _log(self, record: dict[str, Any]) -> None:
        if self.ranks.rank == 0:
            with (self.folder / METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def _read_metrics(self) -> list[dict[str, Any]]:
        path = self.folder / METRICS
        records = []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                records.append(json.loads(line))
            except ValueError:
                continue  # the last line of a killed run
        return records

    def _cut_metrics(self, step: int) -> None:
        """Drop what a killed run logged after the checkpoint, so that every step stands once."""
        kept = [json.dumps(record) + "\n" for record in self._read_metrics() if record["step"] <= step]
        write_atomically(self.folder / METRICS, "".join(kept))

    def _say(self, line: str) -> None:
        if self.ranks.rank == 0:
            print(line, file=sys.stderr, flush=True)


def run_settings(recipe: Recipe, data_sha256: str, zero_stage: int, num_steps: int) -> dict[str, Any]:
    """What the weights of a run depend on, by name: a checkpoint is resumed only by a run with the same.

    The number of updates counts where the learning rate depends on it: a run with a constant rate may be prolonged.
    """
    train = recipe.train.model_dump(mode="json")
    settings = {f"train.{key}": value for key, value in train.items() if key not in FREE_SETTINGS}
    settings |= {f"objective.{key}": value for key, value in recipe.objective.model_dump(mode="json").items()}
    if recipe.train.tune is Tune.LORA:
        settings |= {f"lora.{key}": value for key, value in recipe.lora.model_dump(mode="json").items()}
    settings |= {"train.data (sha256)": data_sha256, "ZeRO stage": zero_stage}
    settings["warm-up updates"] = num_warmup_steps(recipe.train, num_steps)
    if recipe.train.lr_schedule is not LrSchedule.CONSTANT:
        settings["updates"] = num_steps
    return settings


def check_tokenizer(recipe: Recipe, loaded: LoadedModel, manifest: Manifest) -> None:
    """Token ids must mean to the model what they meant to the one that made the trajectories.

    Raises:
        UsageError: the vocabularies differ.
    """
    there, here = manifest.settings.get("tokenizer_sha256"), tokenizer_sha256(loaded.tokenizer)
    if there is not None and there != here:
        raise UsageError(
            f"train.data: {recipe.train.data} was collected with another tokenizer (sha256 {str(there)[:12]}…, that of "
            f"{recipe.train.model} is {here[:12]}…); collect with the model that you train"
        )


def _memory_mib() -> int:
    """Peak memory of this process on the device that holds the weights (MiB)."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated() >> 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def _plan(recipe: Recipe) -> str:
    train, objective = recipe.train, recipe.objective
    num_rows = sum(shard.num_rows for shard in Manifest.read(Path(train.data)).shards.values())
    return (
        f"would train {train.model} ({train.tune.value}, {train.dtype.value}, DeepSpeed {train.deepspeed}) on "
        f"{num_rows} trajectories of {train.data}: {objective.name.value}, {num_updates(train, num_rows)} updates of "
        f"{train.global_batch_size} completions, lr {train.lr:g}; output {train.output}"
    )
