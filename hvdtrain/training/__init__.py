"""The step, the state and the loop."""
