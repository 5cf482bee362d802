"""Finds what goes wrong when several processes run a PyTorch training script, without running it."""

__version__ = "0.1.0"
