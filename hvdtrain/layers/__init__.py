"""Layers that need the exchange."""
