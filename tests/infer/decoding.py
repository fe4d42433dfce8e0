"""What the engine is compared with, and a loop that checks its invariants after every step."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedModel

from jacobi_llm.configs.schema import EngineConfig
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.models import LoadedModel
from jacobi_llm.infer.request import DecodeParams, Request, RequestOutput
from jacobi_llm.infer.rule import FinishReason


@torch.inference_mode()
def decode_ar(model: PreTrainedModel, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
    """Greedy, one token per forward pass over the whole text: no cache, no batch, no window. EOS is ignored."""
    ids = list(prompt_ids)
    for _ in range(max_tokens):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt_ids) :]


@torch.inference_mode()
def generate(model: PreTrainedModel, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
    """Greedy decoding by transformers' ``generate``. EOS is ignored."""
    out = model.generate(
        torch.tensor([list(prompt_ids)]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    new_ids: list[int] = out[0, len(prompt_ids) :].tolist()
    return new_ids


def cut(answer: Sequence[int], max_tokens: int, stops: Collection[int]) -> tuple[list[int], FinishReason]:
    """What is left of an endless answer under a budget and stop tokens."""
    for index, token_id in enumerate(answer[:max_tokens]):
        if token_id in stops:
            return list(answer[: index + 1]), FinishReason.STOP
    assert len(answer) >= max_tokens, "the reference is too short"
    return list(answer[:max_tokens]), FinishReason.LENGTH


def random_prompt(draw: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(draw.randrange(3, 250) for _ in range(num_tokens))


def make_engine(loaded: LoadedModel, *, num_pages: int | None = None, **config: Any) -> LLMEngine:
    """Build an engine, with a pool of exactly ``num_pages`` when given (the config counts in MiB)."""
    settings = EngineConfig(**{"kv_memory_mib": 4, **config})
    if num_pages is None:
        return LLMEngine(loaded, settings)
    with mock.patch("jacobi_llm.infer.engine.num_pages_for", return_value=num_pages):
        return LLMEngine(loaded, settings)


def make_request(
    id: str, prompt_ids: Sequence[int], max_tokens: int, *, keep_pages: bool = False, **params: Any
) -> Request:
    return Request(id, tuple(prompt_ids), DecodeParams(max_tokens, **params), keep_pages=keep_pages)


@dataclass
class Tape:
    """What a run returned: the finished outputs, and the tokens as they were streamed."""

    outputs: dict[str, RequestOutput]
    streamed: dict[str, list[int]]


def checked_step(engine: LLMEngine, tape: Tape) -> int:
    """One step with every invariant looked at before and after; returns the number of requests that committed."""
    limit = engine.scheduler.max_num_rows
    rows_before, passes_before = engine.runner.num_rows, engine.runner.num_passes
    committed = {id: len(sequence.completion_ids) for id, sequence in engine._sequences.items()}
    outs = engine.step()
    engine.check_integrity()
    assert engine.runner.num_passes - passes_before <= 1
    assert engine.runner.num_rows - rows_before <= limit
    assert len(engine.scheduler.running) <= engine.scheduler.max_num_seqs
    for sequence in engine.scheduler.running:
        assert sequence.num_computed <= sequence.committed_len - 1
    for sequence in engine.scheduler.waiting:
        assert sequence.block_table == []
        assert sequence.num_computed == 0
    for out in outs:
        assert out.new_token_ids
        tape.streamed.setdefault(out.request_id, []).extend(out.new_token_ids)
        if out.finished is None:
            sequence = engine._sequences[out.request_id]
            assert sequence.num_computed == sequence.committed_len - 1, "cache length is not what was committed"
            assert len(sequence.completion_ids) == committed[out.request_id] + len(out.new_token_ids)
        else:
            assert out.request_id not in tape.outputs
            tape.outputs[out.request_id] = out.finished
            assert list(out.finished.token_ids) == tape.streamed[out.request_id]
            assert sum(out.finished.commit_lengths) == len(out.finished.token_ids)
            assert len(out.finished.commit_lengths) == out.finished.forward_passes
    return len(outs)


def run_checked(
    engine: LLMEngine,
    requests: Sequence[Request],
    *,
    join_at: Sequence[int] = (),
    before_step: Callable[[int], None] = lambda step: None,
    max_steps: int = 3000,
) -> Tape:
    """Run ``requests`` to their end, request i joining at step ``join_at[i]`` (0 when not given)."""
    tape = Tape({}, {})
    pending = sorted(enumerate(requests), key=lambda pair: join_at[pair[0]] if join_at else 0)
    for step in range(max_steps):
        while pending and (join_at[pending[0][0]] if join_at else 0) <= step:
            engine.add_request(pending.pop(0)[1])
        before_step(step)
        checked_step(engine, tape)
        if not pending and not engine.scheduler.running and not engine.scheduler.waiting:
            return tape
    raise AssertionError(f"no end after {max_steps} steps")
