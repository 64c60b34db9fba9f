"""A transformer with a mixture of experts in every other block."""
