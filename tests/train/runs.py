"""Tiny trainings: made-up trajectories, a recipe, and a run of the trainer inside this process."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jacobi_llm.configs.cli import Options
from jacobi_llm.configs.schema import Recipe, TargetSource
from jacobi_llm.data.collector import tokenizer_sha256
from jacobi_llm.data.record import Block, Trajectory
from jacobi_llm.data.store import Manifest, Shard, write_shard
from jacobi_llm.train import loop
from tests.tiny_models import EOS_TOKEN_IDS, SPECIAL_TOKENS, VOCAB_SIZE, tiny_tokenizer

EOS = EOS_TOKEN_IDS[1]
UNBROKEN_STEPS = 12
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Of a metrics record, what does not depend on the clock or the machine.
NUMBERS = ("step", "loss", "ar_loss", "consistency_loss", "grad_norm", "num_rows", "num_tokens", "lr")


def make_trajectory(number: int, *, window: int = 8, length: int | None = None, with_eos: bool = False) -> Trajectory:
    """A random completion with states that get right from the left, as Jacobi iteration makes them."""
    draw = random.Random(f"trajectory {number}")

    def tokens(count: int) -> list[int]:
        return [draw.randrange(len(SPECIAL_TOKENS), VOCAB_SIZE) for _ in range(count)]

    prompt, completion = tokens(draw.randrange(3, 12)), tokens(length or draw.randrange(10, 34))
    if with_eos:
        completion[-1] = EOS
    blocks = []
    for start in range(0, len(completion), window):
        target = completion[start : start + window]
        rights = sorted({0, *(draw.randrange(len(target)) for _ in range(3))})
        states = [target[:right] + [(token + 1) % VOCAB_SIZE for token in target[right:]] for right in rights]
        blocks.append(Block(start, states, None))
    finish = "stop" if with_eos else "length"
    return Trajectory(f"t{number}", number, "test", prompt, completion, finish, window, TargetSource.MODEL, blocks)


def make_trajectories(count: int = 26, *, window: int = 8) -> list[Trajectory]:
    return [make_trajectory(number, window=window, with_eos=number % 3 == 0) for number in range(count)]


def write_set(folder: Path, rows: Sequence[Trajectory], **settings: Any) -> Path:
    """Store trajectories as a finished set in two shards."""
    folder.mkdir(parents=True, exist_ok=True)
    known = {"window": [rows[0].window], "tokenizer_sha256": tokenizer_sha256(tiny_tokenizer())}
    manifest = Manifest({**known, **settings}, {}, num_shards=2)
    for number, part in enumerate((rows[: len(rows) // 2], rows[len(rows) // 2 :])):
        name, digest = write_shard(folder, number, part)
        manifest.shards[number] = Shard(name, len(part), digest)
    manifest.write(folder)
    return folder


def settings_for(checkpoint: Path, data: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """Flat settings ``section.key`` of a small run; ``changes`` spell the dot as two underscores."""
    prompts = data.parent / "heldout.jsonl"
    if not prompts.exists():
        lines = [json.dumps({"id": f"p{i}", "prompt": "word " * (i + 1)}) + "\n" for i in range(2)]
        prompts.write_text("".join(lines), encoding="utf-8")
    settings: dict[str, Any] = {
        "train.model": str(checkpoint),
        "train.data": str(data),
        "train.output": str(output),
        "train.dtype": "float32",
        "train.max_steps": 10,
        "train.global_batch_size": 8,
        "train.micro_batch_size": 4,
        "train.max_length": 128,
        "train.lr": 1e-3,
        "train.log_every_steps": 1,
        "train.num_threads": 1,
        "eval.input": str(prompts),
        "eval.split": "all",
        "eval.num_prompts": 2,
        "eval.window": 4,
        "eval.max_tokens": 5,
        "engine.kv_memory_mib": 1,
    }
    return {**settings, **{key.replace("__", "."): value for key, value in changes.items()}}


def recipe_of(settings: dict[str, Any]) -> Recipe:
    sections: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return Recipe.model_validate(sections)


def train(settings: dict[str, Any], *, is_json: bool = False) -> int:
    """Run the trainer in this process, as a group of one."""
    try:
        return loop.run(recipe_of(settings), Options(json=is_json))
    finally:
        for name in LAUNCHER_VARIABLES:
            os.environ.pop(name, None)


def records(folder: Path, kind: str = "train") -> list[dict[str, Any]]:
    """What a run logged, without times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    chosen = [line for line in lines if line["kind"] == kind]
    return [{key: line[key] for key in NUMBERS} for line in chosen] if kind == "train" else chosen


def furthest(some: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]], key: str = "loss") -> float:
    """Largest relative difference of two runs."""
    return max(abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(some, others, strict=True))
