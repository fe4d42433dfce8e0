"""Prompts of files and hub data sets, one at a time: what is bad or left out is counted by name."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping

from jacobi_llm.configs.errors import RunError, UsageError
from jacobi_llm.configs.schema import OnBadInput, PromptSchema, SourceConfig, Turns
from jacobi_llm.configs.wording import counted
from jacobi_llm.data.readers import STDIN, Record, find_files, read_hub, read_records
from jacobi_llm.data.schemas import NAMES, LeftOutError, Sample, detect, parse_columns, renamed, samples
from jacobi_llm.infer.prompt import MAX_REPORTED_FAULTS, BadRecordError, Prompt, kind_of, printable, text_or_number

HUB_PREFIX = "hub:"
_LOGGER = logging.getLogger(__name__)


class PromptReader:
    """Reads one source once. The counts are whole when :meth:`prompts` has come to its end.

    Attributes:
        num_records: read, the bad ones included.
        num_read: records that gave prompts, by schema.
        num_skipped: records that gave none, by reason.
    """

    def __init__(self, source: str, reading: SourceConfig, on_bad_input: OnBadInput) -> None:
        """Look where the source is.

        Raises:
            UsageError: it is nowhere, or ``source.columns`` is wrong.
        """
        self.source = source
        self.num_records = 0
        self.num_read: Counter[PromptSchema] = Counter()
        self.num_skipped: Counter[str] = Counter()
        self._reading = reading
        self._on_bad_input = on_bad_input
        self._faults: list[str] = []
        self._ids: set[bytes] = set()
        self._num_samples = 0
        try:
            self._columns = parse_columns(reading.columns)
        except ValueError as error:
            raise UsageError(f"source.columns: {error}") from error
        self._is_hub = source.startswith(HUB_PREFIX)
        self._files = [] if self._is_hub or source == STDIN else find_files(source)

    def prompts(self) -> Iterator[Prompt]:
        """The prompts in the order of the source; ``source_index`` counts records (samples with ``turns=all``) from 0.

        Raises:
            UsageError: the source cannot be read, holds no prompt, or (FAIL) a record is bad: all are named together.
            RunError: more than ``source.max_bad_share`` of the records gave nothing.
        """
        first_index = 0
        for prefix, records in self._parts():
            last = 0
            for record in records:
                last = record.number
                self.num_records += 1
                yield from self._prompts_of(record, prefix, first_index + record.number - 1)
            first_index += last
        self._check_end()

    def summary(self) -> str:
        """In one line, such as ``read as ShareGPT: 1,204 dialogues, 17 skipped: 12 assistant first, 5 empty``."""
        parts = [f"{NAMES[schema]}: {_prompts(schema, count)}" for schema, count in self.num_read.most_common()]
        line = f"{self.source}: read as {' and '.join(parts) or 'nothing'}"
        if self.num_skipped:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.num_skipped.most_common())
            line += f", {self.num_skipped.total():,} skipped: {reasons}"
        return line

    def _parts(self) -> Iterator[tuple[str, Iterator[Record]]]:
        """Records, each with what begins the ids of a part: of several files, its name, since each may count from 1."""
        if self._is_hub:
            yield "", read_hub(self.source.removeprefix(HUB_PREFIX))
        elif self.source == STDIN:
            yield "", read_records(STDIN)
        else:
            for name, path in self._files:
                yield (f"{name}:" if len(self._files) > 1 else ""), read_records(path)

    def _prompts_of(self, record: Record, prefix: str, index: int) -> Iterator[Prompt]:
        try:
            schema, found = self._samples_of(record.value, record.number, prefix)
            self._claim_ids(found)
        except LeftOutError as error:
            self.num_skipped[str(error)] += 1
            _LOGGER.info("%s: %s; skipped", record.place, error)
        except BadRecordError as error:
            self._note_bad(record.place, error)
        else:
            self.num_read[schema] += 1
            for sample in found:
                yield self._prompt(sample, index)

    def _samples_of(self, value: object, number: int, prefix: str) -> tuple[PromptSchema, list[Sample]]:
        if isinstance(value, BadRecordError):
            raise value
        if not isinstance(value, Mapping):
            raise BadRecordError("not a JSON object", f"not a JSON object but {kind_of(value)}")
        record = renamed(value, self._columns) if self._columns else dict(value)
        if self._reading.group_column is not None:
            record["group"] = text_or_number(value, self._reading.group_column)
            if record["group"] is None:
                column = self._reading.group_column
                raise BadRecordError("no group in the record", f"source.group_column: no '{column}' in the record")
        layout = self._reading.layout
        schema = detect(record) if layout is PromptSchema.AUTO else layout
        return schema, list(samples(record, schema, self._reading.turns, str(number), prefix))

    def _claim_ids(self, found: list[Sample]) -> None:
        keys = [hashlib.blake2b(sample.id.encode(), digest_size=12).digest() for sample in found]
        for sample, key in zip(found, keys, strict=True):
            if key in self._ids:
                raise BadRecordError("duplicate id", f"duplicate id '{sample.id}'")
        self._ids.update(keys)

    def _note_bad(self, place: str, error: BadRecordError) -> None:
        self.num_skipped[error.reason] += 1
        fault = f"{place}: {printable(error.detail)}"
        if self._on_bad_input is OnBadInput.SKIP:
            _LOGGER.warning("%s; skipped", fault)
        else:
            self._faults.append(fault if len(self._faults) < MAX_REPORTED_FAULTS else "")

    def _prompt(self, sample: Sample, index: int) -> Prompt:
        is_all = self._reading.turns is Turns.ALL
        prompt = Prompt(
            id=sample.id,
            source="<stdin>" if self.source == STDIN else self.source,
            source_index=self._num_samples if is_all else index,
            messages=sample.messages,
            text=sample.text,
            completion=sample.completion,
            group=sample.group,
            answer=sample.answer,
            adapter=sample.adapter,
        )
        self._num_samples += 1
        return prompt

    def _check_end(self) -> None:
        if self._faults:
            shown = [fault for fault in self._faults if fault]
            num_more = len(self._faults) - len(shown)
            more = [f"{self.source}: {num_more} more bad records"] if num_more else []
            remedy = f"{self.source}: mend these records, or skip and count them with on_bad_input=skip"
            raise UsageError([*shown, *more, remedy])
        num_skipped = self.num_skipped.total()
        if not self._num_samples:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.num_skipped.most_common())
            raise UsageError(
                f"{self.source}: no prompt in it" + (f" ({num_skipped:,} skipped: {reasons})" if reasons else "")
            )
        if num_skipped > self._reading.max_bad_share * self.num_records:
            raise RunError(
                f"{self.source}: {num_skipped:,} of {self.num_records:,} records are bad, more than "
                f"source.max_bad_share={self._reading.max_bad_share:g} allows; {self.summary()}"
            )


def _prompts(schema: PromptSchema, count: int) -> str:
    return counted(count, "dialogue" if schema in (PromptSchema.MESSAGES, PromptSchema.SHAREGPT) else "prompt")
