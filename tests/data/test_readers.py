"""Files of every format: the same rows, in bounded memory; damage is named by file and number."""

from __future__ import annotations

import csv
import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.schema import OnBadInput, Split
from jacobi_llm.data.readers import read_records
from jacobi_llm.data.sources import read_source

RECORDS = [{"prompt": f"say {index}\né", "completion": f"word {index}"} for index in range(3)]


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    """Write the records in the format that the name says."""
    lines = "\n".join(map(json.dumps, records)).encode()  # no final newline
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines))
    elif path.name.endswith(".zst"):
        with pa.CompressedOutputStream(str(path), "zstd") as stream:
            stream.write(lines)
    elif path.suffix == ".json":
        path.write_bytes(b"\xef\xbb\xbf" + json.dumps(records, indent=1).encode())
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path, row_group_size=2)
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(records)
        with pa.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    elif path.suffix == ".feather":
        table = pa.Table.from_pylist(records)
        with pa.ipc.new_file(str(path), table.schema) as stream:
            stream.write_table(table)
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="", encoding="utf-8") as text:
            writer = csv.DictWriter(text, records[0], delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(records)
    else:
        path.write_bytes(lines)
    return path


FORMATS = ("jsonl", "jsonl.gz", "json.zst", "json", "csv", "tsv", "parquet", "arrow", "feather", "json.gz", "ndjson")


@pytest.mark.parametrize("ending", FORMATS)
def test_every_format_gives_the_same_rows(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path / f"a.{ending}", RECORDS)
    assert [record.value for record in read_records(path)] == RECORDS
    found = read_source(str(path), Split.ALL).prompts
    assert [(p.text, p.completion) for p in found] == [(one["prompt"], one["completion"]) for one in RECORDS]
    assert len({p.source_index for p in found}) == len({p.id for p in found}) == len(RECORDS)


def test_a_text_file_is_one_prompt_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\n  two \n\xff\nlast")
    found = read_source(str(tmp_path / "a.txt"), Split.ALL, on_bad_input=OnBadInput.SKIP)
    assert [(prompt.id, prompt.text) for prompt in found.prompts] == [("1", "one"), ("3", "  two "), ("5", "last")]
    assert found.num_skipped == {"not UTF-8": 1}


def test_plain_text_named_like_a_compressed_file_is_read_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "a.jsonl", RECORDS).rename(tmp_path / "a.jsonl.gz")
    assert [record.value for record in read_records(tmp_path / "a.jsonl.gz")] == RECORDS
    assert "a.jsonl.gz: is not compressed" in caplog.text


def test_utf_16_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"prompt": "one"}\n'.encode("utf-16"))
    with pytest.raises(UsageError, match="the file is UTF-16; save it as UTF-8"):
        read_source(str(tmp_path / "a.jsonl"), Split.ALL)


def test_a_folder_and_a_glob_read_their_files_in_order(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", RECORDS)
    write(tmp_path / "a.jsonl", RECORDS[:2])
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "c.csv", RECORDS[:1])
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "README.md").write_text("not data")
    found = read_source(str(tmp_path), Split.ALL).prompts
    assert [prompt.id.removeprefix(f"{tmp_path}/") for prompt in found] == [
        "a.jsonl:1",
        "a.jsonl:2",
        *(f"b.parquet:{n}" for n in (1, 2, 3)),
        "sub/c.csv:3",
    ]
    assert len({prompt.source_index for prompt in found}) == 6
    assert len(read_source(f"{tmp_path}/*.jsonl", Split.ALL).prompts) == 2
    assert len(read_source(f"{tmp_path}/**/*.[cj]s*[vl]", Split.ALL).prompts) == 3
    with pytest.raises(UsageError, match="no file matches"):
        read_source(f"{tmp_path}/*.none", Split.ALL)


def test_a_folder_that_datasets_saved(tmp_path: Path) -> None:
    datasets.Dataset.from_list(RECORDS).save_to_disk(str(tmp_path / "saved"))
    assert [p.text for p in read_source(str(tmp_path / "saved"), Split.ALL).prompts] == [r["prompt"] for r in RECORDS]
    # What map and filter leave in that folder holds the same rows again.
    datasets.load_from_disk(str(tmp_path / "saved")).map(lambda row: row, load_from_cache_file=False)
    assert list((tmp_path / "saved").glob("cache-*.arrow"))
    assert len(read_source(str(tmp_path / "saved"), Split.ALL).prompts) == len(RECORDS)


def test_a_quote_that_is_not_closed_says_what_it_hides(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('prompt\none\n"two\nthree\nfour\n')
    with pytest.raises(UsageError, match=r"a\.csv:5: broken CSV: .*lines 3 to 5 are lost: is a quote not closed"):
        read_source(str(path), Split.ALL)


def test_one_object_over_several_lines_is_no_array(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"version": 1, "data": RECORDS}, indent=1))
    with pytest.raises(UsageError, match="one object over several lines, where an array of records") as caught:
        read_source(str(tmp_path / "a.json"), Split.ALL)
    assert len(caught.value.faults) == 1


def bad_lines(folder: Path) -> Path:
    """The file of case P06: 1,000 lines, some of which are damaged or unusual."""
    lines = [json.dumps({"id": index, "prompt": f"say {index}"}).encode() for index in range(1000)]
    lines[500] = b'{"prompt": "half'
    lines[501] = b""
    lines[502] = b"7"
    lines[503] = b'{"id": "a string", "prompt": "x"}'
    lines[504] = b'{"prompt": "' + b"x" * (20 << 20) + b'"}'
    lines[505] = b'{"prompt": "\x00"}'
    (folder / "bad.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))
    return folder / "bad.jsonl"


def test_bad_lines_stop_or_are_counted_in_bounded_memory(tmp_path: Path) -> None:
    path = bad_lines(tmp_path)
    with pytest.raises(UsageError) as caught:
        read_source(str(path), Split.ALL)
    assert [fault.removeprefix(f"{path}:").split(":")[0] for fault in caught.value.faults[:-1]] == [
        "501", "503", "505", "506",
    ]  # fmt: skip
    tracemalloc.start()
    found = read_source(str(path), Split.ALL, on_bad_input=OnBadInput.SKIP)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found.prompts) == 995
    assert found.num_skipped == {"broken JSON": 1, "not a JSON object": 1, "line too long": 1, "NUL bytes": 1}
    assert peak < 64 << 20


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    def peak(count: int, ending: str) -> int:
        records = [{"prompt": "x" * 500, "id": str(index)} for index in range(count)]
        path = write(tmp_path / f"{count}.{ending}", records)
        del records
        tracemalloc.start()
        assert sum(1 for _ in read_records(path)) == count
        measured = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return measured

    for ending in ("jsonl", "json", "csv", "parquet"):
        assert peak(12000, ending) < 2 * peak(3000, ending)


@pytest.mark.parametrize("keep", [10, 200, 600])
def test_a_cut_gz_is_named(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path / "a.jsonl.gz", [{"prompt": f"{index * 7919}"} for index in range(300)])
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UsageError, match=r"a\.jsonl\.gz: cannot be read"):
        read_source(str(path), Split.ALL)


@pytest.mark.parametrize("ending", ["parquet", "arrow", "feather"])
@pytest.mark.parametrize("content", [b"", b"not at all", b"PAR1xxxxPAR1"])
def test_a_file_of_another_kind_is_one_line(tmp_path: Path, ending: str, content: bytes) -> None:
    path = tmp_path / f"a.{ending}"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_source(str(path), Split.ALL)
    [fault] = caught.value.faults
    assert str(path) in fault
    assert "\n" not in fault


def test_a_broken_array_keeps_what_came_before(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"prompt": "one"}, {"prompt": "two"}, {"prom')
    with pytest.raises(UsageError, match=r"a\.json:3: broken JSON in this array"):
        read_source(str(tmp_path / "a.json"), Split.ALL)
    found = read_source(str(tmp_path / "a.json"), Split.ALL, on_bad_input=OnBadInput.SKIP)
    assert [prompt.text for prompt in found.prompts] == ["one", "two"]
    (tmp_path / "lines.json").write_text('{"prompt": "one"}\n{"prompt": "two"}')
    assert len(read_source(str(tmp_path / "lines.json"), Split.ALL).prompts) == 2


def test_csv_rows_that_are_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'prompt,completion\n"one, two","a ""b"""\nshort\nx,y,z\nlast,\n')
    found = read_source(str(path), Split.ALL, on_bad_input=OnBadInput.SKIP)
    assert [(p.id, p.text, p.completion) for p in found.prompts] == [("2", "one, two", 'a "b"'), ("5", "last", None)]
    assert found.num_skipped == {"wrong number of fields": 2}
    path.write_bytes(b"prompt\na\x00b\n")
    with pytest.raises(UsageError, match=r"a\.csv:2: NUL bytes"):
        read_source(str(path), Split.ALL)
    path.write_bytes(b"prompt\nbad \xff\n")
    with pytest.raises(UsageError, match=r"a\.csv:2: 'prompt': "):
        read_source(str(path), Split.ALL)


# The hub, without a network ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "expected"), [("hub:o/n", "train"), ("hub:o/n:main:test", "test")])
def test_a_hub_dataset_is_streamed(monkeypatch: pytest.MonkeyPatch, name: str, expected: str) -> None:
    def load_dataset(repository: str, config: str | None, *, split: str | None, streaming: bool) -> Any:
        assert (repository, streaming) == ("o/n", True)
        assert config == ("main" if "main" in name else None)
        splits = {part: [{"prompt": part}] for part in ("test", "train")}
        return splits[split] if split else splits

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    [prompt] = read_source(name, Split.ALL).prompts
    assert prompt.text == expected


def test_hub_faults_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no way\nto the hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UsageError, match=r'hub:o/n: datasets cannot read it: "no way"$'):
        read_source("hub:o/n", Split.ALL)


def test_a_folder_that_datasets_loads_stands_for_a_hub_name(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", RECORDS)
    found = read_source(f"hub:{tmp_path}", Split.ALL).prompts
    assert [p.text for p in found] == [one["prompt"] for one in RECORDS]


def test_unknown_kinds_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.docx").write_bytes(b"PK")
    with pytest.raises(UsageError, match=r"a\.docx: unknown kind of file; known are \.jsonl"):
        read_source(str(tmp_path / "a.docx"), Split.ALL)
    (tmp_path / "only").mkdir()
    with pytest.raises(UsageError, match="a folder without data files"):
        read_source(str(tmp_path / "only"), Split.ALL)
