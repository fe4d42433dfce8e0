"""Runs a Hugging Face model over row groups."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from transformers import PreTrainedModel

from jacobi_llm.configs.errors import RunError, UsageError
from jacobi_llm.configs.schema import AttentionBackend, CompileMode, EngineConfig
from jacobi_llm.infer.adapters import Adapters, read_adapter, unknown_adapter
from jacobi_llm.infer.attention import SdpaBackend
from jacobi_llm.infer.compiled_forward import compile_forward
from jacobi_llm.infer.kv_pages import KVCache
from jacobi_llm.infer.native import compiler, load_operators
from jacobi_llm.infer.native_attention import PAGE_SIZES, NativeBackend
from jacobi_llm.infer.pass_inputs import PassInputs
from jacobi_llm.infer.projections import Projections, check_all_linear
from jacobi_llm.infer.row_group import RowGroup

# Smaller models are over before their compiler is.
MIN_WEIGHTS_TO_COMPILE = 50_000_000
_PROBE_ROWS = 61


class Backend(Protocol):
    """Pages and attention of one engine.

    Attributes:
        attention_name: what it is registered as with transformers.
        keys, values: pages of each layer that has attended; the layout is the backend's own.
        has_attended: whether some layer called it in the last eager pass.
    """

    attention_name: str
    keys: dict[int, torch.Tensor]
    values: dict[int, torch.Tensor]

    @property
    def has_attended(self) -> bool: ...

    def running(self, groups: Sequence[RowGroup]) -> AbstractContextManager[PassInputs]:
        """Announce a pass; the model must run within the block, once."""

    def clear(self, pages: Sequence[int]) -> None:
        """Zero the K/V of ``pages``."""


class ModelRunner:
    """One model, one set of pages.

    The model's attention implementation is switched for the length of an eager pass only, so that the trainer can
    decode with the module it trains, and a reference with the same weights.

    Attributes:
        num_passes, num_rows: passes run and rows forwarded since construction.
        projections: packed linear layers, None while nothing has asked for them.
    """

    def __init__(self, model: PreTrainedModel, backend: Backend) -> None:
        self.model = model
        self.backend = backend
        self.num_passes = 0
        self.num_rows = 0
        self.projections: Projections | None = None
        self._adapters: Adapters | None = None
        self._installed: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self._compiled: Callable[[PassInputs], torch.Tensor] | None = None

    @property
    def is_compiled(self) -> bool:
        return self._compiled is not None

    @torch.no_grad()
    def forward(self, groups: Sequence[RowGroup]) -> torch.Tensor:
        """One ragged forward pass.

        Args:
            groups: at least one group with at least one row.

        Returns:
            Logits [N, vocab] in the model's dtype, for the logit rows of every group in order.

        Raises:
            UsageError: a group names an adapter that is not loaded.
        """
        for group in groups:
            if group.adapter is not None:
                self.check_adapter(group.adapter)
        with self.backend.running(groups) as inputs:
            logits = self._compiled(inputs) if self._compiled else self._eager(inputs)
        self.num_passes += 1
        self.num_rows += inputs.num_rows
        return logits

    def pack(self, projections: Projections) -> None:
        """Run eager passes over packed linear layers."""
        self.projections = projections
        self._installed = projections.installed

    @torch.no_grad()
    def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA folder beside the base weights, for row groups that name it.

        The first one packs the linear layers, unless a compiled program has done so.

        Raises:
            UsageError: not the native attention, a name in use, or an adapter that cannot be used here.
        """
        if not isinstance(self.backend, NativeBackend):
            raise UsageError(_no_adapters_here(name))
        adapter = read_adapter(path)
        if self._adapters is None:
            self.projections = self.projections or Projections(self.model, self.backend.handle)
            self._adapters = Adapters(self.model, self.backend, self.projections, self._probe)
        self._adapters.add(name, adapter)
        assert self.projections is not None
        self.pack(self.projections)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter that no request uses any more.

        Raises:
            UsageError: no such adapter.
        """
        self.check_adapter(name)
        assert self._adapters is not None
        self._adapters.remove(name)

    def check_adapter(self, name: str) -> None:
        """Refuse the name of an adapter that is not loaded.

        Raises:
            UsageError: it lists those that are, or says what adapters need.
        """
        if not isinstance(self.backend, NativeBackend):
            raise UsageError(_no_adapters_here(name))
        if self._adapters is None:
            raise UsageError(unknown_adapter(name, []))
        self._adapters.check_known(name)

    @torch.no_grad()
    def compile(self, projections: Projections, name: str) -> None:
        """Run later passes through a compiled program.

        Raises:
            RunError: the model does not compile.
            UsageError: the model is not one that the engine runs.
        """
        # Shows that the model runs, and allocates the pages of every layer. No request owns page 0 yet.
        with self.backend.running([RowGroup([0], 0, [0])]) as inputs:
            self._eager(inputs)
        self.projections = projections
        with self._own_attention():
            self._compiled = compile_forward(self.model, projections, name)

    def _probe(self) -> int:
        """Run a few rows through the model's own linear layers, for who watches; returns how many, keeps nothing."""
        installed, self._installed = self._installed, contextlib.nullcontext
        # Different tokens, so that not all of them go to the same expert.
        group = RowGroup([], 0, list(range(min(_PROBE_ROWS, self.model.config.get_text_config().vocab_size))), False)
        try:
            with self.backend.running([group]) as inputs:
                self._eager(inputs)
        finally:
            self._installed = installed
        return inputs.num_rows

    def _eager(self, inputs: PassInputs) -> torch.Tensor:
        with self._own_attention(), self._installed():
            output = self.model(
                input_ids=inputs.input_ids,
                position_ids=inputs.position_ids,
                use_cache=False,
                logits_to_keep=inputs.logit_rows,
            )
        if not self.backend.has_attended:
            raise UsageError(
                f"{type(self.model).__name__} does not call the attention it was given; this model is not supported"
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    @contextmanager
    def _own_attention(self) -> Iterator[None]:
        config, name = self.model.config, self.backend.attention_name
        before = config._attn_implementation
        self.model.set_attn_implementation(name)
        if config._attn_implementation != name:
            raise UsageError(f"model type {config.model_type} does not take another attention implementation")
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)


def make_runner(model: PreTrainedModel, config: EngineConfig, num_pages: int, name: str) -> ModelRunner:
    """Choose backend and forward for this model and machine.

    Args:
        model: in eval mode, on its device.
        config: settings.
        num_pages: K/V pages.
        name: what the model is called in messages.

    Raises:
        UsageError: settings that this machine or model cannot fulfil.
        RunError: the compiler fails, and compilation was asked for.
    """
    if _attention_for(config, model.device) is AttentionBackend.SDPA:
        _refuse_native_settings(config, "the sdpa attention")
        return ModelRunner(model, SdpaBackend(KVCache(num_pages, config.page_size, model.dtype, model.device)))
    backend = NativeBackend(num_pages, config.page_size, model.dtype, is_batch_invariant=config.batch_invariant)
    runner = ModelRunner(model, backend)
    wants_compiled = config.compile is CompileMode.ON or (
        config.compile is CompileMode.AUTO and model.num_parameters() >= MIN_WEIGHTS_TO_COMPILE
    )
    if not wants_compiled and not config.batch_invariant:
        return runner
    if config.batch_invariant:
        check_all_linear(model)
    projections = Projections(model, backend.handle)
    if config.batch_invariant:
        runner.pack(projections)
    if wants_compiled:
        try:
            runner.compile(projections, name)
        except RunError as error:
            if config.compile is CompileMode.ON:
                raise
            print(f"warning: {error}; going on uncompiled", file=sys.stderr)
    return runner


def _no_adapters_here(name: str) -> str:
    return (
        f"adapter '{name}': adapters chosen per request need the native attention (CPU, g++, pages of "
        f"{', '.join(map(str, PAGE_SIZES))} tokens); merge one at load with --adapter"
    )


def _attention_for(config: EngineConfig, device: torch.device) -> AttentionBackend:
    if config.attention is AttentionBackend.NATIVE and device.type != "cpu":
        raise UsageError("engine.attention: native is for CPUs; use sdpa or auto")
    if config.attention is not AttentionBackend.AUTO:
        return config.attention
    if device.type != "cpu" or config.page_size not in PAGE_SIZES or compiler() is None:
        return AttentionBackend.SDPA
    try:
        load_operators()
    except RunError as error:
        print(f"warning: {error}; going on with the sdpa attention", file=sys.stderr)
        return AttentionBackend.SDPA
    return AttentionBackend.NATIVE


def _refuse_native_settings(config: EngineConfig, what: str) -> None:
    if config.compile is CompileMode.ON:
        raise UsageError(f"engine.compile: on needs the native attention (CPU, g++, pages of 16), this is {what}")
    if config.batch_invariant:
        raise UsageError(f"engine.batch_invariant needs the native attention (CPU, g++, pages of 16), this is {what}")
