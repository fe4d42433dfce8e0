"""jacobi-infer generate: what is printed, when, and with which exit code."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from jacobi_llm.configs.checkpoint import CheckpointMode, JacobiCheckpointConfig, save_checkpoint_config
from jacobi_llm.configs.schema import Auto, DecodeMode, FillPolicy, GenerateConfig, ObjectiveName
from jacobi_llm.infer import cli, generate
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.near_tie import first_difference, reference_ids
from jacobi_llm.infer.request import StepOutput
from tests.tiny_models import tiny_loaded

KEYS = [
    "id",
    "index",
    "text",
    "token_ids",
    "prompt_tokens",
    "completion_tokens",
    "finish_reason",
    "forward_passes",
    "tokens_per_forward",
    "ttft_ms",
    "latency_ms",
]


@pytest.fixture
def base(tiny_checkpoint: Path) -> list[str]:
    """Flags that every run of the command shares."""
    flags = ["generate", "--model", str(tiny_checkpoint), "--dtype", "float32", "--device", "cpu"]
    return [*flags, "--max-tokens", "12", "--engine.kv_memory_mib", "4"]


def prompt_file(tmp_path: Path, *records: Any) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_json_lines_in_input_order_with_all_keys(
    base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{"id": f"r{i}", "prompt": "word " * (i + 1)} for i in range(5)]
    records.append({"id": "chat", "messages": [{"role": "user", "content": "Grüße 😀"}]})
    assert cli.main([*base, "--input", prompt_file(tmp_path, *records), "--json", "--ignore-eos"]) == 0
    captured = capsys.readouterr()
    lines = lines_of(captured.out)
    assert [line["id"] for line in lines] == [record["id"] for record in records]
    for line in lines:
        assert list(line) == KEYS
        assert line["completion_tokens"] == len(line["token_ids"]) == 12
        assert line["finish_reason"] == "length"
        assert line["tokens_per_forward"] == pytest.approx(12 / line["forward_passes"], abs=1e-4)
        assert 0 < line["ttft_ms"] <= line["latency_ms"]
    memory, *_, summary = captured.err.splitlines()
    assert re.fullmatch(r"K/V: [\d.,]+ MiB = [\d,]+ tokens in [\d,]+ pages of 16 \([\d.]+ KiB a token\)", memory)
    assert summary.startswith("6 requests: 72 tokens in ")
    assert "TPF" in summary


@pytest.mark.parametrize("mode", ["sliding", "block"])
def test_ids_do_not_depend_on_window_or_company(
    base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    path = prompt_file(tmp_path, *({"prompt": f"{i} bottles of {'x' * i}"} for i in range(4)))
    runs = []
    for window in ("1", "8"):
        flags = ["--input", path, "--json", "--dtype", "float64", "--window", window, "--mode", mode]
        assert cli.main([*base, *flags]) == 0
        runs.append([line["token_ids"] for line in lines_of(capsys.readouterr().out)])
    assert runs[0] == runs[1]


def test_a_single_prompt_streams_and_ends_with_a_line(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*base, "--prompt", "Hello"]) == 0
    plain = capsys.readouterr()
    assert cli.main([*base, "--prompt", "Hello", "--json"]) == 0
    (line,) = lines_of(capsys.readouterr().out)
    assert line["id"] == "prompt"
    assert plain.out == line["text"] + ("" if line["text"].endswith("\n") else "\n")
    assert plain.err.splitlines()[-1].startswith("1 request: ")


def ascii_piece(text: str) -> str:
    """Two letters of ``text`` that are there once, behind its start."""
    pieces = [text[n : n + 2] for n in range(2, len(text) - 1)]
    return next(piece for piece in pieces if piece.isascii() and piece.isprintable() and text.count(piece) == 1)


@pytest.mark.parametrize("window", ["1", "16"])
def test_stop_strings_cut_every_kind_of_output(
    base: list[str], capsys: pytest.CaptureFixture[str], window: str, tmp_path: Path
) -> None:
    flags = [*base, "--dtype", "float64", "--max-tokens", "40", "--ignore-eos", "--window", window]
    assert cli.main([*flags, "--prompt", "Hello", "--json"]) == 0
    (whole,) = lines_of(capsys.readouterr().out)
    stop = ascii_piece(whole["text"])
    cut = whole["text"].partition(stop)[0]
    flags += ["--stop", "no such text", stop]
    assert cli.main([*flags, "--prompt", "Hello", "--json"]) == 0
    (line,) = lines_of(capsys.readouterr().out)
    assert list(line) == KEYS
    assert (line["text"], line["finish_reason"]) == (cut, "stop")
    assert line["token_ids"] == whole["token_ids"][: line["completion_tokens"]]
    assert cli.main([*flags, "--prompt", "Hello"]) == 0
    assert capsys.readouterr().out == cut + ("" if cut.endswith("\n") else "\n")
    path = prompt_file(tmp_path, {"id": "a", "prompt": "Hello"}, {"id": "b", "prompt": "Hello"})
    assert cli.main([*flags, "--input", path]) == 0
    assert capsys.readouterr().out.count(f"<==\n{cut}") == 2


def test_ignore_eos_ignores_nothing_else(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*base, "--ignore-eos", "--json", "--prompt", "Hello"]
    assert cli.main(flags) == 0
    (whole,) = lines_of(capsys.readouterr().out)
    stop_id = whole["token_ids"][5]
    assert cli.main([*flags, "--stop-token-ids", f"{stop_id},258"]) == 0
    (line,) = lines_of(capsys.readouterr().out)
    end = whole["token_ids"].index(stop_id)
    assert (line["token_ids"], line["finish_reason"]) == (whole["token_ids"][: end + 1], "stop")
    assert whole["text"].startswith(line["text"])
    assert cli.main([*flags, "--stop-token-ids", "259"]) == 2
    assert "--stop-token-ids 259: the ids of this model are 0 to 258" in capsys.readouterr().err


def test_more_prompts_than_the_queue_holds(base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = prompt_file(tmp_path, *({"prompt": f"{i}"} for i in range(9)))
    limits = ["--engine.max_num_waiting", "2", "--engine.max_num_seqs", "2"]
    assert cli.main([*base, "--input", path, "--json", *limits]) == 0
    assert [line["id"] for line in lines_of(capsys.readouterr().out)] == [str(i + 1) for i in range(9)]


def test_several_prompts_are_told_apart(base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = prompt_file(tmp_path, {"id": "a", "prompt": "one"}, {"id": "b", "prompt": "two"})
    assert cli.main([*base, "--input", path, "--prompt", "zero"]) == 0
    out = capsys.readouterr().out
    assert {f"==> {name} <==" for name in ("prompt", "a", "b")} <= set(out.splitlines())


def test_raw_reads_the_text_and_nothing_else(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*base, "--prompt", "abc", "--raw", "--json"]) == 0
    assert lines_of(capsys.readouterr().out)[0]["prompt_tokens"] == 3


def test_a_request_that_cannot_run_leaves_the_others_alone(
    base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = prompt_file(tmp_path, {"id": "ok", "prompt": "a"}, {"id": "long", "prompt": "x" * 400}, {"prompt": "b"})
    assert cli.main([*base, "--input", path, "--json"]) == 1
    captured = capsys.readouterr()
    lines = lines_of(captured.out)
    assert [line["id"] for line in lines] == ["ok", "long", "3"]
    assert list(lines[1]) == ["id", "error"]
    assert "context of 256" in lines[1]["error"]
    assert captured.err.splitlines()[-1].startswith("2 of 3 requests, 1 failed: ")
    assert cli.main([*base, "--input", path]) == 1
    captured = capsys.readouterr()
    assert any(line.startswith("error: request long: ") for line in captured.err.splitlines())
    assert captured.out.count("==> ") == 2


def test_nothing_given_is_a_usage_error(
    base: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for empty in (None, io.TextIOWrapper(io.BufferedReader(io.BytesIO(b"")))):  # type: ignore[arg-type]
        monkeypatch.setattr(sys, "stdin", empty)
        assert cli.main(base) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err == "error: nothing to decode: give --prompt TEXT, --input FILE, or pipe JSON lines in\n"


@pytest.mark.parametrize("flags", [[], ["--input", "-"]])
def test_standard_input(
    base: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(b'{"id": 7, "prompt": "x"}'))))  # type: ignore[arg-type]
    assert cli.main([*base, *flags, "--json"]) == 0
    assert lines_of(capsys.readouterr().out)[0]["id"] == "7"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", ""], "--prompt is empty"),
        (["--prompt", "x", "--device", "tpu"], "device 'tpu': give auto, cpu, cuda or cuda:N"),
        (["--prompt", "x", "--model", "no/such/folder"], "no such folder"),
        (["--input", "missing.jsonl"], "missing.jsonl: cannot read the prompt file"),
        (["--prompt", "x", "--stop", ""], "--stop []: empty string, which would end every answer at once"),
        (["--prompt", "x", "--stop", *"abcdefghijklmnopq"], "17 strings; give at most 16"),
        (["--prompt", "x", "--stop", "a" * 1025], "a string of 1025 characters; give at most 1024"),
    ],
)
def test_wrong_requests(base: list[str], capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert cli.main([*base, *flags]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_broken_line_is_named_or_skipped(base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": \n{"prompt": "c"}\n', encoding="utf-8")
    assert cli.main([*base, "--input", str(path), "--json"]) == 2
    assert f"{path}:2: broken JSON" in capsys.readouterr().err
    assert cli.main([*base, "--input", str(path), "--json", "--on-bad-input", "skip"]) == 0
    assert [line["id"] for line in lines_of(capsys.readouterr().out)] == ["1", "3"]


def test_dry_run_loads_no_weights(
    base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(generate, "load_model", refuse)
    path = prompt_file(tmp_path, {"prompt": "abc"}, {"prompt": "abcdef"})
    assert cli.main([*base, "--input", path, "--raw", "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["prompts"], plan["prompt_tokens"], plan["completion_tokens_at_most"]) == (2, 9, 24)
    assert plan["pages_of_largest_request"] == 2
    assert plan["pages_at_most"] == 1 + 2
    assert plan["kv_memory"].endswith(f"tokens in {plan['pages']:,} pages of 16 (0.25 KiB a token)")
    long = prompt_file(tmp_path, {"id": "long", "prompt": "x" * 400})
    assert cli.main([*base, "--input", long, "--dry-run"]) == 1
    captured = capsys.readouterr()
    assert "prompts_refused: 1" in captured.out
    assert "prompt 'long'" in captured.err


# ---------------------------------------------------------------- sampling


def test_choices_have_their_index_and_differ(
    base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Field case S11: n answers, each with its index; different at temperature 1, equal at 0; one seed, one text."""
    path = prompt_file(tmp_path, {"id": "a", "prompt": "one"}, {"id": "b", "prompt": "two"})
    flags = [*base, "--input", path, "--json", "--ignore-eos", "--n", "3", "--seed", "5", "--dtype", "float64"]
    found = []
    for extra in (["--window", "1"], ["--window", "8"], ["--window", "8", "--temperature", "0"]):
        assert cli.main([*flags, "--temperature", "1", *extra]) == 0
        captured = capsys.readouterr()
        lines = lines_of(captured.out)
        assert [(line["id"], line["index"]) for line in lines] == [
            *(("a/0", 0), ("a/1", 1), ("a/2", 2)),
            *(("b/0", 0), ("b/1", 1), ("b/2", 2)),
        ]
        assert captured.err.splitlines()[-1].startswith("6 requests: ")
        found.append([tuple(line["token_ids"]) for line in lines])
    assert found[0] == found[1]
    assert len(set(found[0])) == 6
    assert len(set(found[2])) == 2


def test_several_choices_of_one_prompt_are_told_apart(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*base, "--prompt", "x", "--n", "2", "--temperature", "1"]) == 0
    assert {"==> prompt/0 <==", "==> prompt/1 <=="} <= set(capsys.readouterr().out.splitlines())


def test_a_prompt_that_cannot_run_fails_with_all_its_choices(
    base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{"id": "long", "prompt": "x" * 400}, {"id": "a", "prompt": "b"}, {"id": "a/1", "prompt": "c"}]
    path = prompt_file(tmp_path, *records)
    assert cli.main([*base, "--input", path, "--json", "--n", "2"]) == 1
    captured = capsys.readouterr()
    assert [(line["id"], "error" in line) for line in lines_of(captured.out)] == [
        *(("long/0", True), ("long/1", True), ("a/0", False), ("a/1", False)),
        *(("a/1/0", False), ("a/1/1", False)),
    ]
    assert captured.err.splitlines()[-1].startswith("4 of 6 requests, 2 failed: ")


def test_logprobs_are_in_the_record_when_asked_for(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*base, "--prompt", "x", "--json", "--logprobs", "2", "--temperature", "1"]) == 0
    (line,) = lines_of(capsys.readouterr().out)
    assert list(line) == [*KEYS, "logprobs"]
    assert [one["token_id"] for one in line["logprobs"]] == line["token_ids"]
    for one in line["logprobs"]:
        assert len(one["top"]) == 2
        assert one["logprob"] <= one["top"][0]["logprob"] <= 0


def test_processors_reach_the_engine(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    def token_ids(*flags: str) -> list[int]:
        assert cli.main([*base, "--prompt", "x", "--json", *flags]) == 0
        found: list[int] = lines_of(capsys.readouterr().out)[0]["token_ids"]
        return found

    assert set(token_ids("--allowed-token-ids", "7,9")) <= {7, 9}
    assert set(token_ids("--logit-bias", "11=100,12=-100")) == {11}
    assert token_ids("--logit-bias", "0=100")[0] == 0
    assert 0 not in token_ids("--logit-bias", "0=100", "--min-tokens", "12")
    plain = token_ids("--ignore-eos")
    for flags in (["--repetition-penalty", "9"], ["--frequency-penalty", "-2"], ["--presence-penalty", "-2"]):
        assert token_ids("--ignore-eos", *flags) != plain
    tokenizer = tiny_loaded().tokenizer
    letter, space = tokenizer.encode("a")[0], tokenizer.encode(" ")[0]
    allowed = f"{letter},{space},9"
    assert letter not in token_ids("--allowed-token-ids", allowed, "--logit-bias", f"{letter}=100", "--bad-words", "a")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "-1"], "--temperature -1: it must be at least 0"),
        (["--top-p", "0"], "--top-p 0: it must be above 0"),
        (["--n", "0"], "--n 0: it must be at least 1"),
        (["--n", "-1"], "--n -1: it must be at least 1"),
        (["--n", "1000000000"], "--n 1000000000: it must be at most 128"),
        (["--logit-bias", "x"], "logit_bias: 'x': give ID=BIAS, such as 15=-100"),
        (["--logit-bias", "5=300"], "logit_bias: 300.0: it must be from -100 to 100"),
        (["--temperature", "1e-9"], "temperature: 1e-09: give 0 (greedy) or at least 0.001"),
        (["--best-of", "2"], "unknown flag --best-of"),
    ],
)
@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
def test_wrong_sampling_is_refused(
    base: list[str], capsys: pytest.CaptureFixture[str], flags: list[str], message: str, dry_run: list[str]
) -> None:
    assert cli.main([*base, "--prompt", "x", *flags, *dry_run]) == 2
    assert f"error: {message}" in capsys.readouterr().err


def test_interrupt_keeps_what_is_finished(
    base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real_step = LLMEngine.step

    def step(engine: LLMEngine) -> list[StepOutput]:
        if not any(sequence.request.id == "short" for sequence in engine._sequences.values()):
            raise KeyboardInterrupt
        return real_step(engine)

    monkeypatch.setattr(LLMEngine, "step", step)
    # The second one ends first: its context is almost full.
    path = prompt_file(tmp_path, {"id": "long", "prompt": "a"}, {"id": "short", "prompt": "x" * 254})
    flags = ["--input", path, "--raw", "--ignore-eos", "--json", "--window", "1"]
    assert cli.main([*base, *flags]) == 130
    captured = capsys.readouterr()
    assert [line["id"] for line in lines_of(captured.out)] == ["short"]
    assert captured.err.splitlines()[-1].startswith("interrupted; 1 of 2 requests: ")


def test_a_model_that_cannot_chat_is_told_once(
    base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_checkpoint: Path
) -> None:
    from tests.tiny_models import save_tiny_checkpoint

    folder = save_tiny_checkpoint(tmp_path / "plain")
    for name in ("chat_template.jinja",):
        (folder / name).unlink()
    path = prompt_file(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    assert cli.main([*base, "--model", str(folder), "--input", path]) == 2
    assert capsys.readouterr().err.count("no chat template; use --raw") == 1


def test_the_reference_heeds_none_of_the_models_own_settings() -> None:
    loaded = tiny_loaded()
    prompt = list(range(5, 20))
    plain = reference_ids(loaded.model, prompt, max_tokens=8, stop_token_ids=())
    loaded.model.generation_config.eos_token_id = plain[2]
    loaded.model.generation_config.repetition_penalty = 50.0
    assert reference_ids(loaded.model, prompt, max_tokens=8, stop_token_ids=()) == plain
    assert reference_ids(loaded.model, prompt, max_tokens=8, stop_token_ids=[plain[2]])[-1] == plain[2]
    assert loaded.model.generation_config.repetition_penalty == 50.0


def test_near_tie_rule_finds_the_gap() -> None:
    loaded = tiny_loaded(dtype=torch.float64)
    prompt = list(range(5, 20))
    reference = reference_ids(loaded.model, prompt, max_tokens=6, stop_token_ids=())
    assert len(reference) == 6
    assert first_difference(loaded.model, prompt, reference, reference) is None
    wrong = [*reference[:3], (reference[3] + 1) % 259, *reference[4:]]
    difference = first_difference(loaded.model, prompt, reference, wrong)
    assert difference is not None
    assert difference.position == 3
    assert 0 < difference.gap < 100
    assert not difference.is_explained()
    assert difference.is_explained(bound=100)
    short = first_difference(loaded.model, prompt, reference, reference[:4])
    assert short is not None
    assert not short.is_explained(bound=1e9)


def test_a_checkpoint_brings_its_fill_and_the_window_of_its_blocks(tmp_path: Path) -> None:
    about = JacobiCheckpointConfig(
        mode=CheckpointMode.MERGED,
        window=5,
        fill=FillPolicy.PROMPT_DRAW,
        acceptance_by_depth=[],
        objective=ObjectiveName.AR,
        data_sha256="0" * 64,
        base_model="tiny",
        tokens_trained=1,
    )
    save_checkpoint_config(about, tmp_path)
    config = GenerateConfig(model=str(tmp_path))
    generate.take_checkpoint_settings(config, explicit=())
    assert (config.window, config.fill) == (Auto.AUTO, FillPolicy.PROMPT_DRAW)
    blocks = GenerateConfig(model=str(tmp_path), mode=DecodeMode.BLOCK)
    generate.take_checkpoint_settings(blocks, explicit=("generate.fill",))
    assert (blocks.window, blocks.fill) == (5, FillPolicy.NGRAM)
    asked = GenerateConfig(model=str(tmp_path), window=3)
    generate.take_checkpoint_settings(asked, explicit=("generate.window",))
    assert (asked.window, asked.fill) == (3, FillPolicy.PROMPT_DRAW)
    other = GenerateConfig(model="smollm2-135m")
    generate.take_checkpoint_settings(other, explicit=())
    assert other == GenerateConfig(model="smollm2-135m")
