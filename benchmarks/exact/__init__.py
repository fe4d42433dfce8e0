"""The exactness harness: every answer of the engine against a plain loop over transformers' model.

``python -m benchmarks.exactness`` runs it. One cell is a question (prompt, processors, stops, seed, adapter) decoded
with one window in one batch mix. What the engine does in many ways is done here in one plain way, a second time, and
without its code; only the dataclasses that say what is asked (``DecodeParams``, ``SamplingParams``) are shared.
"""
