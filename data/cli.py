"""``jacobi-data``: prompts in, trajectories out."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from jacobi_llm.configs import cli

COMMANDS = (
    cli.Command(
        name="prompts",
        summary="write a prompt source as a JSONL file",
        sections=("prompts", "source", "clean"),
        run="jacobi_llm.data.sources:run",
        example="jacobi-data prompts --input math --split heldout --limit 40 --output prompts.jsonl",
        supports_json=True,
        supports_dry_run=True,
    ),
    cli.Command(
        name="collect",
        summary="decode prompts and record the Jacobi trajectories of their completions",
        sections=("collect", "engine", "source", "clean"),
        run="jacobi_llm.data.collect:run",
        example="jacobi-data collect --config math --window 16 --output runs/trajectories",
        supports_json=True,
        supports_dry_run=True,
    ),
    cli.Command(
        name="stats",
        summary="iterations per block, tokens fixed per iteration, fast-forwarded and stationary tokens",
        sections=("stats",),
        run="jacobi_llm.data.stats:run",
        example="jacobi-data stats runs/trajectories --html stats.html",
        supports_json=True,
        positional="stats.path",
    ),
    cli.Command(
        name="show",
        summary="one trajectory, state by state",
        sections=("show",),
        run="jacobi_llm.data.show:run",
        example="jacobi-data show runs/trajectories --row 3 --block 0",
        supports_json=True,
        positional="show.path",
    ),
    cli.Command(
        name="validate",
        summary="check schema, hashes, time order and fixed points, and re-run a sample one block at a time",
        sections=("stats", "engine"),
        run="jacobi_llm.data.validate:run",
        example="jacobi-data validate runs/trajectories --rerun 4",
        supports_json=True,
        positional="stats.path",
    ),
    cli.Command(
        name="merge",
        summary="one trajectory set of several",
        sections=("merge",),
        run="jacobi_llm.data.merge:run",
        example="jacobi-data merge runs/window16 runs/window32 --output runs/both",
        supports_json=True,
        positional="merge.paths",
    ),
    cli.Command(
        name="split",
        summary="two trajectory sets of one, train and heldout, by a hash of the source row or group",
        sections=("split",),
        run="jacobi_llm.data.split:run",
        example="jacobi-data split runs/trajectories --output runs/split --heldout-share 0.1",
        supports_json=True,
        positional="split.path",
    ),
    cli.Command(
        name="export",
        summary="write a set as a data set folder for the hub, or as the JSON of Consistency_LLM",
        sections=("export",),
        run="jacobi_llm.data.export:run",
        example="jacobi-data export runs/trajectories --to consistency-llm --output trajectories.json",
        supports_json=True,
        positional="export.path",
    ),
    cli.Command(
        name="import",
        summary="make a trajectory set of the JSON of Consistency_LLM",
        sections=("imports",),
        run="jacobi_llm.data.import_json:run",
        example="jacobi-data import trajectories.json --output runs/imported",
        supports_json=True,
        positional="imports.path",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the console command; returns its exit code."""
    if argv is None:
        # As Ctrl-C: what is half written goes away. Collecting waits for its shard instead (stop_signals).
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    return cli.main("jacobi-data", "Prompts in, Jacobi trajectories out.", COMMANDS, argv)
