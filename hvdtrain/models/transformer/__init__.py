"""A decoder-only transformer for causal language modelling."""
