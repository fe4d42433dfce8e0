"""Exported sets: what the other programs read, and that nothing is lost on the way there and back."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jacobi_llm.configs.schema import ExportConfig, TargetSource
from jacobi_llm.data.cli import main
from jacobi_llm.data.consistency_llm import Vocabulary, records_of, row_of_original
from jacobi_llm.data.data_card import public
from jacobi_llm.data.record import Block, Trajectory
from jacobi_llm.data.store import Manifest, Shard, read_trajectories
from jacobi_llm.infer.models import LoadedModel
from tests.data.random_sets import EOS, rows_of_sets, write_rows
from tests.data.test_show import ROW
from tests.data.trajectories import make_collector, make_prompts, write_set

LoadedFactory = Callable[..., LoadedModel]
GOLDEN_CARD = Path(__file__).parent / "golden_card.md"


def error_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]


def to_json(folder: Path, path: Path) -> list[dict[str, Any]]:
    assert main(["export", str(folder), "--to", "consistency-llm", "--output", str(path)]) == 0
    records: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return records


# Consistency_LLM ---------------------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(rows_of_sets(min_size=1), st.integers(1, 4))
def test_a_set_that_is_exported_and_imported_again_is_equal(rows: list[Trajectory], shard_size: int) -> None:
    with TemporaryDirectory() as name:
        root = Path(name)
        before = write_rows(root / "a", rows, shard_size)
        records = to_json(root / "a", root / "a.json")
        assert len(records) == sum(len(row.blocks) for row in rows)
        assert main(["import", str(root / "a.json"), "--output", str(root / "b")]) == 0
        assert list(read_trajectories(root / "b")) == rows
        after = Manifest.read(root / "b")
        assert after.data_sha256 == before.data_sha256
        assert after == before


def test_what_a_killed_export_has_left_goes_away(tmp_path: Path) -> None:
    write_rows(tmp_path / "a", [ROW])
    (tmp_path / ".a.json.abcd_123.tmp").write_text("[half")
    (tmp_path / ".a.json.b.abcd_123.tmp").write_text("[of another output")
    assert to_json(tmp_path / "a", tmp_path / "a.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.json.b.abcd_123.tmp", "a", "a.json"]


@pytest.mark.parametrize("target_source", list(TargetSource))
def test_a_collected_set_comes_back(target_source: TargetSource, tiny_loaded: LoadedFactory, tmp_path: Path) -> None:
    loaded = tiny_loaded("llama", torch.float64)
    collector = make_collector(loaded, target_source=target_source, window=[4, 8], jitter_starts=True, augment="cllm")
    before = write_set(collector, make_prompts(5, with_completions=True), tmp_path / "a")
    records = to_json(tmp_path / "a", tmp_path / "a.json")
    assert main(["import", str(tmp_path / "a.json"), "--output", str(tmp_path / "b")]) == 0
    assert Manifest.read(tmp_path / "b") == before
    assert main(["validate", str(tmp_path / "b")]) == 0
    assert ("labels_ids" in records[0]) is (target_source is TargetSource.GIVEN)


def test_the_original_trainer_finds_what_it_reads(tmp_path: Path) -> None:
    write_rows(tmp_path / "a", [ROW])
    records = to_json(tmp_path / "a", tmp_path / "a.json")
    whole = ROW.prompt_ids + ROW.completion_ids
    first, second = records
    assert (first["data_id"], first["jacobian_itr_id"], second["jacobian_itr_id"]) == ("data_0", "itr_0", "itr_1")
    assert first["prompt_ids"] == [ROW.prompt_ids]
    assert second["prompt_ids"] == [whole[:9]]
    assert first["teacher_output_ids"] == [whole[:9]]
    assert {tuple(record["complete_teacher_output_ids"]) for record in records} == {tuple(whole)}
    made, *states, last = first["answer_trajectory_ids"]
    assert ([made], states) == (ROW.blocks[0].augmented_states, ROW.blocks[0].states)
    assert last == ROW.completion_ids[:6]
    assert second["answer_trajectory_ids"][-1] == ROW.blocks[1].fixed_point
    # It draws a state from all but the last one.
    assert all(len(record["answer_trajectory_ids"]) > 1 for record in records)


def original(states: list[list[int]], prompt: list[int], itr: int = 0, data: int = 0) -> dict[str, Any]:
    """A record as the original collector writes it."""
    return {
        "data_id": f"data_{data}",
        "jacobian_itr_id": f"itr_{itr}",
        "prompt_ids_len": [len(prompt)],
        "prompt_ids": [[prompt]] if itr == 0 else [prompt],
        "answer_trajectory_ids": states,
        "teacher_output_ids": [prompt + states[-1]],
        "complete_teacher_output_ids": prompt + states[-1],
    }


def restored(*records: dict[str, Any]) -> tuple[Trajectory, Counter[str]]:
    repairs: Counter[str] = Counter()
    row = row_of_original(records, "f.json", 0, Vocabulary(100, frozenset({EOS}), 50), repairs)
    return row, +repairs


def test_the_original_form_is_read() -> None:
    row, repairs = restored(
        original([[9, 9], [1, 9], [1, 2]], [7, EOS, 8]), original([[1, 1], [3, 4]], [7, EOS, 8, 1, 2], 1)
    )
    assert (row.prompt_ids, row.completion_ids, row.finish_reason) == ([7, EOS, 8], [1, 2, 3, 4], "length")
    assert row.blocks == [Block(0, [[9, 9], [1, 9]], None), Block(2, [[1, 1]], None)]
    assert (row.window, row.source_index, repairs) == (2, 0, Counter())


@pytest.mark.parametrize(
    ("records", "completion", "blocks", "repair"),
    [
        # tokens after EOS, in the block and in a block after it
        (
            [original([[9, 9, 9], [1, EOS, 9]], [7]), original([[1, 1, 1], [3, 4, 5]], [7, 1, EOS, 9], 1)],
            [1, EOS],
            [Block(0, [[9, 9]], None)],
            "tokens after the end of the completion cut",
        ),
        ([original([[9, 9], [1, 50]], [7])], [1], [Block(0, [[9]], None)], "padding of a completion removed"),
        ([original([[9, 9], [1, 2]], [50, 50, 7])], [1, 2], [Block(0, [[9, 9]], None)], "padding of a prompt removed"),
        # the last state saved twice; y(0) overwritten by y(1)
        (
            [original([[1, 9], [1, 9], [1, 2], [1, 2]], [7])],
            [1, 2],
            [Block(0, [[1, 9]], None)],
            "states that repeat another removed",
        ),
        (
            [original([[7, 9, 9], [7, 1, 2]], [7]) | {"teacher_output_ids": [[7, 1, 2]]}],
            [1, 2],
            [Block(0, [[9, 9]], None)],
            "states with their prompt cut to the block",
        ),
        (
            [original([[9, 9, 9, 9], [1, 2, 3]], [7])],
            [1, 2, 3],
            [Block(0, [[9, 9, 9]], None)],
            "states longer than their block cut",
        ),
        # use_aug puts a mended copy of a late state before y(0)
        (
            [original([[1, 2, 3, 9], [9, 9, 9, 9], [1, 9, 9, 9], [1, 2, 9, 9], [1, 2, 3, 4]], [7])],
            [1, 2, 3, 4],
            [Block(0, [[9, 9, 9, 9], [1, 9, 9, 9], [1, 2, 9, 9]], None, [[1, 2, 3, 9]])],
            "augmented states told apart",
        ),
        # a filter has removed itr_1
        (
            [original([[9, 9], [1, 2]], [7]), original([[9, 9], [5, 6]], [7, 1, 2, 3, 4], 2)],
            [1, 2],
            [Block(0, [[9, 9]], None)],
            "completion cut before a missing block",
        ),
    ],
)
def test_what_the_original_gets_wrong_is_repaired_and_counted(
    records: list[dict[str, Any]], completion: list[int], blocks: list[Block], repair: str
) -> None:
    row, repairs = restored(*records)
    assert row.completion_ids == completion
    assert row.finish_reason == ("stop" if completion[-1] == EOS else "length")
    assert row.blocks == blocks
    assert repair in repairs


def test_a_file_of_the_original_becomes_a_set_that_is_valid(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cleaned_sharegpt.json"
    good = [original([[9, 9], [4, 5]], [7], data=3), original([[9, 9], [6, 2]], [7, 4, 5], 1, data=3)]
    path.write_text(json.dumps([*good, "no object", original([[9], [400]], [7], data=4), {"data_id": "data_5"}]))
    command = ["import", str(path), "--output", str(tmp_path / "b")]
    assert main(command) == 2
    assert "imports.tokenizer" in error_lines(capsys)[0]
    command += ["--tokenizer", str(tiny_checkpoint)]
    assert main(command) == 1
    assert "record 2: no JSON object" in error_lines(capsys)[0]
    assert main([*command, "--on-bad-input", "skip", "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    reasons = {
        "no JSON object": 1,
        "token id beyond the tokenizer's vocabulary": 1,
        "jacobian_itr_id is not itr_N": 1,
    }
    assert (report["num_trajectories"], report["bad_input"]) == (1, reasons)
    assert "record 3: token id beyond" in captured.err
    [row] = read_trajectories(tmp_path / "b")
    assert (row.id, row.source_index, row.source, row.finish_reason) == ("data_3", 3, path.name, "stop")
    assert main(["validate", str(tmp_path / "b")]) == 0
    manifest = Manifest.read(tmp_path / "b")
    assert manifest.settings["eos_token_ids"] == [0, 2]
    assert manifest.bad_input == reasons


def change_first(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        records = json.loads(content)
        change(records[0])
        return json.dumps(records).encode()

    return changed


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda content: content[: len(content) // 2], "broken JSON"),
        (lambda _: pickle.dumps([1, 2]), "no JSON list of records"),
        (lambda _: b'{"a": 1}', "no JSON list of records"),
        (lambda _: b"[]", "no record in it"),
        (lambda _: b"", "no JSON list of records, it is empty"),
        (lambda content: json.dumps(json.loads(content)[:1]).encode(), "blocks missing (1 of 2)"),
        (change_first(lambda one: one["jacobi_llm"].update(window="4")), "'4' is no whole number"),
        (change_first(lambda one: one["jacobi_llm"].update(id=5)), "5 is no text"),
        (change_first(lambda one: one["answer_trajectory_ids"][1].append(5)), "is not 6 tokens long"),
        (change_first(lambda one: one["answer_trajectory_ids"][1].__setitem__(0, -1)), "no token id"),
        (change_first(lambda one: one["jacobi_llm_set"].update(num_shards="x")), "jacobi_llm_set is damaged"),
        (change_first(lambda one: one["jacobi_llm_set"].update(schema_version=1)), "schema version 1"),
        (change_first(lambda one: one["jacobi_llm_set"]["shards"]["0"].update(file="../x")), "is damaged"),
        (change_first(lambda one: one["jacobi_llm"].update(shard=7)), "not in its place"),
    ],
)
def test_a_damaged_file_is_named(
    damage: Callable[[bytes], bytes], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "a", [ROW])
    to_json(tmp_path / "a", tmp_path / "a.json")
    (tmp_path / "a.json").write_bytes(damage((tmp_path / "a.json").read_bytes()))
    capsys.readouterr()
    assert main(["import", str(tmp_path / "a.json"), "--output", str(tmp_path / "b")]) in (1, 2)
    [line] = error_lines(capsys)
    assert text in line
    assert "a.json" in line
    assert "internal" not in line
    assert not (tmp_path / "b").exists()


def test_trajectories_that_are_missing_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path / "a", [ROW, Trajectory(**{**vars_of(ROW), "source_index": 8})])
    records = to_json(tmp_path / "a", tmp_path / "a.json")
    (tmp_path / "a.json").write_text(json.dumps(records[:2]))
    capsys.readouterr()
    command = ["import", str(tmp_path / "a.json"), "--output", str(tmp_path / "b")]
    assert main(command) == 1
    assert "1 of 2 are in the file" in error_lines(capsys)[0]
    assert main([*command, "--on-bad-input", "skip"]) == 0
    assert Manifest.read(tmp_path / "b").bad_input == {"trajectories missing": 1}


def vars_of(row: Trajectory) -> dict[str, Any]:
    return {name: getattr(row, name) for name in Trajectory.__dataclass_fields__}


# Hub ---------------------------------------------------------------------------------------------------------------


def hub_flags(output: Path) -> list[str]:
    about = ["--license", "apache-2.0", "--attribution", "Prompts of a test.", "--language", "en"]
    return ["--to", "datasets", "--output", str(output), *about]


@settings(max_examples=6)
@given(rows_of_sets(min_size=1), st.integers(1, 4))
def test_datasets_loads_the_folder(rows: list[Trajectory], shard_size: int) -> None:
    datasets = pytest.importorskip("datasets")
    with TemporaryDirectory() as name:
        root = Path(name)
        write_rows(root / "a", rows, shard_size)
        assert main(["export", str(root / "a"), *hub_flags(root / "b")]) == 0
        loaded = datasets.load_dataset(str(root / "b"), cache_dir=str(root / "cache"))
        assert [Trajectory.from_row(row) for row in loaded["train"]] == rows


def test_two_sides_become_two_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [Trajectory(**{**vars_of(ROW), "source_index": index}) for index in range(30)]
    write_rows(tmp_path / "a", rows)
    assert main(["split", str(tmp_path / "a"), "--output", str(tmp_path / "s"), "--heldout-share", "0.3"]) == 0
    assert main(["export", str(tmp_path / "s"), *hub_flags(tmp_path / "b")]) == 0
    loaded = datasets.load_dataset(str(tmp_path / "b"), cache_dir=str(tmp_path / "cache"))
    assert sorted(loaded) == ["heldout", "train"]
    assert {row["source_index"] for split in loaded.values() for row in split} == set(range(30))
    assert main(["export", str(tmp_path / "s"), "--to", "consistency-llm", "--output", str(tmp_path / "x.json")]) == 2


def test_the_card_is_made_of_the_set(tmp_path: Path) -> None:
    model = str(tmp_path / "models" / "mine")
    write_rows(tmp_path / "numbers", [ROW], model=model, input=str(tmp_path / "p.jsonl"), target_source="given")
    manifest = Manifest.read(tmp_path / "numbers")
    manifest.cleaning = {"exact duplicates": {"removed": 12}}
    manifest.write(tmp_path / "numbers")
    assert main(["export", str(tmp_path / "numbers"), *hub_flags(tmp_path / "b")]) == 0
    card = (tmp_path / "b" / "README.md").read_text(encoding="utf-8")
    assert str(tmp_path) not in card
    # Sizes of files and hashes depend on the version of pyarrow.
    stable = "\n".join(line for line in card.splitlines() if "bytes" not in line and "_size:" not in line)
    stable = stable.replace(manifest.data_sha256, "SHA256")
    assert stable + "\n" == GOLDEN_CARD.read_text(encoding="utf-8")


def test_paths_stay_at_home() -> None:
    assert public({"a": ["/home/me/models/x/", "~/y", "C:\\me\\z"], "b": "owner/name", "c": "../q/w.json"}) == {
        "a": ["x", "y", "z"],
        "b": "owner/name",
        "c": "w.json",
    }


def test_nothing_is_exported_over_something(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path / "a", [ROW])
    write_rows(tmp_path / "empty", [])
    assert main(["export", str(tmp_path / "a"), *hub_flags(tmp_path / "empty")]) == 2
    assert "holds something already" in error_lines(capsys)[0]
    assert main(["export", str(tmp_path / "a"), "--to", "consistency-llm", "--output", str(tmp_path)]) == 2
    assert "is a folder" in error_lines(capsys)[0]
    assert main(["export", str(tmp_path / "empty"), *hub_flags(tmp_path / "b")]) == 2
    assert "no trajectory" in error_lines(capsys)[0]
    assert ExportConfig().to == "datasets"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
PLACES = [
    ("data_id",),
    ("jacobian_itr_id",),
    ("prompt_ids",),
    ("answer_trajectory_ids",),
    ("answer_trajectory_ids", 1),
    ("answer_trajectory_ids", 1, 0),
    ("teacher_output_ids",),
    ("complete_teacher_output_ids",),
    ("jacobi_llm",),
    *(("jacobi_llm", key) for key in ("id", "source_index", "window", "start", "num_states", "num_blocks", "shard")),
    *(("jacobi_llm", key) for key in ("num_prompt_tokens", "num_augmented_states", "finish_reason", "target_source")),
    ("jacobi_llm_set",),
    *(("jacobi_llm_set", "shards", "0", key) for key in ("num_rows", "sha256", "skipped", "num_unconverged")),
    ("jacobi_llm_set", "settings", "window"),
    *(("jacobi_llm_set", key) for key in ("cleaning", "previous", "schema_version")),
    *(("jacobi_llm_set", key) for key in ("settings", "shards", "num_shards", "bad_input", "parents", "versions")),
]


@settings(max_examples=60)
@given(place=st.sampled_from(PLACES), value=JSON_VALUES, keeps_manifest=st.booleans(), skips=st.booleans())
def test_whatever_is_in_a_file_there_is_no_traceback(
    place: tuple[Any, ...], value: Any, keeps_manifest: bool, skips: bool, tiny_checkpoint: Path
) -> None:
    manifest = Manifest({"window": [6]}, {}, 1, {0: Shard("shard-00000.parquet", 2, "0")})
    rows = [ROW, Trajectory(**{**vars_of(ROW), "source_index": 8})]
    records = [record for number, row in enumerate(rows) for record in records_of(row, number, 0)]
    if keeps_manifest:
        records[0]["jacobi_llm_set"] = manifest.to_payload()
    # What is changed below must not be the row that all tests share.
    records = json.loads(json.dumps(records))
    inner: Any = records[0]
    for step in place[:-1]:
        inner = inner.setdefault(step, {}) if isinstance(inner, dict) else inner[step]
    inner[place[-1]] = value
    flags = ["--tokenizer", str(tiny_checkpoint)] if not keeps_manifest else []
    with TemporaryDirectory() as name:
        root = Path(name)
        (root / "a.json").write_text(json.dumps(records))
        err = io.StringIO()
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
            command = ["import", str(root / "a.json"), "--output", str(root / "b"), *flags]
            code = main([*command, *(["--on-bad-input", "skip"] if skips else [])])
        assert "internal" not in err.getvalue(), err.getvalue()
        assert (root / "b").exists() is (code == 0)
        assert not [path for path in root.iterdir() if path.name not in ("a.json", "b")]
        if code == 0:
            num_left_out = sum(Manifest.read(root / "b").bad_input.values())
            assert skips or num_left_out == 0 or place[0] == "jacobi_llm_set"
