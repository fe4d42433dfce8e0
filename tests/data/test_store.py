"""Shards and manifest: complete or absent, and damage never goes unseen."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jacobi_llm.configs.errors import RunError, UsageError
from jacobi_llm.configs.files import remove_leftovers, write_atomically
from jacobi_llm.data import store
from jacobi_llm.data.store import (
    MANIFEST,
    Manifest,
    Shard,
    claimed_shard,
    close_set,
    locked_for_writing,
    read_shard,
    read_trajectories,
    write_record,
    write_shard,
)
from tests.data.test_record import GOOD

ROWS = [GOOD, replace(GOOD, id="b", source_index=8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of two shards. Shared: copy what you change."""
    path = tmp_path_factory.mktemp("set")
    manifest = Manifest({"window": [3]}, {"python": "3"}, 2, bad_input={"broken JSON": 1})
    for number, rows in enumerate((ROWS, [replace(GOOD, id="c", source_index=9)])):
        name, digest = write_shard(path, number, rows)
        manifest.shards[number] = Shard(name, len(rows), digest, {"reason": [1, 2]}, number)
    manifest.write(path)
    return path


def test_what_was_written_is_read_back(folder: Path) -> None:
    manifest = Manifest.read(folder)
    assert manifest.is_complete
    assert (manifest.num_rows, manifest.num_unconverged) == (3, 1)
    assert manifest.num_skipped == {"reason": 4}
    assert manifest.bad_input == {"broken JSON": 1}
    assert [row.id for row in read_trajectories(folder)] == ["a", "b", "c"]
    assert read_shard(folder, manifest.shards[0]) == ROWS
    assert not list(folder.glob(".*"))


def test_a_set_that_is_closed_while_it_is_read_is_read_whole(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Manifest.read(folder)
    for shard in whole.shards.values():
        (tmp_path / shard.file).write_bytes((folder / shard.file).read_bytes())
    replace(whole, shards={}).write(tmp_path)
    for number, shard in whole.shards.items():
        write_record(tmp_path, number, shard)

    read_record = store.read_record

    def too_late(path: Path, number: int) -> Shard:
        monkeypatch.undo()
        close_set(path)
        return read_record(path, number)

    monkeypatch.setattr(store, "read_record", too_late)
    assert Manifest.read(tmp_path) == whole
    assert not list(tmp_path.glob("shard-*.json"))


def test_a_shard_is_plain_parquet(folder: Path) -> None:
    assert pq.read_table(folder / "shard-00000.parquet").column("id").to_pylist() == ["a", "b"]


@given(data=st.data())
def test_no_flipped_byte_or_lost_tail_goes_unseen(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shard = Manifest.read(folder).shards[0]
    content = bytearray((folder / shard.file).read_bytes())
    if data.draw(st.booleans()):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    copy = tmp_path_factory.mktemp("damaged")
    (copy / shard.file).write_bytes(bytes(content))
    with pytest.raises(RunError, match="damaged, sha256") as caught:
        read_shard(copy, shard)
    assert len(caught.value.faults) == 1
    assert shard.file in str(caught.value)


def test_a_missing_shard_and_a_wrong_row_count_are_named(folder: Path, tmp_path: Path) -> None:
    shard = Manifest.read(folder).shards[0]
    with pytest.raises(RunError, match=r"shard-00000\.parquet: cannot be read"):
        read_shard(tmp_path, shard)
    with pytest.raises(RunError, match="2 rows, the manifest says 5"):
        read_shard(folder, replace(shard, num_rows=5))


def test_a_table_of_another_kind_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["x"]}), tmp_path / "shard-00000.parquet")
    digest = hashlib.sha256((tmp_path / "shard-00000.parquet").read_bytes()).hexdigest()
    with pytest.raises(RunError, match="columns are not those"):
        read_shard(tmp_path, Shard("shard-00000.parquet", 1, digest))
    (tmp_path / "shard-00000.parquet").write_bytes(b"no parquet")
    digest = hashlib.sha256(b"no parquet").hexdigest()
    with pytest.raises(RunError, match="not a trajectory shard"):
        read_shard(tmp_path, Shard("shard-00000.parquet", 1, digest))


@pytest.mark.parametrize("keep", [0, 1, 40, -2])
def test_a_torn_manifest_is_one_line(folder: Path, tmp_path: Path, keep: int) -> None:
    (tmp_path / MANIFEST).write_bytes((folder / MANIFEST).read_bytes()[:keep])
    with pytest.raises(RunError, match="damaged manifest") as caught:
        Manifest.read(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 99},
        {"num_shards": "2"},
        {"num_shards": 1},
        {"settings": None},
        {"surprise": 1},
        {"shards": {"0": {"file": "../other", "num_rows": 1, "sha256": "0"}}},
        {"shards": {"x": {}}},
        {"shards": [1]},
    ],
)
def test_a_manifest_that_says_something_else_is_refused(
    folder: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    payload = json.loads((folder / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps({**payload, **change}))
    with pytest.raises(RunError, match=r"manifest\.json"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"x"', "{}"])
def test_json_of_another_shape_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(RunError, match="damaged manifest"):
        Manifest.read(tmp_path)


def test_without_a_manifest_the_remedy_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="jacobi-data collect"):
        Manifest.read(tmp_path / "nowhere")


def test_leftovers_of_a_killed_writer_go_away(tmp_path: Path) -> None:
    names = (".shard-00003.parquet.ab12_xyz.tmp", ".manifest.json.abcdefgh.tmp", ".config.yaml.01234567.tmp")
    for name in (*names, ".other.tmp", "kept"):
        (tmp_path / name).write_bytes(b"half")
    Manifest({}, {}, 4).write(tmp_path)
    with locked_for_writing(tmp_path):
        left = sorted(path.name for path in tmp_path.iterdir())
        assert left == [".lock", ".other.tmp", ".shard-00003.parquet.ab12_xyz.tmp", "kept", "manifest.json"]
    with claimed_shard(tmp_path, 3) as is_ours:
        assert is_ours
        assert not (tmp_path / ".shard-00003.parquet.ab12_xyz.tmp").exists()


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with (
        locked_for_writing(tmp_path),
        pytest.raises(RunError, match="another process is writing"),
        locked_for_writing(tmp_path, timeout_s=0),
    ):
        pass
    with locked_for_writing(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="another folder"), locked_for_writing(tmp_path / "file" / "set"):
        pass


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_atomically(tmp_path / "f", "old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(RunError, match=r"cannot be written \(No space left on device\)"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["f"]
    remove_leftovers(path)
    assert path.read_text() == "old"


def test_a_link_stays_and_a_pipe_is_written_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "file")
    write_atomically(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / "file").read_text() == "text"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(tmp_path / "pipe", "text")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
    assert (tmp_path / "pipe").is_fifo()
