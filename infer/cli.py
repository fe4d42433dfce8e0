"""``jacobi-infer``: requests in, tokens out."""

from __future__ import annotations

from collections.abc import Sequence

from jacobi_llm.configs import cli

COMMANDS = (
    cli.Command(
        name="generate",
        summary="complete one prompt, or every line of a JSONL file",
        sections=("generate", "engine"),
        run="jacobi_llm.infer.generate:run",
        example="jacobi-infer generate --prompt 'What is 12 times 7?' --window 16 --json",
        supports_json=True,
        supports_dry_run=True,
    ),
    cli.Command(
        name="bench",
        summary="compare modes, windows and batch sizes over a prompt file",
        sections=("bench", "engine"),
        run="jacobi_llm.infer.bench:run",
        example="jacobi-infer bench --input prompts.jsonl --windows 1,8,16 --batch-sizes 1,4",
        supports_json=True,
        supports_dry_run=True,
    ),
    cli.Command(
        name="env",
        summary="what this machine and installation offer",
        sections=("engine",),
        run="jacobi_llm.infer.environment:run",
        example="jacobi-infer env --json",
        supports_json=True,
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the console command; returns its exit code."""
    return cli.main("jacobi-infer", "Requests in, tokens out: the batched Jacobi engine.", COMMANDS, argv)
