"""jacobi-train run: consistency training, from trajectories to a checkpoint.

One update: forward and backward of this rank's micro-batches, every term a mean over its own tokens of the global
batch, then one optimizer step. There is one backward per micro-batch, whatever the objective.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from jacobi_llm.configs.cli import Options
from jacobi_llm.configs.errors import RunError
from jacobi_llm.configs.loader import save_resolved
from jacobi_llm.configs.schema import Recipe
from jacobi_llm.data.store import Manifest, read_trajectories
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.train import checkpointing
from jacobi_llm.train.data_order import DataOrder, Ranks
from jacobi_llm.train.deepspeed_engine import TrainingModel, build, init_distributed, learning_rate
from jacobi_llm.train.export import export_final
from jacobi_llm.train.forward import loss_sums
from jacobi_llm.train.heldout import HeldOut, acceptance_by_depth, repetition

EXIT_BY_SIGNAL = {signal.SIGINT: 130, signal.SIGTERM: 143}


@dataclass(frozen=True)
class StepReport:
    """One update, as logged.

    Attributes:
        ar_loss: mean of -log p(y*) over the global batch (nats).
        consistency_loss: mean KL over the student rows (nats).
        num_rows, num_tokens: packed rows and supervised completion tokens of the global batch.
    """

    step: int
    loss: float
    ar_loss: float
    consistency_loss: float
    num_rows: int
    num_tokens: int


def run(recipe: Recipe, options: Options) -> int:
    """Train, or go on from the newest complete checkpoint of ``train.output``."""
    if options.dry_run:
        print(_plan(recipe), file=sys.stderr)
        return 0
    manifest = Manifest.read(Path(recipe.train.data))
    trajectories = list(read_trajectories(Path(recipe.train.data)))
    ranks = init_distributed()
    training = build(recipe.train, recipe.lora, ranks)
    pad_token_id = training.loaded.tokenizer.pad_token_id
    order = DataOrder(
        trajectories,
        recipe.train,
        recipe.objective,
        ranks,
        eos_token_ids=training.loaded.eos_token_ids,
        pad_token_id=0 if pad_token_id is None else int(pad_token_id),
    )
    return Trainer(recipe, training, order, ranks, manifest.data_sha256, is_json=options.json).run()


class Trainer:
    """Holds a run together: updates, log, checkpoints, held-out decoding, final export."""

    def __init__(
        self,
        recipe: Recipe,
        training: TrainingModel,
        order: DataOrder,
        ranks: Ranks,
        data_sha256: str,
        *,
        is_json: bool = False,
    ) -> None:
        self.recipe = recipe
        self.training = training
        self.order = order
        self.ranks = ranks
        self.data_sha256 = data_sha256
        self.is_json = is_json
        self.folder = Path(recipe.train.output)
        self.num_tokens_trained = 0
        self._received: int | None = None
        self._saved_step = -1

    def run(self) -> int:
        """Run to the end; returns the exit code (130 or 143 when a signal ended it, after a save)."""
        config = self.recipe.train
        if self.ranks.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_resolved(self.recipe, self.folder)
        resumed = checkpointing.resume(self.training.engine, self.folder, config.resume, self.ranks)
        first = 0
        if resumed:
            first = self._saved_step = resumed.step
            self.num_tokens_trained = int(resumed.client_state["num_tokens_trained"])
            self._say(f"resumed {resumed.path} at step {first} of {self.order.num_steps}")
            self._cut_metrics(first)
        handlers = {number: signal.signal(number, self._on_signal) for number in EXIT_BY_SIGNAL}
        try:
            if first == 0 and config.eval_every_steps:
                self.evaluate(0)
            for step in range(first, self.order.num_steps):
                self._update_and_log(step)
                if self._must_stop():
                    self._save(step + 1)
                    self._say(f"stopped by a signal; saved at step {step + 1}, run the same command to go on")
                    return EXIT_BY_SIGNAL[signal.Signals(self._received or signal.SIGTERM)]
                if (step + 1) % config.save_every_steps == 0:
                    self._save(step + 1)
                if config.eval_every_steps and (step + 1) % config.eval_every_steps == 0:
                    self.evaluate(step + 1)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        self._finish()
        return 0

    def update(self, step: int) -> StepReport:
        """One update of the weights.

        Raises:
            RunError: the loss is not finite; the weights are as they were before.
        """
        engine = self.training.engine
        engine.train()
        batches = self.order.micro_batches(step)
        counts = self._sum_over_ranks(
            [
                sum(batch.num_ar_tokens for batch in batches),
                sum(batch.num_consistency_tokens for batch in batches),
                sum(batch.num_rows for batch in batches),
            ]
        )
        num_ar, num_consistency = max(counts[0], 1.0), max(counts[1], 1.0)
        objective = self.recipe.objective
        # DeepSpeed averages over micro-batches and ranks; the sums below are already means over the global batch.
        undo_mean = len(batches) * self.ranks.world_size
        sums = [0.0, 0.0]
        for group in engine.optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe.train, step, self.order.num_steps)
        for number, batch in enumerate(batches):
            losses = loss_sums(engine, self.training.loaded.model, batch, engine.device)
            loss = objective.ar_weight * losses.ar / num_ar
            if objective.consistency_weight:
                loss = loss + objective.consistency_weight * losses.consistency / num_consistency
            engine.backward(loss * undo_mean)
            sums[0] += float(losses.ar.detach())
            sums[1] += float(losses.consistency.detach())
            if number + 1 == len(batches):
                sums = self._sum_over_ranks(sums)
                self._check_finite(step, sums)
            engine.step()
        ar, consistency = sums[0] / num_ar, sums[1] / num_consistency
        self.num_tokens_trained += int(counts[0])
        total = objective.ar_weight * ar + objective.consistency_weight * consistency
        return StepReport(step + 1, total, ar, consistency, int(counts[2]), int(counts[0]))

    def evaluate(self, step: int) -> dict[str, Any]:
        """Decode the held-out prompts at the configured window; every rank takes part (ZeRO-3 gathers in lockstep)."""
        config = self.recipe.eval
        heldout = HeldOut.read(config, self.training.loaded)
        engine = self._decoder()
        measured = heldout.decode(engine, window=config.window)
        record = {
            "kind": "eval",
            "step": step,
            "window": config.window,
            "tokens_per_forward": round(measured.tpf, 4),
            "repetition": round(repetition(measured.outputs), 4),
            "share_correct": heldout.share_correct(measured.outputs, self.training.loaded.tokenizer),
            "acceptance_by_depth": [
                round(share, 4) for share in acceptance_by_depth(measured.outputs, config.window, config.max_tokens)
            ],
        }
        self._log(record)
        self._say(
            f"held-out step {step}: TPF {measured.tpf:.3f} at window {config.window} over {len(measured.outputs)} "
            f"prompts, repetition {record['repetition']}"
        )
        return record

    def _decoder(self) -> LLMEngine:
        model = self.training.loaded.model.eval()
        return LLMEngine(replace(self.training.loaded, model=model), self.recipe.engine)

    def _update_and_log(self, step: int) -> None:
        started_s = time.perf_counter()
        report = self.update(step)
        elapsed_s = time.perf_counter() - started_s
        if report.step % self.recipe.train.log_every_steps and report.step != self.order.num_steps:
            return
        left = self.order.num_steps - report.step
        grad_norm = self.training.engine.get_global_grad_norm()
        record = {
            "kind": "train",
            **asdict(report),
            "lr": learning_rate(self.recipe.train, step, self.order.num_steps),
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "rows_per_s": report.num_rows / elapsed_s,
            "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
            "eta_s": left * elapsed_s,
        }
        self._log(record)
        self._say(
            f"step {report.step}/{self.order.num_steps} loss {report.loss:.4f} ar {report.ar_loss:.4f} "
            f"consistency {report.consistency_loss:.4f} lr {record['lr']:.2e} {record['rows_per_s']:.0f} rows/s "
            f"{record['memory_mib']} MiB, {record['eta_s']:.0f} s left"
        )

    def _finish(self) -> None:
        record = self.evaluate(self.order.num_steps)
        if self._saved_step != self.order.num_steps:
            self._save(self.order.num_steps)
        final = export_final(self.recipe, self.training, self.ranks, record, self.data_sha256, self.num_tokens_trained)
        self._say(f"{final}: loads with transformers; jacobi-infer generate --model {final}")
        if self.is_json and self.ranks.rank == 0:
            print(json.dumps({**record, "output": str(final), "tokens_trained": self.num_tokens_trained}))

    def _save(self, step: int) -> None:
        checkpointing.save(
            self.training.engine,
            self.folder,
            step,
            {"num_tokens_trained": self.num_tokens_trained},
            self.ranks,
            self.recipe.train.keep_checkpoints,
        )
        self._saved_step = step

    def _check_finite(self, step: int, sums: list[float]) -> None:
        if not all(torch.isfinite(torch.tensor(sums))):
            raise RunError(
                f"train: the loss of step {step + 1} is not finite (ar {sums[0]}, consistency {sums[1]}); the weights "
                f"were not updated. Lower train.lr or train in float32; go on from {self.folder / 'checkpoints'}"
            )

    def _sum_over_ranks(self, values: list[float] | list[int]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self.training.engine.device)
        dist.all_reduce(tensor)
        result: list[float] = tensor.tolist()
        return result

    def _must_stop(self) -> bool:
        return self._sum_over_ranks([float(self._received is not None)])[0] > 0

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._received is not None:
            raise KeyboardInterrupt
        self._received = number

    def _log(self, record: dict[str, Any]) -> None:
        if self.ranks.rank == 0:
            with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def _cut_metrics(self, step: int) -> None:
        """Drop what a killed run logged after the checkpoint, so that every step stands once."""
        path = self.folder / "metrics.jsonl"
        if self.ranks.rank == 0 and path.exists():
            records = []
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    records.append(json.loads(line))
                except ValueError:
                    continue
            kept = [json.dumps(record) + "\n" for record in records if record["step"] <= step]
            path.write_text("".join(kept), encoding="utf-8")

    def _say(self, line: str) -> None:
        if self.ranks.rank == 0:
            print(line, file=sys.stderr, flush=True)


def _plan(recipe: Recipe) -> str:
    train, objective = recipe.train, recipe.objective
    manifest = Manifest.read(Path(train.data))
    num_rows = sum(shard.num_rows for shard in manifest.shards.values())
    steps = train.max_steps or -(-int(train.epochs * num_rows) // train.global_batch_size)
    return (
        f"would train {train.model} ({train.tune.value}, {train.dtype.value}, DeepSpeed {train.deepspeed}) on {num_rows} "
        f"trajectories of {train.data}: {objective.name.value}, {steps} updates of {train.global_batch_size} completions, "
        f"lr {train.lr:g}; output {train.output}"
    )
