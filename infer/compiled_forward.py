"""The forward pass of a model, compiled ahead of time, once per machine.

    forward = compile_forward(model, projections, attention_name)
    logits = forward(inputs)

One program for every number of rows: torch exports the model with its attention and linear layers as opaque operators
(infer/csrc), compiles what is between them to C++, and keeps the result in the user's cache, from where it loads in
milliseconds. Casts are kept where the eager forward has them: in bfloat16 both gave the same bits in every trial, in
float32 sums of norms are taken in another order.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from safetensors.torch import load_file, save_file
from torch import nn
from torch.export import Dim
from transformers import PreTrainedModel

from jacobi_llm.configs.errors import RunError
from jacobi_llm.infer.embedded import cache_dir
from jacobi_llm.infer.native import operators_fingerprint
from jacobi_llm.infer.pass_inputs import PassInputs
from jacobi_llm.infer.projections import Projections

MAX_ROWS = 1 << 16
_EXAMPLE_ROWS, _EXAMPLE_LOGIT_ROWS = 16, 7


class CompiledForward:
    """A loaded program with its constants; the projections are found through the running pass."""

    def __init__(self, program: Any) -> None:
        self._program = program

    def __call__(self, inputs: PassInputs) -> torch.Tensor:
        """Logits [N, vocab] of a pass that a backend has announced."""
        input_ids, position_ids, logit_rows = inputs.input_ids, inputs.position_ids, inputs.logit_rows
        if inputs.num_rows == 1:
            # The program knows no pass of one row; the second one belongs to no group.
            input_ids, position_ids = input_ids.expand(1, 2).contiguous(), position_ids.expand(1, 2).contiguous()
        num_logit_rows = logit_rows.shape[0]
        if num_logit_rows == 0:
            logit_rows = torch.zeros(1, dtype=torch.int64)
        logits: torch.Tensor = self._program(input_ids, position_ids, logit_rows)
        return logits[:num_logit_rows]


class _Forward(nn.Module):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
        output = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=logit_rows)
        logits: torch.Tensor = output.logits[0]
        return logits


def compile_forward(model: PreTrainedModel, projections: Projections, name: str) -> CompiledForward:
    """Load the program of ``model``, after compiling it if this machine has not done so yet.

    Args:
        model: in eval mode on the CPU, its attention implementation set to the native one.
        projections: of this model.
        name: what the model is called in messages.

    Raises:
        RunError: the model cannot be exported, or the compiler fails.
    """
    wrapper = _Forward(model)
    folder = cache_dir() / "compiled"
    folder.mkdir(parents=True, exist_ok=True)
    package = folder / f"{_fingerprint(model)}.pt2"
    with FileLock(package.with_suffix(".lock")), projections.installed():
        if not package.exists():
            _compile(wrapper, package, name)
        return CompiledForward(_load(wrapper, package))


def _load(wrapper: _Forward, package: Path) -> Any:
    with _quiet():
        program = torch._inductor.aoti_load_package(str(package))
    constants: dict[str, torch.Tensor] = {**load_file(_extra_constants(package))}
    constants.update(wrapper.named_parameters(remove_duplicate=False))
    constants.update(wrapper.named_buffers(remove_duplicate=False))
    wanted = {fqn: constants[fqn].detach() for fqn in program.get_constant_fqns()}
    program.load_constants(wanted, check_full_update=True, user_managed=True)
    return program


@torch.no_grad()
def _compile(wrapper: _Forward, package: Path, name: str) -> None:
    print(f"{name}: compiling the forward pass (once, about a minute)", file=sys.stderr, flush=True)
    start_s = time.perf_counter()
    rows, logit_rows = Dim("rows", min=2, max=MAX_ROWS), Dim("logit_rows", min=1, max=MAX_ROWS)
    example = (
        torch.zeros(1, _EXAMPLE_ROWS, dtype=torch.int64),
        torch.arange(_EXAMPLE_ROWS)[None],
        torch.arange(_EXAMPLE_LOGIT_ROWS),
    )
    partial = package.with_suffix(f".{os.getpid()}.pt2")
    try:
        with _quiet():
            program = torch.export.export(
                wrapper, example, dynamic_shapes=({1: rows}, {1: rows}, {0: logit_rows}), strict=False
            )
            torch._inductor.aoti_compile_and_package(
                program,
                package_path=str(partial),
                inductor_configs={
                    "emulate_precision_casts": True,
                    "aot_inductor.package_constants_in_so": False,
                    "always_keep_tensor_constants": True,
                },
            )
    except Exception as error:  # whatever tracing or the compiler raises
        partial.unlink(missing_ok=True)
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RunError(f"{name}: the forward pass does not compile ({first}); use --engine.compile off") from error
    own = {key for key, _ in (*wrapper.named_parameters(), *wrapper.named_buffers())}
    extra = {key: value for key, value in program.constants.items() if key not in own and torch.is_tensor(value)}
    save_file({key: value.contiguous().clone() for key, value in extra.items()}, _extra_constants(package))
    os.replace(partial, package)
    print(f"{name}: compiled in {time.perf_counter() - start_s:.0f} s", file=sys.stderr, flush=True)


def _extra_constants(package: Path) -> Path:
    """Tensors that tracing made and the model does not hold."""
    return package.with_suffix(".safetensors")


def _fingerprint(model: PreTrainedModel) -> str:
    weights = "\n".join(f"{name} {tuple(value.shape)} {value.dtype}" for name, value in model.state_dict().items())
    # A trained model shares the program of its base: where a model lies is no part of it.
    settings = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
    parts = (
        type(model).__name__,
        json.dumps(settings, sort_keys=True, default=str),
        weights,
        torch.__version__,
        transformers.__version__,
        Path(__file__).read_text(encoding="utf-8"),
        operators_fingerprint(),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@contextmanager
def _quiet() -> Iterator[None]:
    """torch warns about its own names while it exports."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
