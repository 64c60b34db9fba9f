"""Functions that return a whole Config, by name."""
