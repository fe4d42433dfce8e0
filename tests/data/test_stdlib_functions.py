"""The documented functions of the standard library as prompts."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from jacobi_llm.data.stdlib_functions import read_stdlib_functions

SOURCE = '''
import nothing_that_exists
raise SystemExit("source files are not run")

class Box:
    @property
    def size(
        self,
        unit: str = "é",
    ) -> int:
        """Size of the box.

        More,
     outdented.
        """
        return 1

    @size.setter
    def size(self, value):
        """Set it."""

    def plain(self): return 2

async def outer():
    "Doc é."; x = 1
    def inner():
        """```"""
'''


def test_the_format_is_kept(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "box").mkdir()
    (tmp_path / "box" / "__init__.py").write_text(SOURCE, encoding="utf-8")
    prompts = read_stdlib_functions(str(tmp_path))
    assert [prompt.id for prompt in prompts] == ["stdlib/box/Box.size", "stdlib/box/Box.size#2", "stdlib/box/outer"]
    assert prompts[0].text == (
        "Complete this Python function.\n```python\n"
        'def size(\n    self,\n    unit: str = "é",\n) -> int:\n'
        '    """Size of the box.\n\n    More,\n outdented.\n    """'
        "\n```"
    )
    assert prompts[2].text == 'Complete this Python function.\n```python\nasync def outer():\n    "Doc é."\n```'
    assert {prompt.group for prompt in prompts} == {"box"}


def test_the_library_of_this_python() -> None:
    before = set(sys.modules)
    prompts = read_stdlib_functions()
    assert set(sys.modules) - before == set()
    assert len(prompts) > 5000
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert [prompt.source_index for prompt in prompts] == list(range(len(prompts)))
    assert any(prompt.id == "stdlib/textwrap/dedent" for prompt in prompts)
    assert not any(".test." in f".{prompt.group}." for prompt in prompts)
    assert list(prompts) == sorted(prompts, key=lambda prompt: prompt.group or "")


def test_every_prompt_parses_as_a_function() -> None:
    for prompt in read_stdlib_functions()[::20]:
        head, fence, *body, end = (prompt.text or "").split("\n")
        assert (head, fence, end) == ("Complete this Python function.", "```python", "```")
        (function,) = ast.parse("\n".join(body)).body
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        assert ast.get_docstring(function)
        assert len(function.body) == 1
