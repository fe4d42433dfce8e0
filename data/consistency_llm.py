"""The JSON of Consistency_LLM's collector (hao-ai-lab, data/generate_trajectory.py): one list, one record per block.

What its trainer (cllm/train_cllm_global.py) reads of a record, batch size 1 written out as lists in lists:

- ``prompt_ids`` ``[[...]]``: prompt and all finished blocks before this one;
- ``answer_trajectory_ids`` ``[y(0), ..., fixed point]``, augmented states first; it draws one of all but the last, so
  there are at least two;
- ``teacher_output_ids`` ``[[...]]``: prompt and completion up to the end of this block;
- ``complete_teacher_output_ids`` ``[...]``: prompt and the whole completion;
- ``labels_ids`` ``[[...]]``: prompt and given completion, where it was given;

besides ``data_id`` (the completion), ``jacobian_itr_id`` (the block) and ``prompt_ids_len``.

Records that we write carry two keys more, which that trainer leaves alone: ``jacobi_llm`` in each one, with what the
others do not say, and ``jacobi_llm_set`` in the first one, the manifest. So nothing is lost on the way there and back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jacobi_llm.configs.errors import RunError
from jacobi_llm.configs.schema import TargetSource
from jacobi_llm.data.record import Block, Trajectory
from jacobi_llm.infer.rule import FinishReason, first_wrong

OURS = "jacobi_llm"
MANIFEST_KEY = "jacobi_llm_set"
_LARGEST_ID = 2**31 - 1
_LARGEST_INDEX = 2**63 - 1

Record = dict[str, Any]


class FaultyRecordError(ValueError):
    """A record that is no block of a trajectory.

    Attributes:
        reason: the kind of fault, for counting.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        super().__init__(f"{reason}{f' ({detail})' if detail else ''}")


# Out ---------------------------------------------------------------------------------------------------------------


def records_of(row: Trajectory, row_number: int, shard_number: int) -> list[Record]:
    """One record for each block of a trajectory.

    Args:
        row: the trajectory.
        row_number: in the set; it names the completion.
        shard_number: that it is stored in.
    """
    whole = [*row.prompt_ids, *row.completion_ids]
    shared = {
        "id": row.id,
        "source": row.source,
        "source_index": row.source_index,
        "finish_reason": row.finish_reason,
        "window": row.window,
        "target_source": row.target_source.value,
        "shard": shard_number,
        "num_prompt_tokens": len(row.prompt_ids),
        "num_blocks": len(row.blocks),
    }
    records = []
    for number, block in enumerate(row.blocks):
        end = row.fixed_point_of(block)
        # A block that was right from the start has one state only, which that trainer could not draw from.
        states = [*(block.augmented_states or ()), *block.states, end] if block.noisy_states else [end, end]
        prefix = whole[: len(row.prompt_ids) + block.start]
        record: Record = {
            "data_id": f"data_{row_number}",
            "jacobian_itr_id": f"itr_{number}",
            "prompt_ids_len": [len(prefix)],
            "prompt_ids": [prefix],
            "answer_trajectory_ids": states,
            "teacher_output_ids": [whole[: len(row.prompt_ids) + row.end_of(block)]],
            "complete_teacher_output_ids": whole,
        }
        if row.target_source is TargetSource.GIVEN:
            record["labels_ids"] = [whole]
        num_augmented = None if block.augmented_states is None else len(block.augmented_states)
        record[OURS] = {
            **shared,
            "start": block.start,
            "num_states": len(block.states),
            "num_augmented_states": num_augmented,
        }
        records.append(record)
    return records


# In, as we write it ------------------------------------------------------------------------------------------------


def row_of_ours(records: Sequence[Record]) -> Trajectory:
    """Inverse of :func:`records_of`.

    Raises:
        FaultyRecordError: the records are not those of one trajectory.
    """
    try:
        about = records[0][OURS]
        if len(records) != about["num_blocks"]:
            raise FaultyRecordError("blocks missing", f"{len(records)} of {about['num_blocks']}")
        whole = flat_ids(records[0], "complete_teacher_output_ids")
        num_prompt_tokens = _whole(about["num_prompt_tokens"])
        completion = whole[num_prompt_tokens:]
        starts = [_whole(record[OURS]["start"]) for record in records]
        row = Trajectory(
            id=_text(about["id"]),
            source_index=_whole(about["source_index"], _LARGEST_INDEX),
            source=_text(about["source"]),
            prompt_ids=whole[:num_prompt_tokens],
            completion_ids=completion,
            finish_reason=FinishReason(about["finish_reason"]).value,
            window=_whole(about["window"]),
            target_source=TargetSource(about["target_source"]),
            blocks=[
                _block_of_ours(record, completion[start:end])
                for record, start, end in zip(records, starts, [*starts[1:], len(completion)], strict=True)
            ],
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, FaultyRecordError):
            raise
        raise FaultyRecordError(f"the key {OURS} is damaged", f"{type(error).__name__}: {error}") from error
    return checked(row)


def _block_of_ours(record: Record, target: Sequence[int]) -> Block:
    states = state_ids(record)
    about = record[OURS]
    num_augmented = about["num_augmented_states"]
    first = 0 if num_augmented is None else _whole(num_augmented)
    fixed_point = states[-1]
    return Block(
        start=_whole(about["start"]),
        states=states[first : first + _whole(about["num_states"])],
        fixed_point=None if fixed_point == target else fixed_point,
        augmented_states=None if num_augmented is None else states[:first],
    )


# In, as the original collector writes it ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Vocabulary:
    """What ids mean.

    Attributes:
        size: ids are below it.
        eos_token_ids: ids that end a completion.
        pad_token_id: None where there is none, or where it ends completions too.
    """

    size: int
    eos_token_ids: frozenset[int]
    pad_token_id: int | None


def row_of_original(
    records: Sequence[Record], source: str, source_index: int, vocabulary: Vocabulary, repairs: Counter[str]
) -> Trajectory:
    """A trajectory of the records of one completion, with what the original collector gets wrong repaired.

    - Tokens after the first EOS of the completion are cut, in the states too, and so are the blocks after it. Only
      generated tokens are searched: the prompt may hold EOS.
    - Padding at the ends of the prompt and of the completion is removed.
    - Augmented states, which it puts before y(0), become ``augmented_states``: states from which on every iteration
      makes at least one more leading token right are true ones, those before are not.
    - A state longer than the fixed point is cut to the block; one that repeats the state before it is removed.
    - Its repetition filter removes single blocks: the completion is cut before the first that is missing.

    Args:
        records: in their order, not empty.
        source, source_index: of the trajectory.
        vocabulary: see :class:`Vocabulary`.
        repairs: is updated by what was done, how often.

    Raises:
        FaultyRecordError: they cannot be repaired.
    """
    numbers = [_number(record, "jacobian_itr_id", "itr_") for record in records]
    if numbers[0] != 0:
        raise FaultyRecordError("first block missing", f"begins with itr_{numbers[0]}")
    prompt = _without_padding(flat_ids(records[0], "prompt_ids"), vocabulary.pad_token_id)
    repairs["padding of a prompt removed"] += len(prompt) < len(flat_ids(records[0], "prompt_ids"))
    completion: list[int] = []
    drafts: list[tuple[int, list[list[int]]]] = []
    for index, (number, record) in enumerate(zip(numbers, records, strict=True)):
        if number != index:
            repairs["completion cut before a missing block"] += 1
            break
        prefix = _without_padding(flat_ids(record, "prompt_ids"), vocabulary.pad_token_id)
        if prefix != [*prompt, *completion]:
            raise FaultyRecordError("blocks do not follow one another", f"itr_{number}")
        states = _without_prefix(state_ids(record), prefix, record, repairs)
        drafts.append((len(completion), states))
        completion += states[-1]
    kept = _kept_length(completion, vocabulary, repairs)
    window = len(drafts[0][1][-1])
    blocks = [
        _block_of_original(start, states, completion[start : min(start + len(states[-1]), kept)], repairs)
        for start, states in drafts
        if start < kept
    ]
    completion = completion[:kept]
    row = Trajectory(
        id=str(records[0]["data_id"]),
        source_index=source_index,
        source=source,
        prompt_ids=prompt,
        completion_ids=completion,
        finish_reason=(FinishReason.STOP if completion[-1] in vocabulary.eos_token_ids else FinishReason.LENGTH).value,
        window=window,
        target_source=TargetSource.MODEL,
        blocks=blocks,
    )
    largest = max([*prompt, *completion, *(id_ for block in blocks for state in block.noisy_states for id_ in state)])
    if largest >= vocabulary.size:
        raise FaultyRecordError("token id beyond the tokenizer's vocabulary", f"{largest} of {vocabulary.size}")
    return checked(row)


def _without_prefix(
    states: list[list[int]], prefix: Sequence[int], record: Record, repairs: Counter[str]
) -> list[list[int]]:
    """States of the block alone, where they hold all that stands before it too: as long as ``teacher_output_ids``."""
    if "teacher_output_ids" not in record or len(states[-1]) != len(flat_ids(record, "teacher_output_ids")):
        return states
    if any(state[: len(prefix)] != list(prefix) or len(state) == len(prefix) for state in states):
        raise FaultyRecordError("states begin with another prompt than prompt_ids")
    repairs["states with their prompt cut to the block"] += len(states)
    return [state[len(prefix) :] for state in states]


def _kept_length(completion: Sequence[int], vocabulary: Vocabulary, repairs: Counter[str]) -> int:
    stop = next((i + 1 for i, token_id in enumerate(completion) if token_id in vocabulary.eos_token_ids), None)
    if stop is not None:
        repairs["tokens after the end of the completion cut"] += stop < len(completion)
        return stop
    kept = len(completion)
    while kept and completion[kept - 1] == vocabulary.pad_token_id:
        kept -= 1
    repairs["padding of a completion removed"] += kept < len(completion)
    if not kept:
        raise FaultyRecordError("the completion is empty")
    return kept


def _block_of_original(
    start: int, states: Sequence[Sequence[int]], target: Sequence[int], repairs: Counter[str]
) -> Block:
    length = len(target)
    if any(len(state) < length for state in states):
        raise FaultyRecordError("a state is shorter than the block")
    repairs["states longer than their block cut"] += sum(len(state) > len(states[-1]) for state in states)
    cut: list[list[int]] = []
    for state in states[:-1]:
        one = list(state[:length])
        if one != list(target) and one not in cut[-1:]:
            cut.append(one)
    repairs["states that repeat another removed"] += len(states) - 1 - len(cut)
    first = _first_true_state(cut, target)
    repairs["augmented states told apart"] += first
    return Block(start, cut[first:], None, cut[:first] or None)


def _first_true_state(states: Sequence[Sequence[int]], target: Sequence[int]) -> int:
    """Where the iteration begins: from there on every state has more leading tokens right than the one before."""
    rights = [first_wrong(state, target) for state in states]
    first = len(states)
    while first and (first == len(states) or rights[first - 1] < rights[first]):
        first -= 1
    return first


def _without_padding(ids: list[int], pad_token_id: int | None) -> list[int]:
    first, last = 0, len(ids)
    while first < last and ids[first] == pad_token_id:
        first += 1
    while last > first and ids[last - 1] == pad_token_id:
        last -= 1
    return ids[first:last]


# Both --------------------------------------------------------------------------------------------------------------


def flat_ids(record: Record, key: str) -> list[int]:
    """Token ids under ``key``, in however many lists of one they stand.

    Raises:
        FaultyRecordError: there are none.
    """
    value = record.get(key)
    while isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    return _ids(value, key)


def state_ids(record: Record) -> list[list[int]]:
    """All states of a record, the fixed point last.

    Raises:
        FaultyRecordError: there are none.
    """
    key = "answer_trajectory_ids"
    states = record.get(key)
    if not isinstance(states, list) or not states:
        raise FaultyRecordError(f"{key} is no list of states")
    return [_ids(state, key) for state in states]


def _ids(value: object, key: str) -> list[int]:
    if value is None:
        raise FaultyRecordError(f"{key} is missing")
    if not isinstance(value, list) or not value:
        raise FaultyRecordError(f"{key} is no list of token ids")
    if not all(type(one) is int and 0 <= one <= _LARGEST_ID for one in value):
        raise FaultyRecordError(f"{key} holds something that is no token id")
    return value


def _whole(value: object, most: int = _LARGEST_ID) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise TypeError(f"{value!r} is no whole number from 0 to {most}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    value.encode()  # a lone surrogate cannot be stored
    return value


def _number(record: Record, key: str, prefix: str) -> int:
    text = str(record.get(key))
    if not text.startswith(prefix) or not text.removeprefix(prefix).isdecimal():
        raise FaultyRecordError(f"{key} is not {prefix}N", text[:40])
    return int(text.removeprefix(prefix))


def number_of(data_id: str) -> int | None:
    """N of ``data_N``; None for other ids."""
    text = data_id.removeprefix("data_")
    return int(text) if data_id.startswith("data_") and text.isdecimal() and len(text) < 18 else None


def checked(row: Trajectory) -> Trajectory:
    """Return ``row`` if it is sound.

    Raises:
        FaultyRecordError: it is not.
    """
    try:
        row.check()
    except RunError as error:
        raise FaultyRecordError("no sound trajectory", str(error)) from error
    return row


def drop_zeros(repairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Repairs that were made, by name."""
    return {name: count for name, count in sorted(repairs) if count}
