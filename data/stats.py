"""jacobi-data stats: how the Jacobi iteration of a trajectory set went.

Words, for a block of n tokens with states y(0), ..., y(J) = fixed point, and f(j) the number of leading tokens of
y(j) that equal the fixed point's:

- *iterations*: J, the passes until the fixed point first appears (0 when the guess was right).
- *tokens fixed* by iteration j: f(j) - f(j-1), with f(0) = 0: a guess counts as fixed by the pass that proves it. A
  guess that was right in whole is fixed by one pass. At least one token is fixed by every iteration.
- *fast-forwarded* tokens: those fixed beyond the one that every iteration fixes anyway, summed over the block.
  CLLM's own count is the mean over a block's iterations of the tokens fixed, that one included, averaged over blocks.
- *stationary* tokens: token i is right in every state from y(a) on, 1 <= a, while the states y(a), ..., y(c-1) still
  have a wrong token before it (c is the first j >= 1 with f(j) > i); so a < c: it was right early, and stayed.
- *tokens per forward pass*: completion tokens over the passes of the block procedure, in which a block ends with the
  pass that proves its last token: the first one that reads a state with f(j) >= n - 1. The prompt is left aside.

Source: CLLM, Kou et al. 2024, arXiv 2403.00835, sections 3.3 and 4.2 (table 3); fast-forward and stationary counts
are those of its released profiling script (eval/gsm8k/speedup.py: ``fast_forward``, ``fix_points_per_gram``).
"""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from jacobi_llm.configs.cli import Options
from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.files import write_atomically
from jacobi_llm.configs.schema import Recipe
from jacobi_llm.data.record import Trajectory
from jacobi_llm.data.store import Manifest, read_trajectories
from jacobi_llm.infer.rule import first_wrong

_BAR_WIDTH = 40


@dataclass(frozen=True)
class BlockProfile:
    """One block's iteration in numbers (words above).

    Attributes:
        num_iterations: J.
        tokens_fixed: by each pass that fixed some, in order; their sum is the block's length.
        num_stationary: stationary tokens.
        num_passes: passes until the block's last token is proved.
    """

    num_iterations: int
    tokens_fixed: list[int]
    num_stationary: int
    num_passes: int


@dataclass
class SetProfile:
    """Counts over many trajectories; histograms map a value to how often it occurred."""

    num_trajectories: int = 0
    num_blocks: int = 0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_states: int = 0
    num_passes: int = 0
    num_other_fixed_points: int = 0
    num_fast_forwarded: int = 0
    num_stationary: int = 0
    sum_of_block_means: float = 0.0
    iterations: Counter[int] = field(default_factory=Counter)
    tokens_fixed: Counter[int] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)

    def add(self, trajectory: Trajectory) -> None:
        """Count one trajectory."""
        self.num_trajectories += 1
        self.num_tokens += len(trajectory.completion_ids)
        self.num_prompt_tokens += len(trajectory.prompt_ids)
        self.lengths[len(trajectory.completion_ids)] += 1
        self.finish_reasons[trajectory.finish_reason] += 1
        for block in trajectory.blocks:
            profile = profile_block(block.states, trajectory.fixed_point_of(block))
            self.num_blocks += 1
            self.num_states += len(block.states)
            self.num_passes += profile.num_passes
            self.num_other_fixed_points += block.fixed_point is not None
            self.num_fast_forwarded += sum(profile.tokens_fixed) - len(profile.tokens_fixed)
            self.num_stationary += profile.num_stationary
            self.sum_of_block_means += sum(profile.tokens_fixed) / len(profile.tokens_fixed)
            self.iterations[profile.num_iterations] += 1
            self.tokens_fixed.update(profile.tokens_fixed)


def run(recipe: Recipe, options: Options) -> int:
    """``jacobi-data stats``: a table, or one JSON object, on standard output; a PNG and an HTML report when asked.

    Raises:
        UsageError: no trajectory set there, or a PNG without matplotlib.
        RunError: a damaged shard or manifest.
    """
    config = recipe.stats
    folder = Path(config.path).expanduser()
    if config.png is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"stats.png {config.png}: needs matplotlib: pip install 'jacobi-llm[plot]'")
    manifest = Manifest.read(folder)
    by_window = profile_windows(read_trajectories(folder))
    profile = joined(by_window.values())
    report = make_report(manifest, profile, by_window)
    print(json.dumps(report, ensure_ascii=False) if options.json else format_table(str(folder), report))
    if config.png is not None:
        path = write_atomically(Path(config.png).expanduser(), draw_png(profile, str(folder)))
        print(f"wrote {path}", file=sys.stderr)
    if config.html is not None:
        from jacobi_llm.data.stats_html import html_report

        page = html_report(folder.absolute().name, manifest, report, profile)
        print(f"wrote {write_atomically(Path(config.html).expanduser(), page)}", file=sys.stderr)
    return 0


def profile_block(states: Sequence[Sequence[int]], fixed_point: Sequence[int]) -> BlockProfile:
    """Profile one block.

    Args:
        states: y(0), y(1), ... up to the last before the fixed point; empty when y(0) is it.
        fixed_point: n tokens, at least one.
    """
    length = len(fixed_point)
    later = [*states[1:], fixed_point]
    tokens_fixed: list[int] = []
    num_right = 0
    covered_by: list[int] = []  # c of the module's words, for each token
    right_since = [1] * length  # a
    for j, state in enumerate(later, start=1):
        # Rounding that differs between passes can make a state lose what an earlier one had.
        now_right = max(num_right, first_wrong(state, fixed_point))
        tokens_fixed.append(now_right - num_right)
        covered_by += [j] * (now_right - num_right)
        num_right = now_right
        for i, (token, right) in enumerate(zip(state, fixed_point, strict=True)):
            if token != right:
                right_since[i] = j + 1
    rights = [first_wrong(state, fixed_point) for state in [*states, fixed_point]]
    return BlockProfile(
        num_iterations=len(states),
        tokens_fixed=[count for count in tokens_fixed if count > 0],
        num_stationary=sum(a < c for a, c in zip(right_since, covered_by, strict=True)),
        num_passes=1 + next(j for j, right in enumerate(rights) if right >= length - 1),
    )


def profile_set(trajectories: Iterable[Trajectory]) -> SetProfile:
    """Profile a set, one trajectory at a time."""
    return joined(profile_windows(trajectories).values())


def profile_windows(trajectories: Iterable[Trajectory]) -> dict[int, SetProfile]:
    """Profile the trajectories of each window, by window."""
    profiles: dict[int, SetProfile] = {}
    for trajectory in trajectories:
        profiles.setdefault(trajectory.window, SetProfile()).add(trajectory)
    return dict(sorted(profiles.items()))


def joined(profiles: Iterable[SetProfile]) -> SetProfile:
    """The counts of all ``profiles`` together."""
    total = SetProfile()
    for profile in profiles:
        for part in fields(SetProfile):
            mine, more = getattr(total, part.name), getattr(profile, part.name)
            setattr(total, part.name, mine + more)
    return total


def make_report(
    manifest: Manifest, profile: SetProfile, by_window: Mapping[int, SetProfile] | None = None
) -> dict[str, Any]:
    """The figures as plain JSON values; means are null for an empty set. ``by_window`` is told if there are several."""
    report = {
        "shards": len(manifest.shards),
        "shards_of_complete_set": manifest.num_shards,
        "trajectories": profile.num_trajectories,
        "window": manifest.settings.get("window"),
        "target_source": manifest.settings.get("target_source"),
        "blocks": profile.num_blocks,
        "states": profile.num_states,
        "prompt_tokens": profile.num_prompt_tokens,
        "completion_tokens": profile.num_tokens,
        "completion_length": _length_figures(profile),
        "finish_reasons": dict(sorted(profile.finish_reasons.items())),
        "skipped": manifest.num_skipped,
        "bad_input": manifest.bad_input,
        "unconverged_blocks": manifest.num_unconverged,
        "fixed_points_other_than_y*": profile.num_other_fixed_points,
        **_iteration_figures(profile),
        "iterations_histogram": {str(key): profile.iterations[key] for key in sorted(profile.iterations)},
        "tokens_fixed_histogram": {str(key): profile.tokens_fixed[key] for key in sorted(profile.tokens_fixed)},
    }
    if by_window and len(by_window) > 1:
        report["by_window"] = {
            str(window): {"trajectories": one.num_trajectories, "blocks": one.num_blocks, **_iteration_figures(one)}
            for window, one in by_window.items()
        }
    return report


def _mean(total: float, count: int) -> float | None:
    return round(total / count, 4) if count else None


def _length_figures(profile: SetProfile) -> dict[str, float | None]:
    lengths = sorted(profile.lengths.elements())
    return {
        "min": lengths[0] if lengths else None,
        "median": lengths[len(lengths) // 2] if lengths else None,
        "mean": _mean(profile.num_tokens, profile.num_trajectories),
        "max": lengths[-1] if lengths else None,
    }


def _iteration_figures(profile: SetProfile) -> dict[str, float | None]:
    num_iterations = sum(count * number for number, count in profile.iterations.items())
    return {
        "tokens_per_forward": _mean(profile.num_tokens, profile.num_passes),
        "iterations_per_block": _mean(num_iterations, profile.num_blocks),
        "tokens_fixed_per_iteration": _mean(profile.num_tokens, sum(profile.tokens_fixed.values())),
        "fast_forwarded_per_block": _mean(profile.num_fast_forwarded, profile.num_blocks),
        "stationary_per_block": _mean(profile.num_stationary, profile.num_blocks),
        "cllm_fast_forward_count": _mean(profile.sum_of_block_means, profile.num_blocks),
    }


def format_table(title: str, report: dict[str, Any]) -> str:
    """The report as plain text: a value per line, then the histogram of iterations."""
    rows: list[tuple[str, object]] = []
    for name, value in report.items():
        label = name.replace("_", " ")
        if name in ("shards_of_complete_set", "by_window") or name.endswith("_histogram"):
            continue
        if name == "shards":
            rows.append((label, f"{value} of {report['shards_of_complete_set']}"))
        elif isinstance(value, dict):
            rows.append((label, ", ".join(f"{key} {count}" for key, count in value.items()) or "none"))
        else:
            rows.append((label, "-" if value is None else value))
    for window, figures in report.get("by_window", {}).items():
        rows.append((f"window {window}", ", ".join(f"{key.replace('_', ' ')} {one}" for key, one in figures.items())))
    width = max(len(label) for label, _ in rows)
    lines = [title, *(f"  {label:<{width}}  {value}" for label, value in rows), "", "iterations  blocks"]
    histogram = report["iterations_histogram"]
    most = max(histogram.values(), default=1)
    lines += [f"{key:>10}  {count:>6}  {'#' * -(-count * _BAR_WIDTH // most)}" for key, count in histogram.items()]
    return "\n".join(lines)


def draw_png(profile: SetProfile, title: str) -> bytes:
    """Return a PNG with the histograms of iterations per block and of tokens fixed per iteration."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The object interface leaves alone the global state of a program that plots on its own.
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    panels = (
        (profile.iterations, "iterations until the fixed point", "blocks"),
        (profile.tokens_fixed, "tokens fixed by one iteration", "iterations"),
    )
    for axis, (histogram, x_label, y_label) in zip(axes, panels, strict=True):
        keys = sorted(histogram)
        axis.bar(keys, [histogram[key] for key in keys], width=0.9)
        axis.set_xlabel(x_label)
        axis.set_ylabel(y_label)
        axis.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(title)
    png = io.BytesIO()
    FigureCanvasAgg(figure).print_png(png)  # type: ignore[no-untyped-call]
    return png.getvalue()
