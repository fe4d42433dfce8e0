"""Compiles and loads the project's C++ operators (infer/csrc), once per machine and torch version.

Plain g++ and torch's own headers; the result lies in the user's cache.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from filelock import FileLock

from jacobi_llm.configs.errors import RunError
from jacobi_llm.infer.embedded import cache_dir

SOURCE = Path(__file__).parent / "csrc" / "operators.cpp"
FLAGS = (
    *("-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-std=c++20", "-fPIC", "-shared"),
    *(("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()),
)


def compiler() -> str | None:
    """The C++ compiler: ``$CXX``, or g++ when it is there."""
    return shutil.which(os.environ.get("CXX", "g++"))


@functools.cache
def load_operators() -> None:
    """Make ``torch.ops.jacobi_llm`` available; compiles on first use (about 10 seconds).

    Raises:
        RunError: no compiler, or it fails.
    """
    command = _find_compiler()
    target = cache_dir() / "operators" / f"{_fingerprint(command)}.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_suffix(".lock")):
        if not target.exists():
            _compile(command, target)
    torch.ops.load_library(str(target))
    torch.library.register_fake("jacobi_llm::attend", _fake_attend)
    torch.library.register_fake("jacobi_llm::linear", _fake_linear)


def _fake_attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def _fake_linear(input_: torch.Tensor, projection: int, out_features: int) -> torch.Tensor:
    return input_.new_empty(*input_.shape[:-1], out_features)


def operators_fingerprint() -> str:
    """What the compiled operators, and programs that call them, depend on: source, flags, compiler, torch, processor.

    Raises:
        RunError: no compiler.
    """
    return _fingerprint(_find_compiler())


def _find_compiler() -> str:
    command = compiler()
    if command is None:
        raise RunError("no C++ compiler found for the native operators; install g++ or use --engine.attention sdpa")
    return command


@functools.cache
def _fingerprint(command: str) -> str:
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=False).stdout
    parts = (SOURCE.read_text(encoding="utf-8"), " ".join(FLAGS), version, torch.__version__, _cpu_name())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu_name() -> str:
    """Model and instruction sets, since -march=native looks at both."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _compile(command: str, target: Path) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    print("compiling the native operators (once, about 10 seconds)", file=sys.stderr, flush=True)
    partial = target.with_suffix(f".{os.getpid()}.tmp")
    flags = [
        *FLAGS,
        *(f"-I{path}" for path in include_paths()),
        *(f"-L{path}" for path in library_paths()),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    libraries = ("-ltorch", "-ltorch_cpu", "-lc10")
    done = subprocess.run(
        [command, *flags, str(SOURCE), "-o", str(partial), *libraries], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        partial.unlink(missing_ok=True)
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:300])
        raise RunError(f"the native operators do not compile ({first})")
    os.replace(partial, target)
