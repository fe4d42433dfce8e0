"""The result as plain text."""

from __future__ import annotations

from typing import Any


def table(result: dict[str, Any]) -> str:
    """Return speeds and ratios by peer and batch size, the cost of a wide pass, and what became of the tokens."""
    cpu = result["environment"]["cpu"]["model"]
    lengths = result["prompt_tokens"]
    lines = [
        f"{result['model']} bf16, plain decoding to {result['max_tokens']} tokens, {result['threads']} threads, {cpu}",
        f"{result['num_prompts']} prompts of {lengths['min']} to {lengths['max']} tokens",
        f"{'peer':<36}{'batch':>6}{'ours tok/s':>12}{'theirs':>9}{'ratio':>8}{'quartiles':>16}{'target':>10}",
    ]
    for peer, by_size in result["speed"].items():
        engine = result["engines"][peer]
        name = f"{peer} {engine['version']}, {engine['variant']}"
        for size, row in by_size.items():
            low, high = row["ratio_quartiles"]
            lines.append(
                f"{name:<36}{size:>6}{row['our_tps']:>12.1f}{row['their_tps']:>9.1f}{row['ratio']:>8.3f}"
                f"{f'{low:.3f}-{high:.3f}':>16}{_target(row, '>='):>10}"
            )
    row = result["passes"]
    low, high = row["ratio_quartiles"]
    lines.append(
        f"a pass of {row['many_rows']} rows at context {row['context']}: {row['many_rows_ms']:.1f} ms, of 1 row "
        f"{row['one_row_ms']:.1f} ms, ratio {row['ratio']:.3f} ({low:.3f}-{high:.3f}), {_target(row, '<=')}"
    )
    for peer, found in result["same_tokens"]["pairs"].items():
        lines.append(
            f"tokens against {peer}: {found['equal']} of {found['completions']} completions equal, "
            f"{found['explained_by_rounding']} explained by rounding, {found['unexplained']} unexplained "
            f"(largest gap {found['largest_gap']:.3f}, bound {result['same_tokens']['bound']:.3f})"
        )
    noise = result["noise"]
    lines.append(
        f"other programs used {noise['others_cores_median']:.2f} cores (median; at most "
        f"{noise['others_cores_max']:.2f}), stopped engines {noise['stopped_engines_cpu_s']:.2f} s in all"
    )
    return "\n".join(lines)


def _target(row: dict[str, Any], sign: str) -> str:
    return f"{sign}{row['target']:g} {'met' if row['is_met'] else 'no'}"
