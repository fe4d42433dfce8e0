"""LoRA adapters beside the base weights: exact against peft's merged models, mixed in one batch; what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.schema import CompileMode, Dtype, EngineConfig
from jacobi_llm.infer import cli, compiled_forward
from jacobi_llm.infer.adapters import LowRankUpdate, adapter_folders, read_adapter
from jacobi_llm.infer.model_runner import ModelRunner, make_runner
from jacobi_llm.infer.models import load_model
from jacobi_llm.infer.native_attention import NativeBackend
from jacobi_llm.infer.request import DecodeParams, Request
from jacobi_llm.infer.row_group import RowGroup
from tests.infer.decoding import decode_ar, make_engine, random_prompt, run_checked
from tests.tiny_models import tiny_loaded, tiny_model

# peft warns of what these tests ask of it
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft.*", "ignore::FutureWarning:transformers.*")

NUM_TOKENS = 24
WINDOWS = (1, 2, 5, 16)
ALL_LINEAR: dict[str, Any] = {"r": 5, "lora_alpha": 10, "target_modules": "all-linear"}
Q_AND_V: dict[str, Any] = {"r": 20, "lora_alpha": 12, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]}
BY_LAYER: dict[str, Any] = {
    "r": 4,
    "lora_alpha": 6,
    "target_modules": ["k_proj", "down_proj", "lm_head"],
    "rank_pattern": {"layers.1.self_attn.k_proj": 17, "down_proj": 3},
    "alpha_pattern": {"^model.layers.0.mlp.down_proj": 9.0},
}


def save_adapter(folder: Path, model: PreTrainedModel, *, seed: int = 1, spread: float = 0.3, **config: Any) -> Path:
    """Let peft write a random adapter for ``model``, which is changed on the way."""
    tuned = get_peft_model(model, LoraConfig(**config), autocast_adapter_dtype=False)
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * spread)
    tuned.save_pretrained(folder)
    return folder


def merged(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Return peft's merge of an adapter into ``model``, in eval mode."""
    whole = PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=False).merge_and_unload()
    assert isinstance(whole, PreTrainedModel)
    return whole.eval()


def request(id: str, prompt: tuple[int, ...], adapter: str | None, window: int) -> Request:
    return Request(id, prompt, DecodeParams(NUM_TOKENS, window=window), adapter=adapter)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt2"])
def test_a_mixed_batch_gives_the_ids_of_the_merged_models(family: str, tmp_path: Path) -> None:
    """Two adapters and none, mixed windows, prompts in chunks, joining at different steps, preempted: 0 differ."""
    settings = {"a": ALL_LINEAR, "b": Q_AND_V, "c": BY_LAYER}
    if family == "gpt2":
        settings = {"a": ALL_LINEAR, "b": {"r": 3, "target_modules": ["c_attn", "lm_head"], "fan_in_fan_out": True}}
    folders = {
        name: save_adapter(tmp_path / name, tiny_model(family), seed=number, **config)
        for number, (name, config) in enumerate(settings.items())
    }
    models = {None: tiny_model(family), **{name: merged(tiny_model(family), path) for name, path in folders.items()}}
    draw = random.Random(family)
    wanted = [(name, random_prompt(draw, draw.randint(1, 40)), window) for name in models for window in WINDOWS]
    answers = [decode_ar(models[name], prompt, NUM_TOKENS) for name, prompt, _ in wanted]
    assert len({tuple(decode_ar(model, wanted[-1][1], NUM_TOKENS)) for model in models.values()}) == len(models)
    for num_pages, max_num_rows in ((200, 2048), (6, 19)):
        engine = make_engine(tiny_loaded(family), num_pages=num_pages, max_num_rows=max_num_rows)
        for name, path in folders.items():
            engine.load_adapter(name, str(path))
        order = draw.sample(range(len(wanted)), k=len(wanted))
        requests = [request(str(i), wanted[i][1], wanted[i][0], wanted[i][2]) for i in order]
        tape = run_checked(engine, requests, join_at=[draw.randint(0, 9) for _ in order])
        for i in order:
            assert list(tape.outputs[str(i)].token_ids) == answers[i], (wanted[i][0], wanted[i][2])
        assert (engine.scheduler.num_preemptions > 0) == (num_pages == 6)


@given(
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 50), st.integers(0, 20)),
    ranks=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    rows=st.lists(st.tuples(st.integers(-1, 1), st.integers(1, 40)), min_size=1, max_size=6),
    is_head=st.booleans(),
    is_tiled=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=150)
def test_the_operator_equals_the_formula(
    sizes: tuple[int, int, int],
    ranks: tuple[int, int],
    rows: list[tuple[int, int]],
    is_head: bool,
    is_tiled: bool,
    seed: int,
) -> None:
    """Any sizes and ranks, two adapters and none in any order of groups, an update of all columns or of a part."""
    num_in, size, first = sizes
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    backend = NativeBackend(1, 16, torch.float64, is_batch_invariant=is_tiled)
    weight = normal(first + size + 3, num_in)
    index = torch.ops.jacobi_llm.add_projection(backend.handle, weight, None, False, is_head)
    updates = [LowRankUpdate(normal(rank, num_in), normal(size, rank), 0.5 + rank) for rank in ranks]
    for number, update in enumerate(updates):
        torch.ops.jacobi_llm.add_low_rank_update(backend.handle, number, index, update.a, update.b, update.scale, first)
    backend.adapter_numbers = {"0": 0, "1": 1}
    groups = [
        RowGroup([0], 0, [0] * count, False, num_logit_rows=min(count, 3), adapter=str(number) if number >= 0 else None)
        for number, count in rows
    ]
    owners = [(group, number) for group, (number, _) in zip(groups, rows, strict=True)]
    numbers = [number for group, number in owners for _ in range(group.num_logit_rows if is_head else group.num_rows)]
    input_ = normal(1, len(numbers), num_in)
    with backend.running(groups):
        output = torch.ops.jacobi_llm.linear(input_, index, weight.shape[0])[0]
    expected = input_[0] @ weight.T
    for row, number in enumerate(numbers):
        if number >= 0:
            update = updates[number]
            expected[row, first : first + size] += update.scale * (update.b @ (update.a @ input_[0, row]))
    torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-9)


def chunked(runner: ModelRunner, text: list[int], chunks: list[int], adapter: str | None, others: int) -> torch.Tensor:
    """Logits of the last row of ``text``, read in chunks while ``others`` groups of mixed adapters share the pass."""
    table, at, logits = [7, 2, 19, 4, 11, 0], 0, torch.empty(0)
    draw = random.Random(others)
    for chunk in chunks:
        beside = [
            RowGroup([20 + i], 0, list(random_prompt(draw, 1 + i % 9)), adapter=(None, "a", "b")[i % 3])
            for i in range(others)
        ]
        is_last = at + chunk == len(text)
        group = RowGroup(table, at, text[at : at + chunk], num_logit_rows=int(is_last), adapter=adapter)
        logits = runner.forward([*beside[::2], group, *beside[1::2]])
        at += chunk
    return logits[len(beside[::2])]


def runner_with(model: PreTrainedModel, folders: dict[str, Path], **config: Any) -> ModelRunner:
    runner = make_runner(model, EngineConfig(**{"compile": CompileMode.OFF, **config}), 60, "tiny")
    for name, folder in folders.items():
        runner.load_adapter(name, str(folder))
    return runner


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """Two adapters of the tiny float32 llama."""
    return {
        "a": save_adapter(tmp_path / "a", tiny_model("llama", torch.float32), **ALL_LINEAR),
        "b": save_adapter(tmp_path / "b", tiny_model("llama", torch.float32), seed=2, **BY_LAYER),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("adapter", ["a", "b", None])
def test_bits_do_not_depend_on_the_batch(dtype: torch.dtype, adapter: str | None, folders: dict[str, Path]) -> None:
    """Batch-invariant mode: neither chunks nor other requests, with whatever adapter, change a bit."""
    runner = runner_with(tiny_model("llama", dtype), folders, batch_invariant=True)
    text = list(random_prompt(random.Random(3), 70))
    alone = chunked(runner, text, [70], adapter, 0)
    for chunks, others in (([70], 30), ([69, 1], 0), ([69, 1], 13), ([33, 20, 1, 16], 7), ([1] * 70, 2)):
        assert torch.equal(chunked(runner, text, chunks, adapter, others), alone), (chunks, others)


def test_rows_without_an_adapter_keep_the_bits_of_an_engine_without_adapters(folders: dict[str, Path]) -> None:
    model = tiny_model("llama", torch.bfloat16)
    text = list(random_prompt(random.Random(3), 70))
    plain = chunked(runner_with(model, {}, batch_invariant=True), text, [33, 37], None, 0)
    assert torch.equal(chunked(runner_with(model, folders, batch_invariant=True), text, [33, 37], None, 9), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["a", "b"])
def test_lower_precisions_are_as_near_as_the_merged_model(
    dtype: torch.dtype, name: str, folders: dict[str, Path]
) -> None:
    """Against the model merged in float64: the mean error is at most 1.2 times that of merging in ``dtype``."""
    exact = merged(tiny_model("llama"), folders[name])
    rounded = merged(tiny_model("llama", dtype), folders[name])
    runner = runner_with(tiny_model("llama", dtype), folders)
    for num_rows, has_company in ((90, False), (90, True), (40, True), (7, False)):
        text = list(random_prompt(random.Random(num_rows), num_rows))
        groups = [
            RowGroup([1, 2, 3, 4, 5, 6], 0, text, num_logit_rows=num_rows, adapter=name),
            RowGroup([11, 12, 13, 14, 15, 16], 0, text, num_logit_rows=9, adapter="a" if name == "b" else "b"),
        ]
        with torch.no_grad():
            expected, own = exact(torch.tensor([text])).logits[0], rounded(torch.tensor([text])).logits[0].double()
        logits = runner.forward(groups if has_company else groups[:1])[:num_rows].double()
        error = (logits - expected).abs().mean()
        assert error <= 1.2 * (own - expected).abs().mean()
        assert error < (0.2 if dtype is torch.bfloat16 else 1e-4) * expected.abs().mean()


def test_the_compiled_program_takes_adapters_without_recompiling(folders: dict[str, Path], tmp_path: Path) -> None:
    """One program with and without adapters; passes of one row are padded, also those without a logit row."""
    model, text = tiny_model("llama", torch.bfloat16), list(random_prompt(random.Random(3), 40))
    with mock.patch.object(compiled_forward, "cache_dir", return_value=tmp_path / "cache"):
        compiled = runner_with(model, {}, batch_invariant=True, compile=CompileMode.ON)
        before = chunked(compiled, text, [40], None, 0)
        for name, folder in folders.items():
            compiled.load_adapter(name, str(folder))
        assert compiled.is_compiled
        assert len(list((tmp_path / "cache" / "compiled").glob("*.pt2"))) == 1
    eager = runner_with(model, folders, batch_invariant=True)
    assert torch.equal(chunked(compiled, text, [40], None, 0), before)
    for adapter in (None, "a", "b"):
        for chunks, others in (([40], 5), ([1] * 40, 0), ([38, 1, 1], 3)):
            expected = chunked(eager, text, chunks, adapter, others)
            assert torch.equal(chunked(compiled, text, chunks, adapter, others), expected)
            assert adapter is None or not torch.equal(expected, before)


def test_loading_and_unloading(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "a", tiny_model("llama"), **ALL_LINEAR)
    other = save_adapter(tmp_path / "b", tiny_model("llama"), seed=2, **Q_AND_V)
    prompt = random_prompt(random.Random(5), 12)
    base = decode_ar(tiny_model("llama"), prompt, NUM_TOKENS)
    engine = make_engine(tiny_loaded("llama"))
    with pytest.raises(UsageError, match="request r: no adapter 'mine'; none is loaded"):
        engine.add_request(request("r", prompt, "mine", 4))
    engine.load_adapter("mine", str(folder))
    with pytest.raises(UsageError, match="adapter 'mine' is loaded already"):
        engine.load_adapter("mine", str(other))
    engine.load_adapter("other", str(other))
    with pytest.raises(UsageError, match="request r: no adapter 'hers'; loaded are mine, other"):
        engine.add_request(request("r", prompt, "hers", 4))
    engine.add_request(request("r", prompt, "mine", 4))
    engine.step()
    with pytest.raises(UsageError, match="adapter 'mine': request r uses it"):
        engine.unload_adapter("mine")
    engine.unload_adapter("other")
    engine.abort("r")
    engine.unload_adapter("mine")
    with pytest.raises(UsageError, match="no adapter 'mine'; none is loaded"):
        engine.unload_adapter("mine")
    # The name may come back with other weights.
    engine.load_adapter("mine", str(other))
    expected = decode_ar(merged(tiny_model("llama"), other), prompt, NUM_TOKENS)
    outputs = engine.generate([request("r", prompt, "mine", 4), request("s", prompt, None, 4)])
    assert [list(output.token_ids) for output in outputs] == [expected, base]
    engine.check_integrity()


def test_a_refused_adapter_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path, tiny_model("llama", hidden_size=16), **ALL_LINEAR)
    prompt = random_prompt(random.Random(6), 12)
    engine = make_engine(tiny_loaded("llama"))
    for _ in range(2):
        with pytest.raises(UsageError, match=r"'wrong': its update of .*down_proj is 16 x 48, the layer 32 x 48"):
            engine.load_adapter("wrong", str(folder))
    assert engine.runner.projections is not None
    [output] = engine.generate([request("r", prompt, None, 4)])
    assert list(output.token_ids) == decode_ar(tiny_model("llama"), prompt, NUM_TOKENS)


def test_sdpa_refuses_adapters_with_the_remedy(folders: dict[str, Path]) -> None:
    engine = make_engine(tiny_loaded("llama"), attention="sdpa")
    with pytest.raises(UsageError, match=r"adapter 'a': .* need the native attention .*merge one at load"):
        engine.load_adapter("a", str(folders["a"]))
    with pytest.raises(UsageError, match=r"request r: adapter 'a': .* need the native attention"):
        engine.add_request(request("r", (5, 6), "a", 4))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"use_dora": True}, "it sets use_dora"),
        ({"bias": "lora_only"}, r"it trains biases \(bias=lora_only\)"),
        ({"lora_bias": True}, "it sets lora_bias"),
        ({"modules_to_save": ["embed_tokens"]}, "it sets modules_to_save"),
        ({"target_modules": ["embed_tokens"]}, "it holds .*embed_tokens.lora_embedding_A"),
        ({"init_lora_weights": "pissa"}, "its initialisation pissa changes the base weights"),
        ({"init_lora_weights": "olora"}, "its initialisation olora changes the base weights"),
    ],
)
def test_what_is_more_than_plain_lora_is_refused_by_name(settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path, tiny_model("llama", torch.float32), **{"target_modules": ["q_proj"], **settings})
    with pytest.raises(UsageError, match=f"{reason}; only plain LoRA can be loaded beside the base weights"):
        read_adapter(str(folder))


def test_other_kinds_of_adapters_are_refused_by_name(tmp_path: Path) -> None:
    config = IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    get_peft_model(tiny_model("llama"), config).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="its type is IA3"):
        read_adapter(str(tmp_path))


def test_damaged_folders_are_one_line(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path, tiny_model("llama"), **ALL_LINEAR)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    whole, text = load_file(weights), config.read_text()

    def refusal() -> str:
        with pytest.raises(UsageError) as caught:
            read_adapter(str(folder))
        assert len(caught.value.faults) == 1
        assert "\n" not in str(caught.value)
        return str(caught.value)

    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file({key: value for key, value in whole.items() if not key.startswith(f"{layer}.lora_B")}, weights)
    assert "model.layers.0.self_attn.q_proj has no lora_B" in refusal()
    save_file({"x": torch.zeros(1)}, weights)
    assert "holds no LoRA matrices" in refusal()
    save_file({**whole, f"{layer}.lora_A.weight": torch.zeros(3, 32)}, weights)
    assert "q_proj has matrices of (3, 32) and (32, 5), its rank is 5" in refusal()
    weights.write_bytes(b"nothing")
    assert "it cannot be read" in refusal()
    save_file(whole, weights)
    config.write_text("{")
    assert "it cannot be read" in refusal()
    config.write_text("{}")
    assert "is not peft's" in refusal()
    config.write_text(json.dumps({**json.loads(text), "new_trick": [1]}))
    assert "it sets new_trick" in refusal()
    weights.unlink()
    assert "no adapter_model.safetensors" in refusal()


def test_adapters_of_another_model_are_refused(tmp_path: Path) -> None:
    runner = runner_with(tiny_model("llama", torch.float32), {})
    deep = save_adapter(tmp_path / "deep", tiny_model("llama", torch.float32, num_hidden_layers=3), **Q_AND_V)
    with pytest.raises(UsageError, match=r"'x': model.layers.2.self_attn.q_proj is not a linear layer of this model"):
        runner.load_adapter("x", str(deep))
    # peft saves the head and the embeddings when the head is a target: those of another model are not ours
    head = save_adapter(tmp_path / "head", tiny_model("llama", torch.float32, seed=9), **BY_LAYER)
    with pytest.raises(UsageError, match=r"'x': it brings .*weight of its own"):
        runner.load_adapter("x", str(head))


def test_layers_that_do_not_see_every_row_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that are linear layers see their own rows only; the attention beside them takes an adapter."""
    folder = save_adapter(tmp_path / "all", tiny_model("llama"), **ALL_LINEAR)
    attention = save_adapter(tmp_path / "attention", tiny_model("llama"), **Q_AND_V)
    loaded = tiny_loaded("llama")
    mlp = loaded.model.model.layers[1].mlp
    whole = mlp.forward

    def routed(x: torch.Tensor) -> torch.Tensor:
        """The whole layer for some rows, nothing for the others, as a router does."""
        is_here = x[0, :, 0] > 0
        out = torch.zeros_like(x)
        out[:, is_here] = whole(x[:, is_here])
        return out

    monkeypatch.setattr(mlp, "forward", routed)
    engine = make_engine(loaded)
    with pytest.raises(UsageError, match=r"layers.1.mlp.down_proj of model type llama does not see every row"):
        engine.load_adapter("all", str(folder))
    engine.load_adapter("attention", str(attention))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_attention_of_models_with_experts_takes_adapters(family: str, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path, tiny_model(family), **Q_AND_V)
    prompt = random_prompt(random.Random(7), 20)
    expected = decode_ar(merged(tiny_model(family), folder), prompt, NUM_TOKENS)
    engine = make_engine(tiny_loaded(family))
    engine.load_adapter("a", str(folder))
    for window in WINDOWS:
        outputs = engine.generate([request("r", prompt, "a", window), request("s", prompt, None, window)])
        assert list(outputs[0].token_ids) == expected
        assert list(outputs[1].token_ids) != expected


def test_settings_of_the_command_line(tmp_path: Path) -> None:
    folder = str(save_adapter(tmp_path, tiny_model("llama"), **Q_AND_V))
    assert adapter_folders([f"a={folder}", f"b={folder}"]) == {"a": folder, "b": folder}
    with pytest.raises(UsageError) as caught:
        adapter_folders(["a", "=x", f"b={folder}", f"b={folder}", "c=/no/such/folder"])
    assert len(caught.value.faults) == 4
    assert "adapters: the name 'b' is given twice" in caught.value.faults


def test_generate_answers_each_record_with_its_adapter(
    tiny_checkpoint: Path, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{"id": f"{name}", "prompt": "word word", "adapter": name} for name in ("a", None, "b", "c")]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    flags = ["--model", str(tiny_checkpoint), "--dtype", "float64", "--device", "cpu", "--raw", "--json"]
    flags += ["--max-tokens", "12", "--engine.kv_memory_mib", "4", "--ignore-eos"]
    loaded = [f"{name}={folder}" for name, folder in folders.items()]
    assert cli.main(["generate", *flags, "--input", str(prompts), "--adapters", *loaded]) == 1
    lines = {line["id"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert "no adapter 'c'; loaded are a, b" in lines["c"]["error"]
    for name in ("a", "b", None):
        merging = [] if name is None else ["--adapter", str(folders[name])]
        assert cli.main(["generate", *flags, *merging, "--prompt", "word word"]) == 0
        assert json.loads(capsys.readouterr().out)["token_ids"] == lines[str(name)]["token_ids"]
    assert len({tuple(lines[name]["token_ids"]) for name in ("a", "b", "None")}) == 3
    assert cli.main(["generate", *flags, "--input", str(prompts), "--adapters", *loaded, "--dry-run"]) == 1
    assert "prompt 'c': no adapter 'c'; loaded are a, b" in capsys.readouterr().err


@pytest.mark.slow
def test_the_real_model_in_float32(tmp_path: Path) -> None:
    """Two random adapters of rank 32 and none in one batch: the ids of the merged models, or a near tie."""
    prompts = {"a": "The capital of France is", "b": "def add(a, b):", None: "Once upon a time"}
    loaded = load_model("smollm2-135m", dtype=Dtype.FLOAT32)
    folders = {}
    for number, name in enumerate(("a", "b")):
        own = load_model("smollm2-135m", dtype=Dtype.FLOAT32).model
        config = {"r": 32, "lora_alpha": 64, "target_modules": "all-linear"}
        folders[name] = save_adapter(tmp_path / name, own, seed=number, spread=0.04, **config)
    engine = make_engine(loaded, kv_memory_mib=256)
    for name, folder in folders.items():
        engine.load_adapter(name, str(folder))
    requests = [
        Request(f"{name} {window}", tuple(loaded.tokenizer(text)["input_ids"]), DecodeParams(24, window), adapter=name)
        for name, text in prompts.items()
        for window in (1, 16)
    ]
    outputs = dict(zip([r.id for r in requests], engine.generate(requests), strict=True))
    base = decode_ar(loaded.model, requests[0].prompt_ids, 24)
    for name, text in prompts.items():
        model = load_model("smollm2-135m", dtype=Dtype.FLOAT32).model
        model = model if name is None else merged(model, folders[name])
        expected = decode_ar(model, tuple(loaded.tokenizer(text)["input_ids"]), 24)
        assert name != "a" or expected != base
        for window in (1, 16):
            assert list(outputs[f"{name} {window}"].token_ids) == expected, (name, window)


def test_known_pages_belong_to_an_adapter_and_not_to_its_name(tmp_path: Path) -> None:
    """One prompt, whose pages are known, under the base and two adapters; then a name goes to another adapter."""
    folders = {
        name: save_adapter(tmp_path / name, tiny_model("llama"), seed=number, **ALL_LINEAR)
        for number, name in enumerate("ab")
    }
    prompt = random_prompt(random.Random(5), 41)
    models = {None: tiny_model("llama"), **{name: merged(tiny_model("llama"), path) for name, path in folders.items()}}
    answers = {name: decode_ar(model, prompt, NUM_TOKENS) for name, model in models.items()}
    assert len({tuple(answer) for answer in answers.values()}) == 3
    engine = make_engine(tiny_loaded("llama"))
    for name, path in folders.items():
        engine.load_adapter(name, str(path))
    for turn in range(2):
        for name, answer in answers.items():
            [output] = engine.generate([request(f"{turn} {name}", prompt, name, 4)])
            assert list(output.token_ids) == answer
    assert engine.scheduler.num_hit_tokens == 3 * 32
    engine.unload_adapter("a")
    engine.load_adapter("a", str(folders["b"]))
    [output] = engine.generate([request("renamed", prompt, "a", 4)])
    assert list(output.token_ids) == answers["b"]
