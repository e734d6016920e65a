"""MindSpore forwards that read a checkpoint in its own layout."""
