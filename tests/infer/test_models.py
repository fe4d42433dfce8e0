"""Model names, refusals, and what a loaded model says of itself (field case C05)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig

from jacobi_llm.configs.errors import RunError, UsageError
from jacobi_llm.configs.schema import Dtype
from jacobi_llm.infer import models
from jacobi_llm.infer.models import check_supported, load_model, load_tokenizer, max_context, resolve_model
from tests.tiny_models import EOS_TOKEN_IDS, FAMILIES, MAX_CONTEXT, tiny_model, tiny_tokenizer


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """Return a copy that the test may damage."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_loads_a_folder(tiny_checkpoint: Path) -> None:
    loaded = load_model(str(tiny_checkpoint), dtype=Dtype.FLOAT64)
    assert loaded.model.dtype == torch.float64
    assert not loaded.model.training
    assert loaded.model.config._attn_implementation == "sdpa"
    assert loaded.eos_token_ids == EOS_TOKEN_IDS
    assert loaded.max_context == MAX_CONTEXT
    assert loaded.name == loaded.path == str(tiny_checkpoint)


def test_eos_ids_are_the_union_of_both_configs(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", eos_token_id=5)
    edit_json(checkpoint / "generation_config.json", eos_token_id=[2, 0])
    assert load_model(str(checkpoint), dtype=Dtype.FLOAT32).eos_token_ids == (0, 2, 5)


def test_context_falls_back_to_the_tokenizer() -> None:
    tokenizer = tiny_tokenizer()
    assert max_context(PretrainedConfig(), tokenizer) == MAX_CONTEXT
    tokenizer.model_max_length = 10**30
    assert max_context(PretrainedConfig(), tokenizer) == 2048


@pytest.mark.parametrize("name", ["./none", "/no/such/folder", "a/b/c", "two words", "", "..", "-x", "a--b"])
def test_a_name_that_is_nothing(name: str) -> None:
    with pytest.raises(UsageError, match="smollm2-135m"):
        resolve_model(name)


def test_the_hub_is_asked_once_and_not_for_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def no_network(self: object, repo_id: str, **_: object) -> None:
        asked.append(repo_id)
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", no_network)
    with pytest.raises(UsageError, match="hub cannot be reached") as caught:
        load_model("nobody/no-such-model", dtype=Dtype.FLOAT32)
    assert asked == ["nobody/no-such-model"]
    assert len(caught.value.faults) == 1


def test_folders_that_hold_something_else(tmp_path: Path, tiny_checkpoint: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match="LoRA adapter"):
        resolve_model(str(tmp_path))
    with pytest.raises(UsageError, match="a file, not a folder"):
        resolve_model(str(tiny_checkpoint / "config.json"))


def test_pickled_weights_are_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="no weights found"):
        load_model(str(checkpoint), dtype=Dtype.FLOAT32)
    torch.save({}, checkpoint / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"pytorch_model\.bin.*safetensors"):
        load_model(str(checkpoint), dtype=Dtype.FLOAT32)


def test_damaged_files_are_one_line(checkpoint: Path) -> None:
    weights = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(RunError, match="cannot be loaded"):
        load_model(str(checkpoint), dtype=Dtype.FLOAT32)
    (checkpoint / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match="tokenizer"):
        load_tokenizer(str(checkpoint))
    edit_json(checkpoint / "config.json", hidden_size="wide")
    with pytest.raises(UsageError, match=r"config\.json"):
        load_model(str(checkpoint), dtype=Dtype.FLOAT32)
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json"):
        load_model(str(checkpoint), dtype=Dtype.FLOAT32)


def test_a_checkpoint_without_a_tokenizer(checkpoint: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (checkpoint / file).unlink(missing_ok=True)
    with pytest.raises(UsageError, match="tokenizer"):
        load_tokenizer(str(checkpoint))


def test_the_jinja_file_wins(checkpoint: Path) -> None:
    config = checkpoint / "tokenizer_config.json"
    (checkpoint / "chat_template.jinja").unlink()
    assert load_tokenizer(str(checkpoint)).chat_template is None
    edit_json(config, chat_template="from the config")
    assert load_tokenizer(str(checkpoint)).chat_template == "from the config"
    (checkpoint / "chat_template.jinja").write_text("from the file")
    assert load_tokenizer(str(checkpoint)).chat_template == "from the file"


@pytest.mark.parametrize("family", FAMILIES)
def test_tested_families_are_supported(family: str) -> None:
    check_supported(tiny_model(family).config)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("falcon", "ALiBi"),
        ("bloom", "ALiBi"),
        ("mpt", "ALiBi"),
        ("deepseek_v2", "latent"),
        ("deepseek_v3", "latent"),
        ("longcat_flash", "latent"),
        ("deepseek_v32", "learned index"),
        ("gpt_oss", "sinks"),
        ("mamba", "recurrent"),
        ("mamba2", "recurrent"),
        ("rwkv", "recurrent"),
        ("jamba", "recurrent"),
        ("bamba", "recurrent"),
        ("zamba2", "recurrent"),
        ("recurrent_gemma", "recurrent"),
        ("qwen3_next", "recurrent"),
        ("lfm2", "recurrent"),
        ("llama4_text", "chunked"),
        ("t5", "encoder-decoder"),
        ("bart", "encoder-decoder"),
        ("bert", "not causal"),
        ("gpt_neo", "attention interface"),
        ("vit", "not a causal language model"),
    ],
)
def test_unsupported_families_are_refused_by_name(family: str, reason: str) -> None:
    with pytest.raises(UsageError, match=rf"'{family}' is not supported: .*{reason}"):
        check_supported(AutoConfig.for_model(family))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_scaling_that_depends_on_the_batch_is_refused(kind: str) -> None:
    config = AutoConfig.for_model("llama")
    config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(UsageError, match=kind):
        check_supported(config)


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_rope_scaling_that_does_not_is_fine(kind: str) -> None:
    config = AutoConfig.for_model("llama")
    config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    check_supported(config)


def test_an_adapter_is_merged(tiny_checkpoint: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = tiny_model("llama", torch.float32)
    tuned = get_peft_model(base, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    tuned.save_pretrained(tmp_path)
    ids = torch.arange(10, 20)[None]
    with torch.no_grad():
        expected = tuned.eval()(input_ids=ids).logits
        merged = load_model(str(tiny_checkpoint), dtype=Dtype.FLOAT32, adapter=str(tmp_path)).model
        plain = load_model(str(tiny_checkpoint), dtype=Dtype.FLOAT32).model
        assert torch.allclose(merged(input_ids=ids).logits, expected, atol=1e-4)
        assert not torch.allclose(plain(input_ids=ids).logits, expected, atol=1e-2)
    assert not any("lora" in name for name, _ in merged.named_parameters())


def test_adapters_that_are_none(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        load_model(str(tiny_checkpoint), dtype=Dtype.FLOAT32, adapter=str(tmp_path / "none"))
    with pytest.raises(UsageError, match="adapter_config"):
        load_model(str(tiny_checkpoint), dtype=Dtype.FLOAT32, adapter=str(tmp_path))


def test_an_adapter_of_another_model(tiny_checkpoint: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    other = tiny_model("llama", torch.float32, hidden_size=16)
    get_peft_model(other, LoraConfig(target_modules="all-linear")).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="does not fit the model"):
        load_model(str(tiny_checkpoint), dtype=Dtype.FLOAT32, adapter=str(tmp_path))


def test_nothing_is_written_to_standard_output(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_model(str(tiny_checkpoint), dtype=Dtype.BFLOAT16)
    assert capsys.readouterr() == ("", "")


def test_long_errors_become_one_line() -> None:
    assert models._one_line(ValueError("first\nsecond")) == "first"
    assert len(models._one_line(ValueError("x" * 999))) == 300
    assert models._one_line(KeyError()) == "KeyError"
