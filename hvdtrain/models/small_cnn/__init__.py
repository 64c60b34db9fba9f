"""A small convolutional network for small images."""
