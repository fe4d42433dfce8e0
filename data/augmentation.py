"""Noise augmentation: more states to train on, made from the true ones. They never replace what was collected."""

from __future__ import annotations

import random
from collections.abc import Sequence

from jacobi_llm.configs.schema import Augmentation


def augmented_states(
    policy: Augmentation,
    states: Sequence[Sequence[int]],
    fixed_point: Sequence[int],
    *,
    vocab_size: int,
    share: float,
    rng: random.Random,
) -> list[list[int]]:
    """States made from those of one block.

    - ``cllm``: copies in which one wrong token is right, as published (Kou et al. 2024, arXiv 2403.00835,
      data/generate_trajectory.py, ``use_aug``). The code there goes from the last state but one down to the third,
      draws how many wrong tokens to mend, from 1 to all but one, but copies the state anew for each and keeps the last
      copy: one token is mended. A state with fewer than two wrong tokens gives nothing. Every copy is put before y(0)
      at once, which moves the others on: the next state is passed over, and in the end copies of copies are made. That
      is kept too; only that here the copies stand beside the states.
    - ``random-wrong``: of every state a copy in which ``share`` of the tokens, at least one, are drawn from the
      vocabulary, and are wrong.

    Args:
        policy: see above; ``none`` gives nothing.
        states: y(0), y(1), ... before the fixed point, each of n tokens.
        fixed_point: n tokens.
        vocab_size: ids are drawn below it; at least 2.
        share: of the tokens of a state, above 0 and up to 1.
        rng: all that is drawn.
    """
    match policy:
        case Augmentation.NONE:
            return []
        case Augmentation.CLLM:
            known = [list(state) for state in states]
            for j in range(len(states) - 2, 1, -1):
                copy = _with_one_mended(known[j], fixed_point, rng)
                if copy is not None:
                    known.insert(0, copy)
            return known[: len(known) - len(states)]
        case Augmentation.RANDOM_WRONG:
            return [_with_wrong(state, fixed_point, vocab_size, share, rng) for state in states]


def _with_one_mended(state: Sequence[int], fixed_point: Sequence[int], rng: random.Random) -> list[int] | None:
    wrong = [i for i, (token, right) in enumerate(zip(state, fixed_point, strict=True)) if token != right]
    if len(wrong) < 2:
        return None
    copy = list(state)
    position = rng.choice(wrong)
    copy[position] = fixed_point[position]
    return copy


def _with_wrong(
    state: Sequence[int], fixed_point: Sequence[int], vocab_size: int, share: float, rng: random.Random
) -> list[int]:
    copy = list(state)
    for position in rng.sample(range(len(copy)), max(1, round(share * len(copy)))):
        # Drawn from the ids but one, so that the right one is passed over.
        token_id = rng.randrange(vocab_size - 1)
        copy[position] = token_id + (token_id >= fixed_point[position])
    return copy
