"""Steps that workers take at their own pace, for the parameter server backend; start with `step_factory.py`."""
