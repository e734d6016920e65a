"""What a mapping table means; knows nothing of files that hold tensors."""
