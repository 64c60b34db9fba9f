"""Uses of a finished run: evaluation on other data, predictions, generated text; start with `predict.py`.

`evaluate.py`, `predict.py` and `generate.py` are what the verbs do on every rank; `loaded.py` is `hvdtrain.load_run`.
"""
