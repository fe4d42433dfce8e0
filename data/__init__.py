"""Prompts in, Jacobi trajectories out."""
