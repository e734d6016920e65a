"""How a side is loaded and run."""
