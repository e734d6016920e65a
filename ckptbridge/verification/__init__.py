"""Whether a handoff holds: weights bit for bit, logits on both real backends."""
