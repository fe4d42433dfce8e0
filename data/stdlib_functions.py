"""The prompt source ``stdlib``: the documented functions of the Python standard library (about 6,700 prompts).

Source files are read as text and parsed with ``ast``; no module is imported. One prompt is one function or method with
a docstring. The user turn is the line ``Complete this Python function.`` and a fenced python block with the signature
and the docstring as they stand in the source, moved left so that ``def`` starts the line. The group is the module.
Which functions there are depends on the Python version; their order does not depend on the machine.
"""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from jacobi_llm.infer.prompt import Prompt

SOURCE_NAME = "stdlib"
INSTRUCTION = "Complete this Python function."

# Tests and demos, packages of other people, and lib2to3, which Python 3.13 has dropped.
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "turtledemo", "lib2to3", "site-packages", "dist-packages", "__pycache__", "_bundled"}
)
_FENCE = "```"


@lru_cache(maxsize=2)
def read_stdlib_functions(root: str | None = None) -> tuple[Prompt, ...]:
    """Return the prompts of all documented functions, ordered by module name and then by place in the file.

    Args:
        root: folder to walk; the running interpreter's standard library if None.
    """
    folder = Path(root or sysconfig.get_path("stdlib"))
    prompts: list[Prompt] = []
    for module, path in sorted(_modules(folder)):
        count_of: dict[str, int] = {}
        for qualified_name, text in _documented_functions(path):
            # One name may be defined twice (in both branches of an if, as property and setter).
            count = count_of[qualified_name] = count_of.get(qualified_name, 0) + 1
            suffix = "" if count == 1 else f"#{count}"
            prompts.append(
                Prompt(
                    id=f"{SOURCE_NAME}/{module}/{qualified_name}{suffix}",
                    source=SOURCE_NAME,
                    source_index=len(prompts),
                    messages=None,
                    text=f"{INSTRUCTION}\n{_FENCE}python\n{text}\n{_FENCE}",
                    group=module,
                )
            )
    return tuple(prompts)


def _modules(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield (dotted module name, file) of every source file that is not skipped."""
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        # Names with a dash are build settings (config-3.11-x86_64-...), not modules.
        if _SKIPPED_FOLDERS.isdisjoint(parts[:-1]) and all(part.isidentifier() for part in parts):
            yield ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts), path


def _documented_functions(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (qualified name, signature and docstring) of the functions of one file; none if it does not parse."""
    try:
        # As the compiler sees it: with the file's own encoding and line ends, form feeds kept.
        source = path.read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
        lines = source.decode("utf-8").replace("\r\n", "\n").split("\n")
    except (SyntaxError, ValueError, OSError):
        return
    yield from _walk(tree, (), lines)


def _walk(node: ast.AST, outer: tuple[str, ...], lines: list[str]) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            text = _signature_and_docstring(child, lines)
            if text is not None:
                yield ".".join((*outer, child.name)), text
        is_scope = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from _walk(child, (*outer, child.name) if is_scope else outer, lines)  # type: ignore[attr-defined]


def _signature_and_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> str | None:
    """Return the source from ``def`` to the end of the docstring, or None without a docstring or with a code fence."""
    if not (ast.get_docstring(function, clean=False) or "").strip():
        return None
    docstring = function.body[0]
    assert docstring.end_lineno is not None
    assert docstring.end_col_offset is not None
    block = lines[function.lineno - 1 : docstring.end_lineno]
    # Column offsets count UTF-8 bytes.
    block[-1] = block[-1].encode("utf-8")[: docstring.end_col_offset].decode("utf-8")
    text = "\n".join(_moved_left(line, function.col_offset) for line in block)
    return None if _FENCE in text else text


def _moved_left(line: str, columns: int) -> str:
    """Remove up to ``columns`` leading blanks: docstring lines may be indented less than their function."""
    num_blanks = len(line) - len(line.lstrip(" \t"))
    return line[min(columns, num_blanks) :]
