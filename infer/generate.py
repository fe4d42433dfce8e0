"""``jacobi-infer generate``: one prompt, or every line of a JSONL file, through the batched engine.

    jacobi-infer generate --prompt 'What is 12 times 7?'
    jacobi-infer generate --input prompts.jsonl --window 16 --json > answers.jsonl

All requests are in the engine from the start (up to ``engine.max_num_waiting`` of them), so a time to the first token
includes the wait for a place.
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedTokenizerBase

from jacobi_llm.configs.checkpoint import load_checkpoint_config
from jacobi_llm.configs.cli import EXIT_INTERRUPTED, Options
from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.schema import Auto, DecodeMode, GenerateConfig, PromptFormat, Recipe
from jacobi_llm.infer.adapters import adapter_folders, unknown_adapter
from jacobi_llm.infer.device import resolve_device
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.kv_pages import bytes_per_token, describe_pages, num_pages_for
from jacobi_llm.infer.models import LoadedModel, load_model, load_tokenizer, max_context, resolve_model
from jacobi_llm.infer.prompt import Prompt, read_prompt_file, render_prompt
from jacobi_llm.infer.quiet import quiet_libraries
from jacobi_llm.infer.report import JsonReport, Report, StreamReport, TextReport
from jacobi_llm.infer.request import DecodeParams, Request, choice_ids, expand_choices
from jacobi_llm.infer.sampling_flags import sampling_params
from jacobi_llm.infer.stream import stream

FLAG_PROMPT_ID = "prompt"


def run(recipe: Recipe, options: Options) -> int:
    """Run the command; return 0, 1 when some request could not run, or 130 when it was interrupted."""
    config = recipe.generate
    device = resolve_device(config.device)
    take_checkpoint_settings(config, options.explicit)
    check_mode(config)
    prompts = read_prompts(config)
    if options.dry_run:
        plan, faults = make_plan(recipe, device, prompts)
        print(json.dumps(plan) if options.json else "\n".join(f"{key}: {value}" for key, value in plan.items()))
        for fault in faults:
            print(f"error: {fault}", file=sys.stderr)
        return 1 if faults else 0
    loaded = load_model(config.model, dtype=config.dtype, device=device, adapter=config.adapter)
    check_format(config.format, loaded.tokenizer, config.model)
    params = make_params(config, loaded)
    engine = LLMEngine(loaded, recipe.engine)
    for name, folder in adapter_folders(config.adapters).items():
        engine.load_adapter(name, folder)
    print(engine.describe_memory(), file=sys.stderr)
    if config.window is Auto.AUTO:
        engine.use_auto_windows()
    report: Report
    if options.json:
        report = JsonReport([id for prompt in prompts for id in choice_ids(prompt.id, config.n)])
    elif len(prompts) * config.n == 1:
        report = StreamReport()
    else:
        report = TextReport()
    tally = _Tally(len(prompts) * config.n)

    def refuse(request_id: str, error: UsageError) -> None:
        report.add_failure(request_id, str(error))
        tally.num_failed += 1

    requests = _render(prompts, params, config, loaded.tokenizer, refuse)
    try:
        for delta in stream(engine, requests, on_refused=lambda request, error: refuse(request.id, error)):
            report.add(delta)
            if delta.finished:
                tally.num_finished += 1
                tally.num_tokens += len(delta.finished.token_ids)
                tally.num_passes += delta.finished.forward_passes
    except KeyboardInterrupt:
        report.close()
        print(f"interrupted; {tally.line()}", file=sys.stderr)
        return EXIT_INTERRUPTED
    report.close()
    print(tally.line(), file=sys.stderr)
    return 1 if tally.num_failed else 0


def take_checkpoint_settings(config: GenerateConfig, explicit: Collection[str]) -> None:
    """Start from the fill policy (in block mode the window too) that the adapter or model was trained for.

    What was asked for stays. An automatic window needs none from the checkpoint: the engine reads its acceptance.

    Args:
        config: changed in place.
        explicit: settings (``section.key``) that a flag or the recipe has set.
    """
    about = load_checkpoint_config(config.adapter) if config.adapter else load_checkpoint_config(config.model)
    if about is None:
        return
    if config.mode is DecodeMode.BLOCK and config.window is Auto.AUTO:
        config.window = about.window
    if "generate.fill" not in explicit:
        config.fill = about.fill


def check_mode(config: GenerateConfig) -> None:
    """Refuse settings that do not go together.

    Raises:
        UsageError: block mode without a window.
    """
    if config.mode is DecodeMode.BLOCK and config.window is Auto.AUTO:
        raise UsageError("generate.mode block: a block needs a fixed length; give one, such as --window 16")


def read_prompts(config: GenerateConfig) -> list[Prompt]:
    """Return the prompt of ``--prompt``, then those of the input file or of piped standard input.

    Raises:
        UsageError: no prompt at all, an unreadable file, or two prompts with one id.
    """
    prompts: list[Prompt] = []
    if config.prompt is not None:
        if not config.prompt:
            raise UsageError("--prompt is empty; give at least one character")
        prompts.append(Prompt(FLAG_PROMPT_ID, source="--prompt", source_index=0, messages=None, text=config.prompt))
    source = config.input
    if source is None and not prompts and _is_stdin_piped():
        source = "-"
    if source is not None:
        prompts.extend(read_prompt_file(source, config.on_bad_input).prompts)
    if not prompts:
        raise UsageError("nothing to decode: give --prompt TEXT, --input FILE, or pipe JSON lines in")
    if any(prompt.id == FLAG_PROMPT_ID for prompt in prompts[1:]) and config.prompt is not None:
        raise UsageError(f"{source}: the id '{FLAG_PROMPT_ID}' is that of --prompt; use another in the file")
    return prompts


def check_format(format: PromptFormat, tokenizer: PreTrainedTokenizerBase, model: str) -> None:
    """Say once, and not for every prompt, that the model cannot chat.

    Raises:
        UsageError: chat is asked for, and the tokenizer has no template.
    """
    if format is PromptFormat.CHAT and not tokenizer.chat_template:
        raise UsageError(f"model '{model}': its tokenizer has no chat template; use --raw")


@dataclass
class _Tally:
    """What the summary line says."""

    num_requests: int
    num_finished: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    num_passes: int = 0
    start_s: float = field(default_factory=time.perf_counter)

    def line(self) -> str:
        wall_s = time.perf_counter() - self.start_s
        requests = "1 request" if self.num_finished == 1 else f"{self.num_finished} requests"
        if self.num_finished < self.num_requests:
            requests = f"{self.num_finished} of {self.num_requests} requests"
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        tpf = f"{self.num_tokens / self.num_passes:.2f}" if self.num_passes else "-"
        return (
            f"{requests}{failed}: {self.num_tokens} tokens in {self.num_passes} passes, TPF {tpf}, "
            f"TPS {self.num_tokens / wall_s:.1f}, {wall_s * 1e3:.0f} ms"
        )


def make_params(config: GenerateConfig, loaded: LoadedModel) -> DecodeParams:
    """Return how every request of the command decodes.

    Raises:
        UsageError: a stop token that the model does not have, or sampling settings out of bounds.
    """
    vocab_size = int(loaded.model.config.get_text_config().vocab_size)
    asked = frozenset(config.stop_token_ids or ())
    outside = sorted(token_id for token_id in asked if not 0 <= token_id < vocab_size)
    if outside:
        raise UsageError(f"--stop-token-ids {outside[0]}: the ids of this model are 0 to {vocab_size - 1}")
    return DecodeParams(
        max_tokens=config.max_tokens,
        window=None if config.window is Auto.AUTO else config.window,
        mode=config.mode,
        fill=config.fill,
        stop_token_ids=asked if config.ignore_eos else asked.union(loaded.eos_token_ids),
        stop=tuple(config.stop or ()),
        seed=config.seed,
        sampling=sampling_params(config, loaded.tokenizer),
    )


def _render(
    prompts: Sequence[Prompt],
    params: DecodeParams,
    config: GenerateConfig,
    tokenizer: PreTrainedTokenizerBase,
    refuse: Callable[[str, UsageError], None],
) -> Iterator[Request]:
    for prompt in prompts:
        try:
            prompt_ids = tuple(render_prompt(prompt, tokenizer, config.format))
        except UsageError as error:
            for request_id in choice_ids(prompt.id, config.n):
                refuse(request_id, error)
        else:
            yield from expand_choices(Request(prompt.id, prompt_ids, params, adapter=prompt.adapter), config.n)


def make_plan(recipe: Recipe, device: str, prompts: Sequence[Prompt]) -> tuple[dict[str, Any], list[str]]:
    """Return what would run, and a line for each prompt that cannot.

    Reads the tokenizer and the model's config, not its weights.
    """
    config = recipe.generate
    tokenizer = load_tokenizer(config.model)
    check_format(config.format, tokenizer, config.model)
    sampling_params(config, tokenizer)
    with quiet_libraries():
        model_config = AutoConfig.from_pretrained(resolve_model(config.model))
    context = max_context(model_config, tokenizer)
    page_size = recipe.engine.page_size
    dtype = getattr(torch, config.dtype.value)
    num_pages = num_pages_for(model_config, dtype, page_size, recipe.engine.kv_memory_mib << 20)
    lengths: list[int] = []
    faults: list[str] = []
    adapters = list(adapter_folders(config.adapters))
    for prompt in prompts:
        try:
            if prompt.adapter is not None and prompt.adapter not in adapters:
                raise UsageError(f"prompt '{prompt.id}': {unknown_adapter(prompt.adapter, adapters)}")
            lengths.append(len(render_prompt(prompt, tokenizer, config.format)))
        except UsageError as error:
            faults.append(str(error))
            continue
        if lengths[-1] >= context:
            faults.append(f"prompt '{prompt.id}': {lengths[-1]} tokens leave no room in the context of {context}")
            lengths.pop()
    budgets = [min(config.max_tokens, context - length) for length in lengths]
    needs = [-(-(length + budget) // page_size) for length, budget in zip(lengths, budgets, strict=True)]
    plan = {
        "model": config.model,
        "adapter": config.adapter,
        "adapters": config.adapters,
        "dtype": config.dtype.value,
        "device": device,
        "window": config.window,
        "mode": config.mode.value,
        "prompts": len(prompts),
        "choices_per_prompt": config.n,
        "prompt_tokens": sum(lengths),
        "longest_prompt_tokens": max(lengths, default=0),
        "completion_tokens_at_most": sum(budgets) * config.n,
        "prompts_refused": len(faults),
        "context_tokens": context,
        "kv_memory": describe_pages(num_pages, page_size, bytes_per_token(model_config, dtype)),
        "page_tokens": page_size,
        "pages": num_pages,
        "pages_at_most": sum(needs) * config.n,
        "pages_of_largest_request": max(needs, default=0),
    }
    return plan, faults


def _is_stdin_piped() -> bool:
    """Whether something waits on standard input that is no terminal; a closed or empty one counts as not given."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return False
    buffer = sys.stdin.buffer
    return not isinstance(buffer, io.BufferedReader) or bool(buffer.peek(1))
