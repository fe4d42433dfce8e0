"""The engines of the comparison: how each is started, which of its settings are tried, what is asked of ours."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.protocol import Flags
from benchmarks.peers.worker import Worker
from jacobi_llm.configs.errors import UsageError

OURS = "jacobi"
# The settings that are tried where none is chosen: which is the fastest depends on the machine.
VARIANTS = {
    "vllm": ("compiled", "compiled-iomp", "compiled-one-process", "compiled-one-process-iomp", "eager"),
    "transformers": ("dynamic", "static", "eager"),
}
ROW_TARGET = 1.45
_ROOT = Path(__file__).resolve().parents[2]


def parse_peers(words: Sequence[str]) -> dict[str, list[str]]:
    """Read ``vllm`` or ``vllm:compiled``; return the variants to try by peer.

    Raises:
        UsageError: an unknown peer. Unknown variants are refused by the worker.
    """
    peers: dict[str, list[str]] = {}
    for word in words:
        peer, _, variant = word.partition(":")
        if peer not in VARIANTS:
            raise UsageError(f"--peers: '{word}': no such peer; there are {', '.join(VARIANTS)}")
        peers.setdefault(peer, []).extend([variant] if variant else VARIANTS[peer])
    return peers


def target_of(peer: str, batch_size: int) -> float:
    """The least ratio of our speed to the peer's that the project has set itself."""
    if peer == "vllm":
        return 0.95 if batch_size == 1 else 0.9
    return 1.6


def find_vllm(folder: Path) -> Path:
    """Return the interpreter of the environment that ``setup_vllm`` made.

    Raises:
        UsageError: there is none.
    """
    python = folder / "bin" / "python"
    if not (folder / "installed").is_file() or not python.exists():
        raise UsageError(
            f"--vllm-env: no vLLM in {folder}; make it with benchmarks/peers/setup_vllm {folder}, "
            "or leave it out with --peers transformers"
        )
    return python


def start(engine: str, flags: Flags, vllm_env: Path) -> Worker:
    """Start one engine and wait until it is loaded; it sleeps then.

    Args:
        engine: ``jacobi`` or a peer.
        flags: for its worker.
        vllm_env: used by vLLM only.

    Raises:
        UsageError: no environment of vLLM.
        RunError: the engine does not start.
    """
    # What the person's shell says of threads is meant for other programs.
    environment = {**os.environ, "OMP_NUM_THREADS": str(flags.num_threads), "TOKENIZERS_PARALLELISM": "false"}
    python = sys.executable
    if engine == "vllm":
        python = str(find_vllm(vllm_env))
        environment["VLLM_CACHE_ROOT"] = str(vllm_env / "cache")
    command = [python, "-m", f"benchmarks.peers.worker_{engine}", *flags.as_arguments()]
    return Worker(f"{engine}:{flags.variant}", command, environment, _ROOT)
