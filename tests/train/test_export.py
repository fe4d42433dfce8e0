"""What a run leaves behind: a folder that plain transformers loads, and with LoRA an adapter that peft loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from jacobi_llm.configs.checkpoint import load_checkpoint_config
from jacobi_llm.configs.errors import RunError
from jacobi_llm.train import cli
from jacobi_llm.train import export as export_module
from tests.tiny_models import CHAT_TEMPLATE, save_tiny_checkpoint
from tests.train.runs import settings_for, train

PROBE = torch.arange(3, 40)[None]
STAGES = ("zero0", "zero1", "zero2", "zero3", "zero3-offload")


@pytest.fixture(scope="module")
def tied_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("tied") / "tiny-tied", "qwen2", tie_word_embeddings=True)


def stored_names(folder: Path) -> set[str]:
    with safe_open(str(folder / "model.safetensors"), "pt") as file:
        return set(file.keys())


def load_plainly(folder: Path) -> tuple[Any, dict[str, Any]]:
    model, info = AutoModelForCausalLM.from_pretrained(str(folder), dtype="auto", output_loading_info=True)
    return model.eval(), info


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(PROBE, use_cache=False).logits
    return logits


@pytest.mark.parametrize("stage", STAGES)
def test_field_cases_c01_c02_c03_every_stage_exports_the_same_whole_model(
    tied_checkpoint: Path, tiny_checkpoint: Path, data: Path, tmp_path: Path, stage: str
) -> None:
    """No tensor is empty or missing (C01); shared tensors are stored once, others all (C02, C03)."""
    for base, is_tied in ((tied_checkpoint, True), (tiny_checkpoint, False)):
        output = tmp_path / base.name
        assert train(settings_for(base, data, output, train__max_steps=1, train__deepspeed=stage)) == 0
        model, info = load_plainly(output / "final")
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert not info["mismatched_keys"]
        assert stored_names(output / "final") == stored_names(base)
        assert ("lm_head.weight" in stored_names(output / "final")) is not is_tied
        config = json.loads((output / "final" / "config.json").read_text())
        assert config["tie_word_embeddings"] is is_tied
        original = AutoModelForCausalLM.from_pretrained(str(base), dtype="auto").eval()
        for name, parameter in model.named_parameters():
            assert parameter.shape == original.get_parameter(name).shape
            assert not torch.equal(parameter, original.get_parameter(name)), f"{name} was not trained"
        # One update of AdamW moves every weight by about the learning rate.
        assert max((p - original.get_parameter(n)).abs().max() for n, p in model.named_parameters()) < 2e-3


def test_the_folder_has_all_that_an_engine_reads(unbroken: Path, tiny_checkpoint: Path) -> None:
    final = unbroken / "final"
    assert sorted(path.name for path in final.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "jacobi_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = json.loads((final / "config.json").read_text())
    assert config == {**json.loads((tiny_checkpoint / "config.json").read_text()), "use_cache": True}
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert json.loads((final / "generation_config.json").read_text())["eos_token_id"] == [0, 2]
    tokenizer = AutoTokenizer.from_pretrained(str(final))
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(str(tiny_checkpoint)).get_vocab()
    about = load_checkpoint_config(final)
    assert about is not None
    assert (about.mode, about.window, about.objective) == ("merged", 8, "jacobi-forcing")
    assert about.tokens_trained > 0
    assert all(str(unbroken) not in path.read_text(errors="ignore") for path in final.glob("*.json"))


def test_field_case_c06_the_tokenizer_class_is_one_that_both_majors_know(unbroken: Path) -> None:
    settings = json.loads((unbroken / "final" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"


@pytest.mark.parametrize("stage", ["zero0", "zero3"])
def test_the_adapter_equals_the_merged_model(
    tied_checkpoint: Path, data: Path, tmp_path: Path, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_for(
        tied_checkpoint, data, tmp_path / "run", train__max_steps=3, train__deepspeed=stage, train__tune="lora"
    )
    assert train({**settings, "lora.rank": 4, "train.lr": 0.01}) == 0
    assert "Loading weights" not in capsys.readouterr().err
    adapter, final = tmp_path / "run" / "adapter", tmp_path / "run" / "final"
    assert sorted(path.name for path in adapter.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "jacobi_config.json",
    ]
    text = (adapter / "adapter_config.json").read_text()
    assert str(tied_checkpoint.parent) not in text
    assert json.loads(text)["base_model_name_or_path"] == tied_checkpoint.name
    merged, info = load_plainly(final)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    base = AutoModelForCausalLM.from_pretrained(str(tied_checkpoint), dtype="auto").eval()
    without = logits_of(base)
    with_adapter = logits_of(PeftModel.from_pretrained(base, str(adapter)).eval())
    assert torch.allclose(with_adapter, logits_of(merged), atol=1e-4)
    assert (with_adapter - without).abs().max() > 1e-2
    assert stored_names(final) == stored_names(tied_checkpoint)


def test_merge_writes_the_same_folder_again(
    tiny_checkpoint: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    assert train({**settings_for(tiny_checkpoint, data, output, train__max_steps=1), "train.tune": "lora"}) == 0
    weights = (output / "final" / "model.safetensors").read_bytes()
    (output / "final" / "model.safetensors").unlink()
    capsys.readouterr()
    assert cli.main(["merge", "--output", str(output), "--dtype", "float32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"output": str(output / "final")}
    assert (output / "final" / "model.safetensors").read_bytes() == weights


def test_merge_without_an_adapter_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["merge", "--output", str(tmp_path)]) == 2
    assert "no adapter of ours here" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_a_run_error_and_the_old_one_stays(tmp_path: Path) -> None:
    target = tmp_path / "final"
    target.mkdir()
    (target / "kept").touch()

    def write_half() -> None:
        with export_module._replaced(target) as temporary:
            (temporary / "half").touch()
            raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match="final: not written"):
        write_half()
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert (target / "kept").exists()


def test_a_folder_that_does_not_load_as_saved_is_refused(unbroken: Path) -> None:
    model, _ = load_plainly(unbroken / "final")
    weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    export_module._check_loads(unbroken / "final", weights)
    weights["model.norm.weight"][3] += 1
    with pytest.raises(RunError, match=r"tensor model.norm.weight is not what was saved"):
        export_module._check_loads(unbroken / "final", weights)
