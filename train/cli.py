"""``jacobi-train``: trajectories in, a checkpoint out."""

from __future__ import annotations

from collections.abc import Sequence

from jacobi_llm.configs import cli

RUN = cli.Command(
    name="run",
    summary="consistency training on collected trajectories",
    sections=("train", "objective", "lora", "eval", "engine"),
    run="jacobi_llm.train.loop:run",
    example="jacobi-train run --config math --lr 1e-4 --output runs/train",
    supports_json=True,
    supports_dry_run=True,
    accepts_local_rank=True,
)

COMMANDS = (
    RUN,
    cli.Command(
        name="eval",
        summary="decode held-out prompts with the engine: tokens per forward pass and agreement",
        sections=("eval", "train", "engine"),
        run="jacobi_llm.train.evaluation:run",
        example="jacobi-train eval --config math --num-prompts 16 --train.output runs/train",
        supports_json=True,
    ),
    cli.Command(
        name="merge",
        summary="write a folder that transformers can load, LoRA merged",
        sections=("train",),
        run="jacobi_llm.train.export:run",
        example="jacobi-train merge --output runs/train",
        supports_json=True,
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the console command; returns its exit code."""
    return cli.main("jacobi-train", "Trajectories in, a checkpoint out.", COMMANDS, argv)
