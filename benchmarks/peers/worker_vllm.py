"""vLLM's offline engine as a worker, in its own environment (``setup_vllm``): bf16, no prefix cache, no text."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Flags, Served, TokenIds, read_flags, serve


@dataclass(frozen=True)
class Variant:
    """Settings to try.

    Attributes:
        enforce_eager: no compilation.
        has_own_process: the engine runs in processes of its own, as vLLM does by default, and not in the caller's.
        preloads_iomp: Intel's OpenMP, which vLLM's manual recommends, in place of GNU's.
    """

    enforce_eager: bool
    has_own_process: bool = True
    preloads_iomp: bool = False


VARIANTS = {
    "compiled": Variant(enforce_eager=False),
    "compiled-iomp": Variant(enforce_eager=False, preloads_iomp=True),
    "compiled-one-process": Variant(enforce_eager=False, has_own_process=False),
    "compiled-one-process-iomp": Variant(enforce_eager=False, has_own_process=False, preloads_iomp=True),
    "eager": Variant(enforce_eager=True),
    "eager-one-process": Variant(enforce_eager=True, has_own_process=False),
}
KV_MEMORY_GIB = 1
BLOCK_SIZE = 128


def load(flags: Flags, cores: list[int]) -> Served:
    """Load the model in bf16; ``cores`` are those that :func:`prepare` chose."""
    import vllm

    variant = VARIANTS[flags.variant]
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "enforce_eager": variant.enforce_eager,
        "block_size": BLOCK_SIZE,
        "enable_prefix_caching": False,
        "max_num_seqs": flags.max_batch_size,
        "max_model_len": flags.max_context,
    }
    llm = vllm.LLM(model=flags.model, skip_tokenizer_init=True, seed=0, **settings)

    def decode(prompts: TokenIds, max_tokens: int) -> TokenIds:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    described = {
        **settings,
        "kv_memory_gib": KV_MEMORY_GIB,
        "cores": cores,
        "has_own_process": variant.has_own_process,
        "preloads_iomp": variant.preloads_iomp,
    }
    return Served(vllm.__version__, described, decode)


def prepare(flags: Flags) -> list[int]:
    """Set the variables that vLLM and OpenMP read when they are loaded; with Intel's OpenMP, begin anew.

    Returns:
        The cores that the threads are bound to; later the process itself is bound, and sees one of them only.
    """
    variant = VARIANTS[flags.variant]
    numbers = sorted(os.sched_getaffinity(0))[: flags.num_threads]
    cores = ",".join(map(str, numbers))
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE=str(KV_MEMORY_GIB),
        VLLM_CPU_OMP_THREADS_BIND=cores,
        VLLM_ENABLE_V1_MULTIPROCESSING=str(int(variant.has_own_process)),
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_NO_USAGE_STATS="1",
    )
    if not variant.has_own_process:
        # What vLLM sets for its own processes.
        os.environ.update(
            GOMP_CPU_AFFINITY=cores,
            KMP_AFFINITY=f"granularity=fine,explicit,proclist=[{cores}]",
            KMP_BLOCKTIME="5",
            KMP_TPAUSE="0",
        )
    iomp = str(Path(sys.prefix) / "lib" / "libiomp5.so")
    if variant.preloads_iomp and os.environ.get("LD_PRELOAD") != iomp:
        os.environ["LD_PRELOAD"] = iomp
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.peers.worker_vllm", *sys.argv[1:]])
    return numbers


if __name__ == "__main__":
    flags = read_flags(tuple(VARIANTS))
    cores = prepare(flags)
    serve(lambda: load(flags, cores))
