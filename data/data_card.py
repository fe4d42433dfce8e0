"""The README.md of an exported set: a data card for the hub, made of the manifest and of counted figures alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from jacobi_llm.configs.schema import ExportConfig
from jacobi_llm.data.record import ARROW_SCHEMA
from jacobi_llm.data.stats import SetProfile, joined, make_report
from jacobi_llm.data.store import Manifest

_COLUMNS = {
    "id": "of the prompt",
    "source_index": "number of the prompt in its source",
    "source": "name of the prompt source",
    "prompt_ids": "token ids that the model read, chat template included",
    "completion_ids": "token ids of the completion y*, end-of-sequence token included if it was reached",
    "finish_reason": "stop or length",
    "window": "block size n (tokens)",
    "target_source": "model: y* was decoded by the model; given: it came with the prompt",
    "blocks": "for each block: start in the completion; states y(0), y(1), ... before the fixed point; the fixed point "
    "where it is not y*; augmented states, if any were made",
}
_ABOUT = (
    "Jacobi trajectories of a causal language model, collected with jacobi-llm: for every block of a completion, the "
    "states that the Jacobi iteration went through on the way to its fixed point. For consistency distillation (arXiv "
    "2403.00835)."
)
_SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"))


@dataclass(frozen=True)
class SplitFigures:
    """One split of the data set.

    Attributes:
        name: train or heldout.
        manifest: of its set.
        profiles: by window (tokens).
        num_bytes, num_file_bytes: in memory (Arrow), and of the Parquet files.
    """

    name: str
    manifest: Manifest
    profiles: Mapping[int, SetProfile]
    num_bytes: int
    num_file_bytes: int

    @property
    def num_rows(self) -> int:
        return self.manifest.num_rows


def data_card(config: ExportConfig, splits: Sequence[SplitFigures]) -> str:
    """The whole file: YAML header, then what a reader must know.

    Args:
        config: title, licence, attribution and languages.
        splits: at least one.
    """
    title = config.name or PurePath(config.path).name or "trajectories"
    settings = public(splits[0].manifest.settings)
    lines = [
        f"# {title}",
        "",
        _ABOUT,
        "",
        *_list(
            {
                "model": settings.get("model", settings.get("tokenizer")),
                "prompt source": settings.get("input"),
                "targets": settings.get("target_source"),
                "windows (tokens)": settings.get("window"),
                "licence": config.license or "not stated",
                "attribution": config.attribution or "not stated",
            }
        ),
        "",
        "## Figures",
        "",
        *_figures(splits),
        "",
        "Tokens per forward: completion tokens over the passes of the block procedure, prompt reading left aside.",
        "",
        "## Columns",
        "",
        *(f"- `{field.name}`: {_COLUMNS[field.name]}" for field in ARROW_SCHEMA),
    ]
    for split in splits:
        lines += ["", f"## How {split.name} was made", "", *_provenance(split.manifest)]
    return f"---\n{header(config, title, splits)}\n---\n\n" + "\n".join(lines) + "\n"


def header(config: ExportConfig, title: str, splits: Sequence[SplitFigures]) -> str:
    """The YAML that the hub and ``datasets`` read: features, splits, sizes and where the files are."""
    from datasets import DatasetInfo, Features, SplitDict, SplitInfo
    from datasets.info import DatasetInfosDict
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCardData

    num_rows = sum(split.num_rows for split in splits)
    card = DatasetCardData(
        pretty_name=title,
        license=config.license,
        language=config.language or None,
        task_categories=["text-generation"],
        tags=["jacobi-decoding", "consistency-distillation"],
        size_categories=[next((name for bound, name in _SIZES if num_rows < bound), "n>10M")],
    )
    info = DatasetInfo(
        features=Features.from_arrow_schema(ARROW_SCHEMA),
        splits=SplitDict({split.name: SplitInfo(split.name, split.num_bytes, split.num_rows) for split in splits}),
        download_size=sum(split.num_file_bytes for split in splits),
        dataset_size=sum(split.num_bytes for split in splits),
    )
    DatasetInfosDict({"default": info}).to_dataset_card_data(card)
    files = [{"split": split.name, "path": f"data/{split.name}-*"} for split in splits]
    MetadataConfigs({"default": {"data_files": files}}).to_dataset_card_data(card)
    return str(card.to_yaml())


def public(value: Any) -> Any:
    """A value for the card: of absolute paths only the last part, since the others are the collector's own."""
    if isinstance(value, dict):
        return {key: public(one) for key, one in value.items()}
    if isinstance(value, list):
        return [public(one) for one in value]
    if isinstance(value, str) and re.match(r"[/~]|[A-Za-z]:[\\/]|\.\.?/", value):
        return re.split(r"[/\\]", value.rstrip("/\\"))[-1]
    return value


def _figures(splits: Sequence[SplitFigures]) -> list[str]:
    reports = {split.name: make_report(split.manifest, joined(split.profiles.values())) for split in splits}
    names = (
        "trajectories",
        "blocks",
        "states",
        "prompt_tokens",
        "completion_tokens",
        "tokens_per_forward",
        "iterations_per_block",
        "stationary_per_block",
        "unconverged_blocks",
    )
    lines = [_row(["", *reports]), _row(["---"] * (1 + len(reports)))]
    lines += [_row([name.replace("_", " "), *(report[name] for report in reports.values())]) for name in names]
    return lines


def _provenance(manifest: Manifest) -> list[str]:
    lines = _list(
        {
            "data sha256": manifest.data_sha256,
            "skipped prompts": {**manifest.num_skipped, **manifest.bad_input} or "none",
            "cleaning": public(manifest.cleaning) or "none",
            "settings": public(manifest.settings),
            "versions": manifest.versions,
            "model trained on": public(manifest.previous) or None,
        }
    )
    for parent in manifest.parents:
        lines += _list({"made of": public(parent)})
    return lines


def _list(values: Mapping[str, Any]) -> list[str]:
    return [f"- {name}: {_shown(value)}" for name, value in values.items() if value is not None]


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join('-' if cell is None else str(cell) for cell in cells)} |"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(one)}" for key, one in value.items() if one not in (None, [], {})) or "none"
    if isinstance(value, list):
        return ", ".join(_shown(one) for one in value) or "none"
    return " ".join(str(value).split())
