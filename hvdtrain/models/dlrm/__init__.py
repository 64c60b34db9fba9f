"""DLRM, a recommendation model: embedding tables and pairwise dot products."""
