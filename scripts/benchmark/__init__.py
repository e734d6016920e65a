"""The benchmark behind ``scripts/bench.py``: its inputs, baselines, rows, measurements and tables."""
