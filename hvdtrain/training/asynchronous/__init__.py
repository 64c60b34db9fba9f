"""Asynchronous steps on workers, for the parameter-server backend; start with `step_factory.py`."""
