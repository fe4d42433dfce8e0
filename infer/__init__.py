"""Requests in, tokens out: the batched Jacobi decoding engine."""
