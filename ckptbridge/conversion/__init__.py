"""From one side to the other: the frozen plan, its execution, and the provenance."""
