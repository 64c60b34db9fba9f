"""One file for each kind of data, and what several of them share."""
