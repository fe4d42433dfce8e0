"""``jacobi_config.json``: what a checkpoint says of itself, beside the weights.

An engine reads the window, the fill policy and the acceptance by depth from it as its starting point; a person reads
where the weights come from. The keys are fixed here; a change of meaning raises ``SCHEMA_VERSION``.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

import jacobi_llm
from jacobi_llm.configs.errors import RunError
from jacobi_llm.configs.files import write_atomically
from jacobi_llm.configs.schema import FillPolicy, ObjectiveName

CHECKPOINT_CONFIG_NAME = "jacobi_config.json"
SCHEMA_VERSION = 1

Probability = Annotated[float, Field(ge=0.0, le=1.0)]


class CheckpointMode(StrEnum):
    """What the trained weights do when serving."""

    MERGED = "merged"
    LOSSLESS = "lossless"


class JacobiCheckpointConfig(BaseModel):
    """The content of ``jacobi_config.json``."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    schema_version: int = Field(SCHEMA_VERSION, ge=1, description="version of this schema")
    mode: CheckpointMode = Field(
        description="merged: the trained weights verify too, the output is theirs; "
        "lossless: an adapter on the guess rows only, the base verifies and the output is the base's"
    )
    window: int = Field(ge=1, description="window that was trained for (tokens)")
    fill: FillPolicy = Field(description="fill policy of fresh guesses that was measured")
    acceptance_by_depth: list[Probability] = Field(
        description="item d-1: P(guess at depth d accepted | depth d-1 accepted), held-out prompts; empty: not measured"
    )
    objective: ObjectiveName = Field(description="training objective")
    data_sha256: str = Field(pattern="^[0-9a-f]{64}$", description="sha256 of the manifest of the trajectories (hex)")
    base_model: str = Field(min_length=1, description="model that training started from: name, hub id or folder")
    tokens_trained: int = Field(ge=0, description="completion tokens trained on, repeats counted (tokens)")
    jacobi_llm_version: str = Field(
        default_factory=lambda: jacobi_llm.__version__, description="version of jacobi-llm that wrote the checkpoint"
    )


def load_checkpoint_config(folder: str | Path) -> JacobiCheckpointConfig | None:
    """Reads the file of a model or adapter folder.

    Returns:
        None when the folder has no such file: a model that was not trained here.

    Raises:
        RunError: when the file is there and cannot be read, one line for each fault.
    """
    path = Path(folder) / CHECKPOINT_CONFIG_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except json.JSONDecodeError as error:
        raise RunError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from error
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise RunError(f"{path}: cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise RunError(f"{path}: not a JSON object")
    version = content.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise RunError(
            f"{path}: schema_version {version} is newer than {SCHEMA_VERSION}, "
            f"which jacobi-llm {jacobi_llm.__version__} reads: upgrade jacobi-llm"
        )
    try:
        return JacobiCheckpointConfig.model_validate(content)
    except ValidationError as error:
        raise RunError([_fault(path, record["loc"], record["msg"]) for record in error.errors()]) from error


def save_checkpoint_config(config: JacobiCheckpointConfig, folder: str | Path) -> Path:
    """Writes the file into a model or adapter folder, in one step.

    Raises:
        RunError: when the folder or the file cannot be written.
    """
    return write_atomically(Path(folder) / CHECKPOINT_CONFIG_NAME, config.model_dump_json(indent=2) + "\n")


def _fault(path: Path, location: tuple[int | str, ...], message: str) -> str:
    return f"{path}: {'.'.join(str(part) for part in location)}: {message}"
