"""The trainer; start with `trainer.py`.

`step` compiles an optimizer step around the model's own `train_step`, `update_rules` do everything after the backward
pass, `run.py` is one training under way, `callbacks` is what happens between its steps, `evaluation` evaluates and
predicts. May import every room below it; `runs`, `bench` and `cli` import it.
"""
