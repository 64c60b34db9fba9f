"""Recommendation from numbers and categories: embedding tables and their dot products."""
