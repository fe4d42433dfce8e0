"""Plain decoding against vLLM and transformers: the same prompts, the same machine, taking turns.

    benchmarks/peers/setup_vllm            once: vLLM in an environment of its own
    python -m benchmarks.peers.run         from the root of the repository

``protocol`` and the ``worker_*`` modules run inside an engine's environment and must not import jacobi_llm (but for
our own worker); the other modules are the comparison's own.
"""
