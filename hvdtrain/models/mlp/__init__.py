"""Wide multilayer perceptrons."""
