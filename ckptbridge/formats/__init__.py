"""What is on disk: readers that take headers only, writers that know every offset beforehand."""
