"""Exact, fast and proved handoff of model checkpoints between PyTorch and MindSpore."""

__version__ = "0.1.0"
