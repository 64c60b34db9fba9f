"""A transformer that sees tokens on both sides, for masked language modelling."""
