"""Sampled tokens against the distribution they should have, and one seed at every window and batch size.

    python benchmarks/distribution.py                                    100,000 draws per cell, a few minutes
    python benchmarks/distribution.py --draws 5000 --engine-tokens 400 --output /tmp/distribution.json

A cell is a temperature, top-k, top-p, min-p and window. Two tiny models of 32 tokens, weights random:

- constant: all tokens have one embedding, so every position has the same distribution, and draws can be counted. All
  draws of a cell come from the sampler's own functions, keyed by (seed, t) as a request's tokens are; the first seeds
  are decoded by the engine as well, in one batch at the cell's window, and must give the very same tokens.
- contextual: an ordinary model, decoded by the engine. Each token has a distribution of its own, computed by the plain
  model and transformers' warpers. The sum over all tokens of (one-hot - p) has the covariance
  sum of (diag(p) - p p'), so its quadratic form is chi-square distributed: the draws are a martingale.

Expected probabilities are those of transformers' TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper and
MinPLogitsWarper. Exit status: 0, or 1 when the smallest p-value is below 1e-4, a token outside the allowed set was
drawn, or one seed gave two texts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList, PreTrainedTokenizerFast
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from jacobi_llm.configs.files import write_atomically
from jacobi_llm.configs.schema import EngineConfig
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.environment import describe_run
from jacobi_llm.infer.models import LoadedModel
from jacobi_llm.infer.noise import RowKey, RowNoise
from jacobi_llm.infer.request import DecodeParams, Request
from jacobi_llm.infer.sampling_params import SamplingParams
from jacobi_llm.infer.score_rows import ScoreRows, copy_scores
from jacobi_llm.infer.truncation import draw_tokens

RESULT = Path(__file__).parent / "results" / "distribution.json"
LEAST_P_VALUE = 1e-4
VOCAB_SIZE = 32
PROMPT = (3, 1, 4)
TOKENS_PER_SEED = 100
ROWS_TOGETHER = 500
# Below this, a category's share of chi-square is not chi-square distributed: such tokens are counted together.
LEAST_EXPECTED = 5.0


@dataclass(frozen=True)
class Cell:
    """What is sampled, and the window it is sampled with."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    window: int

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p)


@dataclass(frozen=True)
class CellResult:
    """Draws of one cell; ``unequal_engine_tokens`` differ from the draw with the same seed and position."""

    cell: Cell
    allowed_tokens: int
    draws: int
    outside: int
    p_value: float
    engine_tokens: int
    unequal_engine_tokens: int


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cells, write the result file, print one line of JSON; return the exit status."""
    args = parse_args(argv)
    torch.set_num_threads(1)
    start_s = time.perf_counter()
    constant, contextual = tiny_model(is_constant=True), tiny_model(is_constant=False)
    cells = [Cell(*values) for values in product(args.temperatures, args.top_k, args.top_p, args.min_p, args.windows)]
    results = []
    for number, cell in enumerate(cells):
        results.append(run_cell(constant, cell, number, args.draws, args.engine_tokens))
        say(f"cell {number + 1} of {len(cells)}: {cell}: p {results[-1].p_value:.4f}")
    context = run_contextual(contextual, args.contextual_tokens)
    least = min([result.p_value for result in results] + [one["p_value"] for one in context])
    summary = {
        "cells": len(cells),
        "draws": sum(result.draws for result in results),
        "engine_tokens": sum(result.engine_tokens for result in results) + sum(one["tokens"] for one in context),
        "smallest_p_value": least,
        "outside": sum(result.outside for result in results) + sum(one["outside"] for one in context),
        "unequal_engine_tokens": sum(result.unequal_engine_tokens for result in results),
        "unequal_texts": sum(one["unequal_texts"] for one in context),
        "wall_s": round(time.perf_counter() - start_s, 1),
        "cpu_s": round(time.process_time(), 1),
    }
    record = {
        **describe_run(1),
        **summary,
        "contextual": context,
        "results": [{**asdict(result.cell), **_without_cell(result)} for result in results],
    }
    write_atomically(args.output, json.dumps(record, indent=2) + "\n")
    print(json.dumps(summary))
    is_right = (
        least >= LEAST_P_VALUE
        and not summary["outside"]
        and not summary["unequal_engine_tokens"]
        and not summary["unequal_texts"]
    )
    return 0 if is_right else 1


def run_cell(loaded: LoadedModel, cell: Cell, number: int, num_draws: int, num_engine_tokens: int) -> CellResult:
    """Draw and count; every cell has seeds of its own."""
    logits = next_logits(loaded, PROMPT)
    expected = warped(logits[None], cell.sampling)[0]
    first_seed = number * 10**6
    num_seeds = -(-num_draws // TOKENS_PER_SEED)
    drawn = draw(logits, cell.sampling, range(first_seed, first_seed + num_seeds))
    counts = np.bincount(drawn.ravel(), minlength=VOCAB_SIZE)
    seeds = range(first_seed, first_seed + num_engine_tokens // TOKENS_PER_SEED)
    decoded = decode(loaded, cell.sampling, seeds, window=cell.window, batch_size=len(seeds))
    return CellResult(
        cell=cell,
        allowed_tokens=int((expected > 0).sum()),
        draws=drawn.size,
        outside=int(counts[expected == 0].sum()),
        p_value=chi_square(counts, expected * drawn.size),
        engine_tokens=decoded.size,
        unequal_engine_tokens=int((decoded != drawn[: len(seeds)]).sum()),
    )


def run_contextual(loaded: LoadedModel, num_tokens: int) -> list[dict[str, Any]]:
    """The ordinary model at three settings: its distribution at window 1, and the same texts at others."""
    seeds = range(num_tokens // TOKENS_PER_SEED)
    settings = (SamplingParams(1.0), SamplingParams(0.7, top_p=0.9), SamplingParams(1.3, top_k=8, min_p=0.05))
    found = []
    for sampling in settings:
        texts = decode(loaded, sampling, seeds, window=1, batch_size=len(seeds))
        some = seeds[: max(1, len(seeds) // 8)]
        others = {
            (window, batch_size): decode(loaded, sampling, some, window=window, batch_size=batch_size)
            for window, batch_size in ((1, 1), (4, len(some)), (16, 1), (16, len(some)))
        }
        p_value, outside = martingale_test(loaded, texts, sampling)
        found.append(
            {
                **{name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")},
                "tokens": texts.size,
                "p_value": p_value,
                "outside": outside,
                "compared": {f"window {window}, batch {size}": len(some) for window, size in others},
                "unequal_texts": sum(int((other != texts[: len(some)]).any(1).sum()) for other in others.values()),
            }
        )
        say(f"contextual {sampling}: p {p_value:.4f}")
    return found


def draw(logits: torch.Tensor, sampling: SamplingParams, seeds: Sequence[int]) -> NDArray[np.int64]:
    """Tokens of every seed at positions 0, 1, ... for one distribution: [seeds, TOKENS_PER_SEED]."""
    keys = [RowKey(seed, 0, t) for seed in seeds for t in range(TOKENS_PER_SEED)]
    found = []
    for first in range(0, len(keys), ROWS_TOGETHER):
        some = keys[first : first + ROWS_TOGETHER]
        scores = ScoreRows(copy_scores(logits.expand(len(some), -1)).div_(sampling.temperature))
        found.append(draw_tokens(scores, np.arange(len(some)), [sampling] * len(some), RowNoise(some)))
    return np.concatenate(found).reshape(len(seeds), TOKENS_PER_SEED)


def decode(
    loaded: LoadedModel, sampling: SamplingParams, seeds: Sequence[int], *, window: int, batch_size: int
) -> NDArray[np.int64]:
    """The same through the engine: [seeds, TOKENS_PER_SEED]."""
    engine = LLMEngine(loaded, EngineConfig(kv_memory_mib=16, max_num_seqs=batch_size))
    outputs = engine.generate(
        Request(str(seed), PROMPT, DecodeParams(TOKENS_PER_SEED, window=window, seed=seed, sampling=sampling))
        for seed in seeds
    )
    return np.array([output.token_ids for output in outputs])


def warped(logits: torch.Tensor, sampling: SamplingParams) -> NDArray[np.float64]:
    """Probabilities after transformers' warpers: [N, vocab] -> [N, vocab]."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    probabilities: NDArray[np.float64] = warpers(torch.zeros(len(logits), 1), logits).softmax(-1).numpy()
    return probabilities


def chi_square(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """p-value of Pearson's test; tokens that are expected too seldom are one category."""
    is_common = expected >= LEAST_EXPECTED
    observed = [*counts[is_common], counts[~is_common & (expected > 0)].sum()]
    wanted = [*expected[is_common], expected[~is_common].sum()]
    if wanted[-1] < LEAST_EXPECTED:
        # Too seldom even together: with the least common of the others.
        rare, seldom = observed.pop(), wanted.pop()
        least = int(np.argmin(wanted))
        observed[least] += rare
        wanted[least] += seldom
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in zip(observed, wanted, strict=True))
    return upper_tail(float(statistic), len(wanted) - 1)


def martingale_test(loaded: LoadedModel, texts: NDArray[np.int64], sampling: SamplingParams) -> tuple[float, int]:
    """p-value of all tokens of ``texts`` against their own distributions, and the number of tokens outside of them."""
    surplus, covariance, outside = np.zeros(VOCAB_SIZE), np.zeros((VOCAB_SIZE, VOCAB_SIZE)), 0
    for text in texts:
        with torch.inference_mode():
            ids = torch.tensor([[*PROMPT, *text[:-1]]])
            logits = loaded.model(ids, use_cache=False).logits[0, len(PROMPT) - 1 :]
        expected = warped(logits, sampling)
        rows = np.arange(len(text))
        outside += int((expected[rows, text] == 0).sum())
        surplus += np.bincount(text, minlength=VOCAB_SIZE) - expected.sum(0)
        covariance += np.diag(expected.sum(0)) - expected.T @ expected
    # Tokens that hardly ever could be drawn are left out; what the others lack is theirs, so the rank is full.
    is_common = np.diag(covariance) >= LEAST_EXPECTED
    if is_common.all():
        is_common[int(np.argmin(np.diag(covariance)))] = False
    statistic = surplus[is_common] @ np.linalg.solve(covariance[np.ix_(is_common, is_common)], surplus[is_common])
    return upper_tail(float(statistic), int(is_common.sum())), outside


def upper_tail(statistic: float, num_degrees: int) -> float:
    """Probability that a chi-square variable is at least ``statistic``; 1 when there is nothing to vary."""
    if num_degrees == 0:
        return 1.0
    half = torch.tensor([num_degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def next_logits(loaded: LoadedModel, prompt_ids: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = loaded.model(torch.tensor([list(prompt_ids)]), use_cache=False).logits[0, -1]
    return logits.clone()


def tiny_model(*, is_constant: bool) -> LoadedModel:
    """A random llama of 32 tokens in float64; with one embedding for all tokens when it is constant."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.4,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = LlamaForCausalLM(config).to(torch.float64).eval()
    if is_constant:
        embedding = model.get_input_embeddings().weight
        with torch.no_grad():
            embedding.copy_(embedding[:1].expand_as(embedding).clone())
    words = Tokenizer(WordLevel({str(token_id): token_id for token_id in range(VOCAB_SIZE)}, unk_token="0"))
    return LoadedModel(
        model=model,
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=words),
        name="tiny",
        path="tiny",
        eos_token_ids=(),
        max_context=256,
    )


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=100_000, help="tokens drawn per cell")
    parser.add_argument("--engine-tokens", type=int, default=20_000, help="tokens of a cell decoded by the engine too")
    parser.add_argument("--contextual-tokens", type=int, default=8000, help="tokens of each contextual setting")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.6, 1.0, 1.6])
    parser.add_argument("--top-k", type=int, nargs="+", default=[0, 6])
    parser.add_argument("--top-p", type=float, nargs="+", default=[1.0, 0.85])
    parser.add_argument("--min-p", type=float, nargs="+", default=[0.0, 0.1])
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--output", type=Path, default=RESULT, help="result file")
    args = parser.parse_args(argv)
    for name in ("draws", "engine_tokens", "contextual_tokens"):
        if getattr(args, name) < TOKENS_PER_SEED:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}: give at least {TOKENS_PER_SEED}")
    return args


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _without_cell(result: CellResult) -> dict[str, Any]:
    return {name: value for name, value in asdict(result).items() if name != "cell"}


if __name__ == "__main__":
    raise SystemExit(main())
