"""The trainer; start with `trainer.py`.

`step` compiles an optimizer step around the model's own `train_step`, `update_rules` do everything after the backward
pass, `loop` calls steps and hooks, `evaluation` evaluates and predicts. May import every room below it; `runs`, `bench`
and `cli` import it.
"""
