"""The wheel against the tree, and the rules that keep the five packages apart."""

from __future__ import annotations

import ast
import importlib
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"src/jacobi_llm": "jacobi_llm"} | {
    room: f"jacobi_llm/{room}" for room in ("data", "train", "infer", "configs")
}
SHIPPED_SUFFIXES = {".py", ".cpp", ".yaml", ".json", ".jsonl"}
# Each room may import those after it.
ROOMS = ("train", "data", "infer", "configs")
BARE_MODULES = set(ROOMS)


def shipped_files() -> set[str]:
    """Files of the tree that belong into the wheel, by their path there."""
    return {
        f"{package}/{path.relative_to(ROOT / folder)}"
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if (path.suffix in SHIPPED_SUFFIXES or path.name == "py.typed") and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    # Built from a copy: setuptools leaves build/ and egg-info beside the sources.
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    out = tree / "dist"
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(tree)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_has_every_file_of_the_tree(wheel_files: set[str]) -> None:
    inside = {name for name in wheel_files if name.startswith("jacobi_llm/")}
    assert inside == shipped_files()


def test_wheel_puts_nothing_else_at_the_top(wheel_files: set[str]) -> None:
    tops = {name.partition("/")[0] for name in wheel_files}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"jacobi_llm"}


def test_wheel_carries_licence_and_console_commands(wheel_files: set[str]) -> None:
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_files)
    commands = {entry.name: entry.value for entry in metadata.distribution("jacobi-llm").entry_points}
    assert commands == {
        "jacobi-data": "jacobi_llm.data.cli:main",
        "jacobi-train": "jacobi_llm.train.cli:main",
        "jacobi-infer": "jacobi_llm.infer.cli:main",
    }


@pytest.mark.parametrize("package", [path.replace("/", ".") for path in FOLDERS.values()])
def test_packages_import(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__doc__


def test_versions_agree() -> None:
    module = importlib.import_module("jacobi_llm")
    assert metadata.version("jacobi-llm") == module.__version__


def test_modules_of_train_hide_no_dependency() -> None:
    """``deepspeed train/cllm.py`` puts train/ first on sys.path."""
    own = {path.stem for path in (ROOT / "train").glob("*.py")} - {"__init__"}
    taken = set(metadata.packages_distributions()) | set(sys.stdlib_module_names)
    assert own & taken == set()


def imported_modules(path: Path) -> set[str]:
    """Dotted names that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_one_way(room: str) -> None:
    above = {f"jacobi_llm.{other}" for other in ROOMS[: ROOMS.index(room)]}
    faults = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / room).glob("*.py"))
        for name in sorted(imported_modules(path))
        if name.startswith(".") or name.split(".")[0] in BARE_MODULES or ".".join(name.split(".")[:2]) in above
    ]
    assert faults == []


def test_every_dependency_has_both_bounds() -> None:
    open_ended = [
        requirement
        for requirement in metadata.requires("jacobi-llm") or []
        if not requirement.startswith("jacobi-llm")
        and not (">=" in requirement.partition(";")[0] and "<" in requirement.partition(";")[0])
    ]
    assert open_ended == []
