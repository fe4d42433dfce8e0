"""The near-tie rule: when may two greedy decodes of one prompt differ?

Sums in another order round in another way, so two tokens with almost the same logit can change places. A difference
is explained when, at the first position that differs, both tokens lie within a bound of the reference's best logit;
anything else is a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedModel

FP32_BOUND = 1e-4


@dataclass(frozen=True)
class Difference:
    """The first place where a decode leaves the reference.

    Attributes:
        position: completion position, from 0.
        gap: distance of the lower of the two tokens' logits from the best one; infinite when one decode ended early.
    """

    position: int
    gap: float

    def is_explained(self, bound: float = FP32_BOUND) -> bool:
        """Tell whether rounding explains it."""
        return self.gap < bound


@torch.inference_mode()
def reference_ids(
    model: PreTrainedModel, prompt_ids: Sequence[int], *, max_tokens: int, stop_token_ids: Sequence[int]
) -> list[int]:
    """Decode greedily with transformers' own ``generate``, one prompt alone.

    Args:
        model: with an attention of transformers.
        prompt_ids: at least one token.
        max_tokens: longest completion (tokens).
        stop_token_ids: every id that ends it; empty for none.

    Returns:
        The completion, the stop token included when one was reached.
    """
    stop = list(stop_token_ids)
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=max_tokens, eos_token_id=stop or None, pad_token_id=stop[0] if stop else 0
    )
    ids = torch.tensor([list(prompt_ids)], device=model.device)
    # generate fills what is not set here from the model's own settings, which may stop, sample or penalise.
    models_own, model.generation_config = model.generation_config, settings
    try:
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids))  # type: ignore[operator]
    finally:
        model.generation_config = models_own
    completion: list[int] = output[0, len(prompt_ids) :].tolist()
    return completion


def first_difference(
    model: PreTrainedModel, prompt_ids: Sequence[int], reference: Sequence[int], token_ids: Sequence[int]
) -> Difference | None:
    """Return where ``token_ids`` leaves ``reference``, with the gap there; None when they are equal.

    Args:
        model: the model that decoded both.
        prompt_ids: their prompt.
        reference, token_ids: the completions.
    """
    pairs = enumerate(zip(reference, token_ids, strict=False))
    position = next((index for index, (right, got) in pairs if right != got), None)
    if position is None:
        if len(reference) == len(token_ids):
            return None
        return Difference(min(len(reference), len(token_ids)), float("inf"))
    prefix = [*prompt_ids, *reference[:position]]
    return Difference(position, choice_gap(model, prefix, (reference[position], token_ids[position])))


@torch.inference_mode()
def choice_gap(model: PreTrainedModel, token_ids: Sequence[int], choices: Sequence[int]) -> float:
    """Return how far the lowest logit of ``choices`` after ``token_ids`` lies below the best one.

    Args:
        model: with an attention of transformers.
        token_ids: at least one.
        choices: token ids that two decodes chose.
    """
    ids = torch.tensor([list(token_ids)], device=model.device)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1].double()
    return float(logits.max() - logits[list(choices)].min())
