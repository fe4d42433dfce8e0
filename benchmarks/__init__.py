"""Measurements that need minutes: run from the root of the repository, results in ``benchmarks/results``."""
