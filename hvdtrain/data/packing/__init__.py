"""Making packed files, and looking at data."""
