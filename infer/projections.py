"""The linear layers of a model, packed for the CPU: weights in the order in which oneDNN reads them, and projections of
one input as one wide product.

    projections = Projections(model, handle)
    with projections.installed():        # model's linear layers now call the packed ones
        ...

Reading packed weights takes about half the time of reading rows (docs/log.md). The model's own layers and weights stay
as they are, so that anything else may go on using them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from jacobi_llm.configs.errors import UsageError

# Layers of one parent that read the same input.
FUSED_SETS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# oneDNN chooses the order of the weights for so many rows; it serves one row and a hundred equally well.
_PACKED_FOR_ROWS = 16


class Projection(nn.Module):
    """One product with registered weights: [*, in_features] -> [*, out_features]."""

    def __init__(self, index: int, out_features: int) -> None:
        super().__init__()
        self.index = index
        self.out_features = out_features

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.ops.jacobi_llm.linear(input_, self.index, self.out_features)
        return output


class _Wide:
    """The product that several layers share; the first of them computes it, the last one lets go of it."""

    def __init__(self, projection: Projection, sizes: list[int]) -> None:
        self.projection = projection
        self.sizes = sizes
        self._input: torch.Tensor | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()

    def part(self, input_: torch.Tensor, number: int) -> torch.Tensor:
        if self._input is not input_:
            self._input = input_
            self._outputs = self.projection(input_).split(self.sizes, dim=-1)
        output = self._outputs[number]
        if number == len(self.sizes) - 1:
            self._input, self._outputs = None, ()
        return output


class _Part(nn.Module):
    """Stands where one layer of a fused set stood."""

    def __init__(self, wide: _Wide, number: int) -> None:
        super().__init__()
        self.wide = wide
        self.number = number

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        return self.wide.part(input_, self.number)


class Projections:
    """Packed copies of every linear layer of a model.

    Attributes:
        places: layer name -> (projection index, first output column, number of columns), for low-rank updates.
        head: name of the layer that sees the logit rows only, if it is a linear layer.
    """

    def __init__(self, model: PreTrainedModel, handle: int) -> None:
        self._handle = handle
        self._head = model.get_output_embeddings()
        self.head: str | None = None
        self._swaps: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []
        self.places: dict[str, tuple[int, int, int]] = {}
        for name, module in model.named_modules():
            taken: set[str] = set()
            for names in FUSED_SETS:
                if _can_fuse(module, names):
                    self._add_fused(name, module, names)
                    taken.update(names)
            for child_name, child in module.named_children():
                if child_name not in taken and _is_linear(child):
                    self._add_alone(name, module, child_name)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within the block the model calls the packed layers."""
        for parent, name, _, packed in self._swaps:
            parent._modules[name] = packed
        try:
            yield
        finally:
            for parent, name, own, _ in self._swaps:
                parent._modules[name] = own

    def _add_alone(self, parent_name: str, parent: nn.Module, child_name: str) -> None:
        layer = parent.get_submodule(child_name)
        weight, bias = weight_of(layer)
        is_head = layer is self._head
        projection = self._register(weight, bias, is_head=is_head)
        self._swap(parent, child_name, projection)
        name = self._place(parent_name, child_name, projection.index, 0, weight.shape[0])
        if is_head:
            self.head = name

    def _add_fused(self, parent_name: str, parent: nn.Module, names: tuple[str, ...]) -> None:
        parts = [weight_of(parent.get_submodule(name)) for name in names]
        biases = [bias for _, bias in parts if bias is not None]
        projection = self._register(torch.cat([weight for weight, _ in parts]), torch.cat(biases) if biases else None)
        sizes = [weight.shape[0] for weight, _ in parts]
        wide = _Wide(projection, sizes)
        for number, name in enumerate(names):
            self._swap(parent, name, _Part(wide, number))
            self._place(parent_name, name, projection.index, sum(sizes[:number]), sizes[number])

    def _place(self, parent_name: str, name: str, index: int, first: int, size: int) -> str:
        full_name = f"{parent_name}.{name}" if parent_name else name
        self.places[full_name] = (index, first, size)
        return full_name

    def _swap(self, parent: nn.Module, name: str, packed: nn.Module) -> None:
        self._swaps.append((parent, name, parent.get_submodule(name), packed))

    def _register(self, weight: torch.Tensor, bias: torch.Tensor | None, *, is_head: bool = False) -> Projection:
        is_packed = weight.dtype == torch.bfloat16 and torch.backends.mkldnn.is_available()
        stored = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS) if is_packed else weight
        index: int = torch.ops.jacobi_llm.add_projection(self._handle, stored, bias, is_packed, is_head)
        return Projection(index, weight.shape[0])


def check_all_linear(model: PreTrainedModel) -> None:
    """Refuse models with products outside of linear layers (experts in one tensor, say), which no tile reaches.

    Raises:
        UsageError: such a weight, by name.
    """
    known = {
        id(parameter)
        for module in model.modules()
        if _is_linear(module) or isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and id(parameter) not in known:
            raise UsageError(
                f"engine.batch_invariant: {name} of model type {model.config.model_type} is used outside of a linear "
                "layer; this model has no batch-invariant mode"
            )


def _is_linear(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, Conv1D)


def weight_of(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight [out_features, in_features] and bias of a linear layer."""
    if isinstance(module, Conv1D):
        return module.weight.detach().t(), module.bias.detach()
    assert isinstance(module, nn.Linear)
    return module.weight.detach(), None if module.bias is None else module.bias.detach()


def _can_fuse(module: nn.Module, names: tuple[str, ...]) -> bool:
    linears = [module._modules.get(name) for name in names]
    kinds = {
        (linear.in_features, linear.bias is None, linear.weight.dtype)
        for linear in linears
        if type(linear) is nn.Linear
    }
    return all(type(linear) is nn.Linear for linear in linears) and len(kinds) == 1
