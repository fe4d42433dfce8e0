"""The speed comparison of benchmarks/peers: turns, ratios, sleep, and the check of the tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers import run, worker_jacobi, worker_transformers
from benchmarks.peers.cpu_clock import family_cpu_s, machine_cpu_s
from benchmarks.peers.engines import find_vllm, parse_peers, target_of
from benchmarks.peers.pairs import (
    Turn,
    compare_passes,
    compare_speed,
    distinct_batches,
    plan,
    prompts_of,
    quartiles,
)
from benchmarks.peers.protocol import Flags
from benchmarks.peers.same_tokens import WIDEST_BOUND, Judge, Parting, rounding_bound, summarise
from benchmarks.peers.turns import fastest, run_pairs, run_trials, take_turn
from benchmarks.peers.worker import Worker
from jacobi_llm.configs.errors import RunError, UsageError
from jacobi_llm.configs.schema import Dtype, EngineConfig
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.models import LoadedModel, load_model
from jacobi_llm.infer.near_tie import FP32_BOUND, choice_gap, reference_ids
from tests.infer.fake_worker import ROOT, completion, fake
from tests.tiny_models import tiny_loaded

PROMPTS = [tuple(range(3 + index, 12 + 2 * index)) for index in range(6)]


def turn(wall_s: float, *token_ids: tuple[int, ...]) -> Turn:
    return Turn(wall_s, cpu_s=wall_s, others_cpu_s=0.0, token_ids=token_ids or ((1, 2),))


@pytest.fixture
def worker() -> Iterator[Worker]:
    with fake() as started:
        yield started


def test_who_goes_first_alternates_in_every_comparison() -> None:
    pairs = list(plan(["vllm", "transformers"], [1, 16], 4))
    assert len(pairs) == len(set(pairs)) == 2 * 2 * 4
    for peer in ("vllm", "transformers"):
        for size in (1, 16):
            mine = [pair for pair in pairs if pair.peer == peer and pair.batch_size == size]
            assert [pair.repeat for pair in mine] == [0, 1, 2, 3]
            assert [pair.ours_first for pair in mine] in ([True, False] * 2, [False, True] * 2)
    assert [pair.ours_first for pair in pairs[:2]] == [True, False]
    # A repeat holds every comparison once, so that a drift meets all of them.
    assert [pair.repeat for pair in pairs] == sorted(pair.repeat for pair in pairs)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12))
def test_batches_are_full_and_use_the_prompts_evenly(num_prompts: int, batch_size: int, repeats: int) -> None:
    prompts = [(index,) for index in range(num_prompts)]
    batches = [prompts_of(batch_size, repeat, prompts) for repeat in range(repeats)]
    assert [len(batch) for batch in batches] == [batch_size] * repeats
    used = [prompt for batch in batches for prompt in batch]
    counts = [used.count(prompt) for prompt in prompts]
    assert max(counts) - min(counts) <= 1
    distinct = distinct_batches(batch_size, repeats, prompts)
    assert all(batch in distinct for batch in batches)
    assert len(distinct) == len(set(map(tuple, batches)))


def test_ratio_is_taken_within_its_pair() -> None:
    # The machine slows down threefold and comes back; we are twice as fast in each pair.
    ours = [turn(1.0), turn(3.0), turn(1.0)]
    theirs = [turn(2.0), turn(6.0), turn(2.0)]
    found = compare_speed(ours, theirs, target=1.6)
    assert found["ratio"] == 2.0
    assert found["ratio_quartiles"] == [2.0, 2.0]
    assert found["our_tps"] == 2.0
    assert found["their_tps"] == 1.0
    assert found["is_met"]
    assert not compare_speed(theirs, ours, target=0.9)["is_met"]


def test_a_wide_pass_meets_its_target_from_below() -> None:
    found = compare_passes([10.0, 20.0, 10.0], [14.0, 28.0, 14.0], target=1.45)
    assert found["ratio"] == 1.4
    assert found["is_met"]
    assert not compare_passes([10.0], [15.0], target=1.45)["is_met"]


def test_quartiles() -> None:
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)


def test_what_libraries_print_does_not_disturb_the_conversation(worker: Worker) -> None:
    assert worker.ready["version"] == "1.2.3"
    assert worker.ready["settings"] == {"variant": "plain"}
    with worker.awake():
        reply = worker.ask("generate", prompts=[[1, 2], [3]], max_tokens=5)
    assert reply["token_ids"] == [completion([1, 2], 5), completion([3], 5)]
    assert reply["wall_s"] > 0


def test_an_engine_that_cannot_be_loaded_is_named_with_its_log() -> None:
    with pytest.raises(RunError) as caught:
        fake("broken")
    assert caught.value.faults[0] == "fake:broken: the engine failed: OSError: no such weights; the end of its log:"
    assert any("and more of it" in line for line in caught.value.faults)


def test_an_engine_that_ends_or_fails_is_named(worker: Worker) -> None:
    with worker.awake():
        with pytest.raises(RunError, match="the engine failed: TypeError"):
            worker.ask("time_rows", rows=3)
        with pytest.raises(RunError, match="the engine ended with status 3"):
            worker.ask("end")
        with pytest.raises(RunError, match="the engine ended with status 3"):
            worker.ask("generate", prompts=[[1]], max_tokens=1)


def test_a_sleeping_engine_does_not_compute() -> None:
    with fake("spinning") as spinning:
        with spinning.awake():
            before_s = spinning.cpu_s()
            deadline_s = time.monotonic() + 20
            while spinning.cpu_s() < before_s + 0.1 and time.monotonic() < deadline_s:
                time.sleep(0.05)
            assert spinning.cpu_s() >= before_s + 0.1
        time.sleep(0.5)
        with spinning.awake():
            pass
        assert spinning.idle_cpu_s <= 0.05


def test_engines_end_with_a_comparison_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "comparison.py"
    script.write_text(
        "import os, signal\n"
        "from tests.infer.fake_worker import fake\n"
        "worker = fake()\n"
        "print(worker._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n",
        encoding="utf-8",
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, env=environment)
    pid = int(done.stdout)
    deadline_s = time.monotonic() + 20
    while _is_alive(pid) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not _is_alive(pid)


def test_cpu_clocks_count_children() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        machine_s, own_s = machine_cpu_s(), family_cpu_s(os.getpid())
        deadline_s = time.monotonic() + 20
        while family_cpu_s(child.pid) < 0.2 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert family_cpu_s(child.pid) >= 0.2
        assert family_cpu_s(os.getpid()) >= own_s + 0.1
        assert machine_cpu_s() >= machine_s + 0.1
    finally:
        child.kill()
        child.wait()
    assert family_cpu_s(child.pid) == 0


def test_a_turn_of_the_wrong_length_is_refused(worker: Worker) -> None:
    taken = take_turn(worker, PROMPTS[:2], 6)
    assert taken.token_ids == tuple(tuple(completion(list(prompt), 6)) for prompt in PROMPTS[:2])
    assert taken.tps == pytest.approx(12 / taken.wall_s)
    with fake("short") as short, pytest.raises(RunError, match=r"\[5, 5\] tokens, asked for 6"):
        take_turn(short, PROMPTS[:2], 6)


def test_pairs_use_the_same_prompts(worker: Worker) -> None:
    with fake(name="peer") as peer:
        done = run_pairs(worker, {"vllm": peer}, [1, 2], 3, PROMPTS, 5)
        trials = run_trials({"plain": peer}, [1, 2], PROMPTS, 5)
    assert len(done) == 6
    for pair, (mine, other) in done.items():
        assert mine.token_ids == other.token_ids
        assert len(mine.token_ids) == pair.batch_size
    assert trials["plain"].keys() == {1, 2}
    assert fastest({"a": {1: 10.0, 4: 10.0}, "b": {1: 8.0, 4: 20.0}}) == "b"


def test_a_near_tie_is_told_from_a_fault() -> None:
    model = tiny_loaded(dtype=torch.float32).model
    prompt = PROMPTS[0]
    right = reference_ids(model, prompt, max_tokens=6, stop_token_ids=())
    wrong = (*right[:3], (right[3] + 1) % 256, *right[4:])
    [equal, parting] = Judge(model).partings([prompt] * 2, [tuple(right), wrong], [tuple(right)] * 2)
    assert equal is None
    assert parting is not None
    assert parting.position == 3
    assert parting.gap == pytest.approx(choice_gap(model, [*prompt, *right[:3]], (right[3], wrong[3])))
    found = summarise([equal, parting, Parting(2, 0.01)], bound=parting.gap)
    assert found["completions"] == 3
    assert found["equal"] == 1
    assert found["explained_by_rounding"] == 1
    assert found["unexplained"] == 1
    assert found["first_differences"] == [2, 3]


def test_the_bound_is_twice_the_largest_gap_of_the_peers_own_rounding() -> None:
    assert rounding_bound({"vllm": [None, Parting(3, 0.2)], "transformers": [Parting(1, 0.05)]}) == 0.4
    assert rounding_bound({"vllm": [None]}) == FP32_BOUND
    assert rounding_bound({"vllm": [Parting(1, 5.0)]}) == WIDEST_BOUND


def test_peers_are_read_from_flags(tmp_path: Path) -> None:
    assert parse_peers(["vllm:eager", "transformers"]) == {
        "vllm": ["eager"],
        "transformers": ["dynamic", "static", "eager"],
    }
    assert parse_peers(["vllm:eager", "vllm:compiled"]) == {"vllm": ["eager", "compiled"]}
    with pytest.raises(UsageError, match="'sglang': no such peer"):
        parse_peers(["sglang"])
    with pytest.raises(UsageError, match="setup_vllm"):
        find_vllm(tmp_path)
    assert [target_of("vllm", size) for size in (1, 4, 16)] == [0.95, 0.9, 0.9]
    assert target_of("transformers", 4) == 1.6


def test_the_command_in_the_result_names_no_folder() -> None:
    words = ["--vllm-env", "/home/me/vllm", "--output=/tmp/a b.json", "--repeats", "9"]
    assert run.public_command(words) == (
        "python -m benchmarks.peers.run --vllm-env vllm '--output=a b.json' --repeats 9"
    )


@pytest.mark.parametrize(("variant", "status"), [("plain", 0), ("wrong", 1)])
def test_the_whole_comparison(
    tiny_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variant: str,
    status: int,
) -> None:
    monkeypatch.setattr(
        run, "start", lambda engine, flags, _: fake("plain" if engine == run.OURS else flags.variant, name=engine)
    )
    output = tmp_path / "peers.json"
    flags = ["--model", str(tiny_checkpoint), "--peers", f"transformers:{variant}", "--batch-sizes", "1,3"]
    flags += ["--num-prompts", "4", "--repeats", "3", "--max-tokens", "6", "--threads", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["run.py", *flags])
    assert run.main(flags) == status
    result = json.loads(output.read_text(encoding="utf-8"))
    assert result["speed"]["transformers"].keys() == {"1", "3"}
    assert all(len(row["ratios"]) == 3 for row in result["speed"]["transformers"].values())
    assert result["passes"]["ratio"] == 1.5
    assert result["engines"]["transformers"]["variant"] == variant
    found = result["same_tokens"]["pairs"]["transformers"]
    assert found["completions"] == 3 * 1 + 3 * 3
    assert found["equal"] == (12 if status == 0 else 6)
    assert found["unexplained"] == (0 if status == 0 else 6)
    assert str(tmp_path) not in output.read_text(encoding="utf-8")
    captured = capsys.readouterr()
    assert f"{found['equal']} of 12 completions equal" in captured.out
    assert "repeat 3 of 3, batch 3" in captured.err
    assert run.main([*flags, "--json"]) == status
    assert json.loads(capsys.readouterr().out)["max_tokens"] == 6


def test_too_few_prompts_are_refused(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", str(tiny_checkpoint), "--peers", "transformers", "--num-prompts", "4", "--batch-sizes", "8"]
    assert run.main(flags) == 2
    assert capsys.readouterr().err == "error: --num-prompts: 4 prompts do not fill a batch of 8\n"


def test_our_worker_counts_every_row(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[LLMEngine] = []

    def make(loaded: LoadedModel, config: EngineConfig) -> LLMEngine:
        made.append(LLMEngine(loaded, config.model_copy(update={"kv_memory_mib": 4})))
        return made[0]

    monkeypatch.setattr(worker_jacobi, "LLMEngine", make)
    served = worker_jacobi.load(Flags(str(tiny_checkpoint), "default", 1, 2, 64))
    prompts = [list(prompt) for prompt in PROMPTS[:2]]
    assert [len(ids) for ids in served.decode(prompts, 5)] == [5, 5]
    monkeypatch.setattr(made[0], "generate", lambda requests: [])
    with pytest.raises(RuntimeError, match="0 rows were forwarded, not"):
        served.decode(prompts, 5)


def test_passes_are_timed_in_turn_and_leave_the_pool_as_it_was(tiny_loaded: Callable[..., LoadedModel]) -> None:
    engine = LLMEngine(tiny_loaded(), EngineConfig(kv_memory_mib=4))
    free = engine.pool.num_free
    found = worker_jacobi.time_passes(engine, num_rows=4, context=20, repeats=3)
    assert len(found["one_row_ms"]) == len(found["many_rows_ms"]) == 3
    assert min(found["one_row_ms"] + found["many_rows_ms"]) > 0
    assert engine.pool.num_free == free
    engine.check_integrity()


@pytest.mark.parametrize("variant", worker_transformers.VARIANTS)
def test_transformers_decodes_to_the_exact_length(tiny_checkpoint: Path, variant: str) -> None:
    served = worker_transformers.load(Flags(str(tiny_checkpoint), variant, 1, 2, 64))
    prompts = [list(prompt) for prompt in PROMPTS[:2]]
    model = load_model(str(tiny_checkpoint), dtype=Dtype.BFLOAT16).model
    model.set_attn_implementation(worker_transformers.VARIANTS[variant][0])
    [alone] = served.decode(prompts[:1], 5)
    if variant != "static":  # another cache has other shapes, and those round in another way
        assert alone == reference_ids(model, prompts[0], max_tokens=5, stop_token_ids=())
    assert [len(ids) for ids in served.decode(prompts, 5)] == [5, 5]


def _is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
