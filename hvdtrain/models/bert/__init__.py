"""A bidirectional transformer for masked language modelling."""
