"""Model families, by name."""
