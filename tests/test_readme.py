"""README and docs against the code: commands, flags, recipes, paths, names, worked examples.

Without a marker, nothing is run: every command line is parsed by the program that it names. With ``-m slow``, the
blocks of the README that stand under ``<!-- tested -->`` are run in their order in a copy of the tree, on a tiny model.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from jacobi_llm.configs import cli
from jacobi_llm.configs.fields import section_types, setting_fields
from jacobi_llm.configs.schema import FillPolicy
from jacobi_llm.data import cli as data_cli
from jacobi_llm.infer import cli as infer_cli
from jacobi_llm.infer.embedded import EMBEDDED_NAME
from jacobi_llm.infer.fill import fill_guesses
from jacobi_llm.infer.rule import commit, next_window
from jacobi_llm.train import cli as train_cli
from jacobi_llm.train import cllm
from jacobi_llm.train.masks import clean_context_mask
from tests import tiny_models

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ALGORITHM = (ROOT / "docs" / "algorithm.md").read_text(encoding="utf-8")
EXPLAINED = ("README.md", "docs/algorithm.md", "docs/architecture.md", "docs/trajectories.md")
# docs/log.md is left out: a log tells what was typed then.
PAGES = {
    name: (ROOT / name).read_text(encoding="utf-8")
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "docs/algorithm.md",
        "docs/architecture.md",
        "docs/data.md",
        "docs/trajectories.md",
    )
}
EXPLAINED = ("README.md", "docs/algorithm.md", "docs/architecture.md", "docs/data.md", "docs/trajectories.md")
ROOMS = ("configs", "data", "train", "infer")
FOLDERS = (*ROOMS, "scripts", "src", "benchmarks", "tests", "docs")
PROGRAMS: dict[str, Callable[[Sequence[str]], int]] = {
    "jacobi-data": data_cli.main,
    "jacobi-train": train_cli.main,
    "jacobi-infer": infer_cli.main,
    "train/cllm.py": cllm.main,
}
TESTED = "<!-- tested -->\n"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEREDOC = re.compile(r"^cat > (\S+) <<'(\w+)'\n(.*?)^\2$\n?", re.MULTILINE | re.DOTALL)
_WORD = re.compile(r"[A-Za-z_]\w*")


def bash_blocks(text: str, *, tested_only: bool = False) -> list[str]:
    """Shell blocks in their order."""
    return [
        match[2]
        for match in _BLOCK.finditer(text)
        if match[1] == "bash" and (not tested_only or text[: match.start()].endswith(TESTED))
    ]


def code_spans(text: str) -> list[str]:
    """What stands between single backticks in running text, line breaks turned into spaces."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", _BLOCK.sub("", text))]


def simple_commands(script: str) -> Iterator[list[str]]:
    """The words of every command of a script, without what is behind a redirection."""
    for line in _HEREDOC.sub("", script).replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in lexer:
            if set(word) <= set("|&;"):
                yield words
                words = []
            else:
                words.append(word)
        cut = next((index for index, word in enumerate(words) if set(word) <= set("<>")), len(words))
        yield words[:cut]


def program_calls(words: list[str]) -> list[str] | None:
    """Program of ours and its arguments; None for other commands, and for the bare name of a program."""
    for index, word in enumerate(words):
        name = word.removeprefix(".venv/bin/")
        is_start = index == 0 or words[0] in ("deepspeed", "python")
        if name in PROGRAMS and is_start and (len(words) > index + 1 or name == "train/cllm.py"):
            return [name, *words[index + 1 :]]
    return None


def documented_calls() -> list[tuple[str, str]]:
    """(page, command line) of every call of our programs, in blocks and in running text."""
    calls = []
    for page, text in PAGES.items():
        scripts = [*bash_blocks(text), *(span for span in code_spans(text) if " " in span)]
        for script in scripts:
            for words in simple_commands(script):
                call = program_calls(words)
                # "N" and the like stand for a number in running text.
                if call is not None:
                    calls.append((page, shlex.join("1" if word == "N" else word for word in call)))
    return calls


@pytest.fixture
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the files that the README writes."""
    monkeypatch.chdir(tmp_path)
    for name, _, content in _HEREDOC.findall(README):
        (tmp_path / name).write_text(content, encoding="utf-8")
    return tmp_path


def test_the_programs_are_documented() -> None:
    found = {shlex.split(line)[0] for _, line in documented_calls()}
    assert found == set(PROGRAMS)
    subcommands = {tuple(shlex.split(line)[:2]) for page, line in documented_calls() if page == "README.md"}
    wanted = {("jacobi-data", name) for name in ("prompts", "collect", "stats", "validate")}
    trajectories = {shlex.split(line)[1] for page, line in documented_calls() if page == "docs/trajectories.md"}
    assert trajectories >= {command.name for command in data_cli.COMMANDS} - {"prompts", "collect"}
    wanted |= {("jacobi-train", "eval"), *(("jacobi-infer", name) for name in ("generate", "bench", "env"))}
    assert subcommands >= wanted


@pytest.mark.parametrize(("page", "line"), documented_calls())
@pytest.mark.usefixtures("in_empty_folder")
def test_documented_command_parses(page: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, *arguments = shlex.split(line)
    code = PROGRAMS[program]([*arguments, "--print-config"])
    captured = capsys.readouterr()
    assert code == 0, f"{page}: {line}: {captured.err}"
    assert captured.out


@pytest.mark.parametrize("page", PAGES)
def test_settings_and_flags_that_are_named_exist(page: str) -> None:
    switches = {"config", "print_config", "dry_run", "json", "debug", "help", "version", "chat", "raw"}
    others = {"num_accelerators", "smoke", "fix", "check"}
    names = {key.partition(".")[2] for key in setting_fields()}
    for span in code_spans(PAGES[page]):
        setting = re.fullmatch(r"(?:--)?([a-z]+)\.(\w+)(?:[ :=].*)?", span)
        if setting and setting[1] in section_types() and setting[2] not in ("py", "json", "yaml"):
            assert f"{setting[1]}.{setting[2]}" in setting_fields(), span
        for flag in re.findall(r"(?<![\w-])--([a-z][\w.-]*)", span):
            name = flag.replace("-", "_")
            assert name in setting_fields() or name in names | switches | others, f"--{flag} in {span}"


@pytest.mark.parametrize("page", EXPLAINED)
def test_paths_that_are_named_exist(page: str) -> None:
    for span in code_spans(PAGES[page]):
        if re.fullmatch(rf"({'|'.join(FOLDERS)})/[\w./-]*", span) or re.fullmatch(r"[\w-]+\.(md|toml|txt)", span):
            assert (ROOT / span).exists(), span
    for target in re.findall(r"\]\(([^)#]+)\)", PAGES[page]):
        if not target.startswith("https://") and not (target == "docs/quickstart.png" and "TODO(table)" in README):
            assert (ROOT / page).parent.joinpath(target).exists(), target


@pytest.mark.parametrize("page", EXPLAINED)
def test_names_of_the_code_exist(page: str) -> None:
    sources = [
        path
        for folder in FOLDERS
        if folder not in ("docs", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in (".py", ".yaml", ".json", ".sh", "")
    ]
    words = set(_WORD.findall((ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    for path in sources:
        words.update(_WORD.findall(path.read_text(encoding="utf-8", errors="ignore")))
    for span in code_spans(PAGES[page]):
        if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", span):
            assert set(_WORD.findall(span)) <= words, span


def test_every_setting_of_the_objective_is_explained() -> None:
    named = set(code_spans(ALGORITHM))
    assert {key for key in setting_fields() if key.startswith("objective.")} <= named


def test_the_named_recipes_are_shipped() -> None:
    listed = re.search(r"^Shipped recipes: (.*?)\. ", README, re.MULTILINE | re.DOTALL)
    assert listed is not None
    assert set(re.findall(r"`(\w+)`", listed[1])) == {path.stem for path in (ROOT / "configs").glob("*.yaml")}


def test_the_tested_families_are_those_of_the_suite() -> None:
    listed = re.search(r"Tested families: (.*?)\. Refused", README, re.DOTALL)
    assert listed is not None
    named = {name.strip() for name in listed[1].replace("\n", " ").split(",")}
    assert named == {family.removesuffix("_text") for family in tiny_models.FAMILIES}


def _ordinary(prefix: Sequence[str]) -> str:
    """The toy model of docs/algorithm.md: adds 1 to the last number before."""
    if len(prefix) % 2:
        return ","
    return str(int([word for word in prefix if word != ","][-1]) + 1)


def _trained(prefix: Sequence[str]) -> str:
    """The same text, the number taken from its place."""
    return "," if len(prefix) % 2 else str(len(prefix) // 2)


def _repeat_last(last_token_id: int, kept: list[int], num_missing: int) -> list[int]:
    return fill_guesses(
        FillPolicy.REPEAT_LAST,
        prompt_ids=[0],
        last_token_id=kept[-1] if kept else last_token_id,
        num_guesses=num_missing,
        key=(0, 0, 0),
    )


@pytest.mark.parametrize(("model", "num_passes"), [(_ordinary, 6), (_trained, 4)])
def test_the_worked_example_is_what_the_rule_gives(model: Callable[[Sequence[str]], str], num_passes: int) -> None:
    vocabulary = [",", *map(str, range(20))]
    known, carried, lines = ["0", ","], [], []
    while len(known) < 12:
        num_left = 12 - len(known)
        guesses = next_window(carried, min(3, num_left - 1), partial(_repeat_last, vocabulary.index(known[-1])))
        read = [vocabulary[token] for token in guesses]
        predicted = [model([*known, *read[:row]]) for row in range(len(read) + 1)]
        ids = [vocabulary.index(word) for word in predicted]
        result = commit(guesses, ids, stop_token_ids=(), num_tokens_left=num_left)
        carried = result.next_guesses
        cells = [[known[-1], *read], predicted, [vocabulary[token] for token in result.token_ids]]
        cells.append([vocabulary[token] for token in carried])
        shown = [f"`{' '.join(cell)}`" if cell else "" for cell in cells]
        lines.append(f"| {len(lines) + 1} | {' | '.join(shown)} |")
        known += cells[2]
    assert " ".join(known[2:]) == "1 , 2 , 3 , 4 , 5 ,"
    assert len(lines) == num_passes
    assert "\n".join(lines) in ALGORITHM


def test_the_mask_is_drawn_as_it_is() -> None:
    names = ["p0", "p1", "a0", "a1", "A0", "A1", "b0", "b1", "B0", "B1"]
    position = torch.tensor([[0, 1, 2, 3, 2, 3, 4, 5, 4, 5]])
    is_noisy = torch.tensor([[name[0] in "ab" for name in names]])
    block = torch.tensor([["ab".find(name[0]) for name in names]])
    block_start = torch.tensor([[{"a": 2, "b": 4}.get(name[0], 0) for name in names]])
    mask = clean_context_mask(position, is_noisy, block, block_start, torch.ones_like(is_noisy))[0, 0]
    lines = [f"      {' '.join(names)}"]
    for name, place, row in zip(names, position[0].tolist(), mask.tolist(), strict=True):
        lines.append(f"{name} {place}  {'  '.join('x' if seen else '.' for seen in row)}")
    assert "\n".join(lines) in ALGORITHM


@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_the_tested_blocks_run_in_their_order(tmp_path: Path) -> None:
    tree = tmp_path / "clone"
    for folder in (*ROOMS, "scripts", "src"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "constraints-cpu.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    # The default model is replaced in the cache by a tiny one; its byte tokens make prompts long.
    cache = tmp_path / "cache"
    tiny_models.save_tiny_checkpoint(cache / f"{EMBEDDED_NAME}-v1", max_position_embeddings=2048)
    # quickstart takes this interpreter's environment, and the README activates the one that quickstart would make.
    activate = tree / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f'PATH="{Path(sys.executable).parent}:$PATH"\n', encoding="utf-8")
    environment = {
        **os.environ,
        "JACOBI_LLM_CACHE": str(cache),
        "JACOBI_LLM_PYTHON": sys.executable,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    blocks = bash_blocks(README, tested_only=True)
    script = "set -euo pipefail\n" + "\n".join(blocks)
    done = subprocess.run(
        ["bash", "-c", script], cwd=tree, env=environment, capture_output=True, text=True, check=False, input=""
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    results = ("runs/smoke/train/final/config.json", "runs/mine/train/final/jacobi_config.json", "prompts.jsonl")
    results += (
        "runs/mine/stats.png",
        "runs/mine/stats.html",
        "runs/mine/eval/evaluation.png",
        "runs/mine/answers.jsonl",
    )
    assert [name for name in results if not (tree / name).is_file()] == []
    assert len((tree / "runs/mine/answers.jsonl").read_text(encoding="utf-8").splitlines()) == 4


def test_a_wrong_flag_in_a_page_would_be_seen() -> None:
    line = "head -n 4 a | deepspeed --num_accelerators 2 train/cllm.py --config math > b"
    calls = [call for words in simple_commands(line) if (call := program_calls(words))]
    assert calls == [["train/cllm.py", "--config", "math"]]
    assert cli.main("jacobi-infer", "", infer_cli.COMMANDS, ["generate", "--windwo", "3", "--print-config"]) == 2
