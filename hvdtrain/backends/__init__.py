"""Who distributes the training loop."""
