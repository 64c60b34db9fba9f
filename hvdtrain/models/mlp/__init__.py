"""A wide multilayer perceptron."""
