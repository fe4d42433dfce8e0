"""The harness of the console commands: flags, faults, exit codes, and help that costs nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from jacobi_llm.configs import cli
from jacobi_llm.configs.errors import RunError, UsageError
from jacobi_llm.configs.schema import PromptFormat, Recipe
from jacobi_llm.data import cli as data_cli
from jacobi_llm.infer import cli as infer_cli
from jacobi_llm.train import cli as train_cli
from jacobi_llm.train import cllm

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = [
    ("jacobi-data", data_cli.COMMANDS, data_cli.main),
    ("jacobi-train", train_cli.COMMANDS, train_cli.main),
    ("jacobi-infer", infer_cli.COMMANDS, infer_cli.main),
]
COMMANDS = [(main, command) for _, commands, main in PROGRAMS for command in commands]

Seen = list[tuple[Recipe, cli.Options]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Recipe and options of each run, which does nothing."""
    calls: Seen = []

    def run(recipe: Recipe, options: cli.Options) -> int:
        calls.append((recipe, options))
        return 0

    monkeypatch.setattr(cli, "_load_run", lambda command: run)
    return calls


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(recipe: Recipe, options: cli.Options) -> int:
        raise error

    monkeypatch.setattr(cli, "_load_run", lambda command: run)


def collect(seen: Seen, arguments: Sequence[str]) -> tuple[Recipe, cli.Options]:
    assert data_cli.main(["collect", *arguments]) == 0
    return seen[-1]


def errors(capsys: pytest.CaptureFixture[str]) -> list[str]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--collect.max_tokens", "9"],
        ["--collect.max-tokens", "9"],
        ["--max-tokens", "9"],
        ["--max_tokens=9"],
        ["--max-tokens", "3", "--collect.max-tokens=9"],
    ],
)
def test_spellings_of_one_flag(seen: Seen, arguments: list[str]) -> None:
    recipe, options = collect(seen, arguments)
    assert recipe.collect.max_tokens == 9
    assert options.explicit == {"collect.max_tokens"}


@pytest.mark.parametrize("flag", ["--page-size", "--engine.page-size", "--engine.page_size"])
def test_engine_settings_have_short_flags(seen: Seen, flag: str) -> None:
    recipe, options = collect(seen, [flag, "32"])
    assert recipe.engine.page_size == 32
    assert options.explicit == {"engine.page_size"}


def test_other_sections_after_the_first_have_long_flags_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert train_cli.main(["eval", "--lr", "0.1"]) == 2
    assert errors(capsys) == ["error: unknown flag --lr (did you mean --train.lr?)"]


def test_format_shorthands(seen: Seen) -> None:
    assert collect(seen, ["--raw"])[0].collect.format is PromptFormat.RAW
    assert collect(seen, ["--raw", "--chat"])[0].collect.format is PromptFormat.CHAT
    assert collect(seen, ["--raw"])[1].explicit == {"collect.format"}


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["--ignore-eos"], True),
        (["--ignore_eos", "--json"], True),
        (["--ignore-eos", "true"], True),
        (["--generate.ignore-eos=yes"], True),
        (["--ignore-eos", "false"], False),
        (["--no-ignore-eos"], False),
        (["--generate.no-ignore-eos"], False),
        (["--no-generate.ignore-eos"], False),
    ],
)
def test_booleans(seen: Seen, arguments: list[str], value: bool) -> None:
    assert infer_cli.main(["generate", *arguments]) == 0
    assert seen[-1][0].generate.ignore_eos is value
    assert seen[-1][1].explicit == {"generate.ignore_eos"}


def test_lists(seen: Seen) -> None:
    for arguments in (["--windows", "1,4"], ["--windows", "1", "4"], ["--windows", "[1, 4]"], ["--windows=1,4"]):
        assert infer_cli.main(["bench", *arguments, "--json"]) == 0
        assert seen[-1][0].bench.windows == [1, 4]


def test_stop_strings_stay_as_they_are_typed(seen: Seen) -> None:
    for text in (", ", "\n", " a,b ", "[INST]", "---"):
        assert infer_cli.main(["generate", "--stop", text]) == 0
        assert seen[-1][0].generate.stop == [text]
    assert infer_cli.main(["generate", "--stop", "a, ", "\n\n", "--json"]) == 0
    assert seen[-1][0].generate.stop == ["a, ", "\n\n"]
    assert infer_cli.main(["generate", "--stop=--json"]) == 0
    assert seen[-1][0].generate.stop == ["--json"]
    assert infer_cli.main(["generate", "--stop", "null"]) == 0
    assert seen[-1][0].generate.stop is None


def test_prompts_may_look_like_anything(seen: Seen) -> None:
    for prompt in ("", "-", "-- x", "--dry run", "- item", "-5", "a=b", "null?", "{x: [", "1e-4", "x\n--json"):
        assert infer_cli.main(["generate", "--prompt", prompt]) == 0
        assert seen[-1][0].generate.prompt == prompt
    assert infer_cli.main(["generate", "--prompt=--json"]) == 0
    assert seen[-1][0].generate.prompt == "--json"


def test_options(seen: Seen) -> None:
    _, options = collect(seen, ["--json", "--dry-run", "--debug", "--config", "math"])
    assert (options.json, options.dry_run, options.debug) == (True, True, True)
    assert {"collect.window", "train.lr"} <= options.explicit
    _, options = collect(seen, [])
    assert options == cli.Options()


def test_all_faults_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("collect:\n  windw: 3\n  wave_size: 0\n")
    arguments = ["--config", str(recipe), "--windw", "3", "--window", "x", "--train.lr", "3", "--json=3", "foo"]
    assert data_cli.main(["collect", *arguments, "--dryrun", "--limit"]) == 2
    assert errors(capsys) == [
        "error: unknown flag --windw (did you mean --window?)",
        "error: --train.lr: jacobi-data collect does not read section train (it reads collect, engine, source, clean)",
        "error: --json=3: --json takes no value",
        "error: unexpected argument 'foo': settings are flags, see jacobi-data collect --help",
        "error: unknown flag --dryrun (did you mean --dry-run?)",
        "error: --limit needs a value: number of prompts to take (seeded draw); null takes all",
        f"error: {recipe}:2: unknown key collect.windw (did you mean collect.window?)",
        f"error: {recipe}:3: collect.wave_size = 0: it must be at least 1",
        "error: --window x: give a whole number",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["colect"], "unknown command colect (did you mean collect?)"),
        ([], "needs a command: prompts, collect, stats, show, validate, merge, split, export, import"),
        (["--window", "4"], "the command comes first"),
        (["collect", "-w", "4"], "unknown flag -w"),
        (["collect", "--collect-window", "4"], "unknown flag --collect-window (did you mean --collect.window?)"),
        (["collect", "--local_rank=0"], "unknown flag --local_rank"),
        (["collect", "--config"], "--config needs a recipe"),
        (["stats", "--dry-run"], "unknown flag --dry-run"),
    ],
)
def test_usage_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert data_cli.main(arguments) == 2
    (line,) = errors(capsys)
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize(
    ("error", "code", "lines"),
    [
        (UsageError(["a: b", "c"]), 2, ["error: a: b", "error: c"]),
        (RunError("shard\nis damaged"), 1, ["error: shard is damaged"]),
        (KeyboardInterrupt(), 130, ["interrupted"]),
        (BrokenPipeError(), 141, []),
        (
            ValueError("x\ny"),
            1,
            ["error: internal: ValueError: x y (run again with --debug for the traceback)"],
        ),
        (
            ModuleNotFoundError("no", name="pyarrow.lib"),
            1,
            ["error: jacobi-data needs pyarrow: pip install 'jacobi-llm[data]'"],
        ),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    lines: list[str],
) -> None:
    monkeypatch.setattr(cli, "_silence_stdout", lambda: None)
    fail_with(monkeypatch, error)
    assert data_cli.main(["collect"]) == code
    assert errors(capsys) == lines


def test_debug_prints_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fail_with(monkeypatch, ValueError("x"))
    assert data_cli.main(["collect", "--debug"]) == 1
    lines = errors(capsys)
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "error: internal: ValueError: x"


def test_one_rank_tells_a_usage_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    assert cllm.main(["--lr", "x"]) == 2
    assert errors(capsys) == []


def test_launcher_argument(seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    assert cllm.main(["--local_rank=1", "--config", "math", "--train.lr", "1e-4"]) == 0
    assert seen[-1][0].train.lr == 1e-4
    assert cllm.main(["--local-rank", "1", "--lr", "2e-4"]) == 0
    assert seen[-1][0].train.lr == 2e-4


def test_print_config_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str], seen: Seen) -> None:
    assert cllm.main(["--config", "math", "--lr", "1e-4", "--print-config"]) == 0
    path = tmp_path / "printed.yaml"
    path.write_text(capsys.readouterr().out)
    assert cllm.main(["--config", str(path)]) == 0
    assert cllm.main(["--config", "math", "--lr", "1e-4"]) == 0
    assert seen[0][0] == seen[1][0]


@pytest.mark.parametrize(("main", "command"), COMMANDS, ids=lambda value: getattr(value, "name", ""))
def test_help_of_every_command(
    main: object, command: cli.Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert callable(main)
    assert main([command.name, "--help"]) == 0
    text = capsys.readouterr().out
    assert command.summary in text
    assert f"example:\n  {command.example}" in text
    for section in command.sections:
        for setting in cli.setting_fields().values():
            if setting.section == section:
                assert f"{setting.info.description} (default: {setting.default_text()})" in text


@pytest.mark.parametrize(("main", "command"), COMMANDS, ids=lambda value: getattr(value, "name", ""))
def test_examples_are_valid(main: object, command: cli.Command, seen: Seen) -> None:
    import shlex

    program, *arguments = shlex.split(command.example)
    assert program in {name for name, _, _ in PROGRAMS}
    assert callable(main)
    assert main(arguments) == 0


def test_version_and_program_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert data_cli.main(["--version"]) == 0
    assert data_cli.main(["collect", "--version"]) == 0
    assert capsys.readouterr().out == "jacobi-data 0.1.0\n" * 2
    assert data_cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command.name in text and command.summary in text for command in data_cli.COMMANDS)


@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "jacobi_llm.data.cli"],
        ["-m", "jacobi_llm.infer.cli"],
        ["-m", "jacobi_llm.train.cli"],
    ],
)
def test_entries_import_nothing_heavy(arguments: list[str]) -> None:
    """Half a second for --help: the cost of torch alone is several times that."""
    code = (
        f"import sys, {arguments[1]} as entry\n"
        "codes = [entry.main(['--help'])] + [entry.main([command.name, '--help']) for command in entry.COMMANDS]\n"
        "heavy = {'torch', 'transformers', 'numpy', 'deepspeed', 'peft', 'datasets', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'{codes} {heavy}' if any(codes) or heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_script_runs_from_any_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "train" / "cllm.py"), "--local_rank=0", "--print-config"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("engine:\n")


def test_reader_of_a_pipe_may_leave(tmp_path: Path) -> None:
    command = f"{sys.executable} {ROOT / 'train' / 'cllm.py'} --print-config | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 141)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "path"), [(["stats", "a/b"], "a/b"), (["stats", "--json", "a"], "a"), (["stats", "--path", "a"], "a")]
)
def test_an_argument_without_a_flag_is_the_path(
    arguments: list[str], path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert data_cli.main([*arguments, "--print-config"]) == 0
    assert f"\nstats:\n  path: {path}\n" in capsys.readouterr().out


def test_several_arguments_without_a_flag_are_a_list_or_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert data_cli.main(["merge", "a", "--output", "c", "b", "--print-config"]) == 0
    assert "  paths:\n  - a\n  - b\n  output: c\n" in capsys.readouterr().out
    assert data_cli.main(["stats", "a", "b"]) == 2
    assert "unexpected argument 'b': stats.path takes one value, 'a' is it" in capsys.readouterr().err
