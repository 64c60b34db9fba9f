"""Training on backends whose workers take steps without waiting for one another."""
