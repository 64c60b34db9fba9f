"""Console, metrics, TensorBoard and plots."""
