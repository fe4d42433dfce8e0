"""Does a collection that is killed, or shared by several workers, give the set of an unbroken run by one process?

    python -m benchmarks.kill_collection                    both models, kills and workers: about 20 minutes on 2 cores
    python -m benchmarks.kill_collection --model tiny --num-kills 2 --part kills --output /tmp/kills.json

- kills: the command is begun in an empty folder and killed (SIGKILL) at a drawn moment; the same command then runs to
  its end. A moment is a number of finished shards, one stratum of all of them per kill, and a drawn part of a shard's
  mean time after that: so the kills reach the whole run, and a pause of the machine does not move them.
- workers: the same set by 1, 2 and 3 local workers, and by Ray with 2.

Rows are known by source index and window. A set is the same when its shards and its manifest are, byte by byte. All
workers compute with one thread: sums in another order round in another way.

The tiny model is a random one in float64; the real one runs in bfloat16. Exit status: 0, or 1 when a row is lost or
doubled, or a file differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from jacobi_llm.configs.files import TEMPORARY_SUFFIX, write_atomically
from jacobi_llm.data.store import MANIFEST, Manifest, read_trajectories
from jacobi_llm.infer.environment import describe_run
from tests.data.trajectories import make_prompts
from tests.tiny_models import save_tiny_checkpoint

RESULT = Path(__file__).parent / "results" / "kills.json"
MODELS = ("tiny", "real")
PARTS = ("kills", "workers")
NUM_KILLS = {"tiny": 25, "real": 3}
NUM_PROMPTS = {"tiny": 400, "real": 24}
WORKERS: dict[str, Sequence[str]] = {
    "2 workers": ("--num-workers", "2"),
    "3 workers": ("--num-workers", "3"),
    "Ray, 2 workers": ("--executor", "ray", "--num-workers", "2"),
}
_POLL_S = 0.002


@dataclass(frozen=True)
class Contents:
    """A finished set: its files by name, and its rows by (source index, window)."""

    files: dict[str, bytes]
    rows: Counter[tuple[int, int]]

    @classmethod
    def of(cls, folder: Path) -> Contents:
        files = {path.name: path.read_bytes() for path in folder.glob("shard-*")} | {
            MANIFEST: (folder / MANIFEST).read_bytes()
        }
        return cls(files, Counter((row.source_index, row.window) for row in read_trajectories(folder)))

    def compare(self, other: Contents) -> dict[str, Any]:
        """What ``other`` has lost, has twice, and has otherwise."""
        return {
            "rows_lost": (self.rows - other.rows).total(),
            "rows_doubled": (other.rows - self.rows).total(),
            "files_different": sorted(
                name for name in self.files | other.files if self.files.get(name) != other.files.get(name)
            ),
        }


class Job:
    """One collection command, run again and again into folders of ``scratch``."""

    def __init__(self, flags: Sequence[str], scratch: Path) -> None:
        self._flags = flags
        self._scratch = scratch
        started_s = time.perf_counter()
        folder = self.run("unbroken")
        self.wall_s = time.perf_counter() - started_s
        self.unbroken = Contents.of(folder)
        self.num_shards = Manifest.read(folder).num_shards
        ends_s = sorted(path.stat().st_mtime for path in folder.glob("shard-*.parquet"))
        self.shard_s = statistics.mean(b - a for a, b in itertools.pairwise(ends_s))

    def start(self, folder: Path, more: Sequence[str] = ()) -> subprocess.Popen[str]:
        program = str(Path(sys.executable).parent / "jacobi-data")
        command = [program, "collect", *self._flags, "--num-threads", "1", "--output", str(folder), *more]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def run(self, name: str, more: Sequence[str] = ()) -> Path:
        """Collect into a folder of that name to the end, and return it."""
        folder = self._scratch / name
        process = self.start(folder, more)
        _, err = process.communicate()
        if process.returncode:
            raise SystemExit(f"error: jacobi-data collect ended with {process.returncode}: {err.strip()}")
        return folder

    def kill_once(self, draw: random.Random, low: float, high: float) -> dict[str, Any]:
        """Kill a new run after ``low`` to ``high`` finished shards, finish it, and compare.

        A run that ended before its kill, which the last shard allows, is begun again.
        """
        while True:
            shutil.rmtree(self._scratch / "killed", ignore_errors=True)
            moment = draw.uniform(low, high)
            process = self.start(self._scratch / "killed")
            self._wait_for(process, self._scratch / "killed", moment)
            process.kill()
            process.communicate()
            if process.returncode < 0:
                break
        left = self._left(self._scratch / "killed")
        finished = Contents.of(self.run("killed"))
        return {"moment_shards": round(moment, 2), **left, **self.unbroken.compare(finished)}

    def _wait_for(self, process: subprocess.Popen[str], folder: Path, moment: float) -> None:
        whole, part = divmod(moment, 1)
        while process.poll() is None and not (
            (folder / MANIFEST).exists() and len(list(folder.glob("shard-*.json"))) >= whole
        ):
            time.sleep(_POLL_S)
        time.sleep(part * self.shard_s)

    def _left(self, folder: Path) -> dict[str, Any]:
        """What the killed run has left, all of it readable."""
        shards, records = (len(list(folder.glob(pattern))) for pattern in ("shard-*.parquet", "shard-*.json"))
        return {
            "shards_left": shards,
            "shards_left_without_record": shards - records,
            "torn_files_left": len(list(folder.glob(f".*{TEMPORARY_SUFFIX}"))),
            "rows_readable": sum(1 for _ in read_trajectories(folder)),
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Run all, write the result file, print a table and one line of JSON; return the exit status."""
    args = parse_args(argv)
    result: dict[str, Any] = {**describe_run(1), "seed": args.seed}
    for model in args.model:
        with TemporaryDirectory() as scratch:
            result[model] = run_model(model, args, Path(scratch))
    result["is_right"] = all(_is_right(one) for model in args.model for one in _comparisons(result[model]))
    write_atomically(args.output, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(table(result))
    print(json.dumps({key: result[key] for key in ("is_right", "seed")}))
    return 0 if result["is_right"] else 1


def run_model(model: str, args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """All parts with one model."""
    flags = tiny_flags(scratch) if model == "tiny" else real_flags()
    job = Job(flags, scratch)
    say(f"{model}: unbroken {job.wall_s:.1f} s, {job.num_shards} shards")
    result: dict[str, Any] = {
        "num_prompts": NUM_PROMPTS[model],
        "num_rows": job.unbroken.rows.total(),
        "num_shards": job.num_shards,
        "unbroken_s": round(job.wall_s, 1),
    }
    if "kills" in args.part:
        result["kills"] = run_kills(job, args.num_kills or NUM_KILLS[model], random.Random(args.seed))
    if "workers" in args.part:
        result["workers"] = run_workers(job)
    return result


def run_kills(job: Job, num_kills: int, draw: random.Random) -> list[dict[str, Any]]:
    """Each in a stratum of its own."""
    kills = []
    for number in range(num_kills):
        low, high = (job.num_shards * share / num_kills for share in (number, number + 1))
        kills.append(job.kill_once(draw, low, high))
        say(f"kill {number + 1} of {num_kills}: {kills[-1]}")
    return kills


def run_workers(job: Job) -> dict[str, Any]:
    """Each number of workers once."""
    found = {}
    for name, more in WORKERS.items():
        started_s = time.perf_counter()
        folder = job.run(name.replace(" ", "-"), more)
        wall_s = time.perf_counter() - started_s
        found[name] = {"wall_s": round(wall_s, 1), **job.unbroken.compare(Contents.of(folder))}
        say(f"{name}: {found[name]}")
    return found


def tiny_flags(scratch: Path) -> list[str]:
    """A random model, two windows, sampled targets, jittered starts and n-gram guesses: all that is drawn."""
    save_tiny_checkpoint(scratch / "model", dtype=torch.float64)
    lines = [json.dumps({"id": one.id, "prompt": one.text}) for one in make_prompts(NUM_PROMPTS["tiny"])]
    (scratch / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    files = ("--model", str(scratch / "model"), "--input", str(scratch / "prompts.jsonl"), "--split", "all", "--raw")
    sizes = ("--dtype", "float64", "--window", "8,12", "--max-tokens", "24", "--shard-size", "4")
    return [*files, *sizes, "--temperature", "0.8", "--jitter-starts", "--augment", "random-wrong"]


def real_flags() -> list[str]:
    """The default model on word problems."""
    source = ("--model", "smollm2-135m", "--input", "math", "--limit", str(NUM_PROMPTS["real"]))
    return [*source, "--max-tokens", "48", "--shard-size", "4"]


def table(result: dict[str, Any]) -> str:
    """One line for each kind of disturbance."""
    lines = [f"{'model':<6}{'what':<16}{'runs':>5}{'rows lost':>11}{'doubled':>9}{'files different':>17}"]
    for model in MODELS:
        if model not in result:
            continue
        groups = {"kills": result[model].get("kills", [])}
        groups |= {name: [one] for name, one in result[model].get("workers", {}).items()}
        for name, found in groups.items():
            lost, doubled, different = (
                sum(one["rows_lost"] for one in found),
                sum(one["rows_doubled"] for one in found),
                sum(len(one["files_different"]) for one in found),
            )
            lines.append(f"{model:<6}{name:<16}{len(found):>5}{lost:>11}{doubled:>9}{different:>17}")
    return "\n".join(lines)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=MODELS, choices=MODELS, help="tiny, real or both")
    parser.add_argument("--part", nargs="+", default=PARTS, choices=PARTS, help="kills, workers or both")
    parser.add_argument("--num-kills", type=int, default=0, help="0: 25 of the tiny model, 3 of the real one")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--output", type=Path, default=RESULT, help="result file")
    return parser.parse_args(argv)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _comparisons(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [*found.get("kills", []), *found.get("workers", {}).values()]


def _is_right(one: dict[str, Any]) -> bool:
    return not (one["rows_lost"] or one["rows_doubled"] or one["files_different"])


if __name__ == "__main__":
    raise SystemExit(main())
