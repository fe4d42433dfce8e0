"""Trajectories in, checkpoint out: consistency training with DeepSpeed."""
