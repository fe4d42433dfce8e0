"""Made sets appear whole or not at all, and what a killed command leaves does not stay."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jacobi_llm.configs.errors import RunError, UsageError
from jacobi_llm.data.set_writer import fresh_folder

_KILLED = """
import os, signal, sys
from jacobi_llm.data.set_writer import fresh_folder
with fresh_folder(sys.argv[1], "merge.output") as staging:
    (staging / "shard").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_folder_appears_when_it_is_done(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "set"
    with fresh_folder(str(output), "merge.output") as staging:
        (staging / "file").write_text("all")
        assert not output.exists()
    assert (output / "file").read_text() == "all"
    assert [path.name for path in output.parent.iterdir()] == ["set"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with fresh_folder(str(tmp_path / "set"), "merge.output") as staging:
            (staging / "file").write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_command_has_left_goes_away(tmp_path: Path) -> None:
    output = tmp_path / "set[1]"
    (tmp_path / ".set[1].b.abcd_123.tmp").mkdir()  # of another command, whose output is set[1].b
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(output)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2
    with fresh_folder(str(output), "merge.output"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".set[1].b.abcd_123.tmp", "set[1]"]


def test_two_commands_do_not_write_one_set(tmp_path: Path) -> None:
    output = str(tmp_path / "set")
    with fresh_folder(output, "merge.output"):
        with pytest.raises(RunError, match="another process is writing there"), fresh_folder(output, "merge.output"):
            pass
        assert not (tmp_path / "set").exists()
    assert (tmp_path / "set").is_dir()


def test_an_output_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file", tmp_path / "file" / "set"):
        with pytest.raises(UsageError, match=r"merge\.output"), fresh_folder(str(output), "merge.output"):
            pass
