"""jacobi-llm: collect Jacobi trajectories, train on them with DeepSpeed, serve with a batched Jacobi engine.

This umbrella package holds the version only; the rooms are ``jacobi_llm.data``, ``jacobi_llm.train``,
``jacobi_llm.infer`` and ``jacobi_llm.configs`` (folders of the same names at the root of the repository).
"""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
