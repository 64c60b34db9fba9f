"""The trainer; start with `trainer.py`.

`core.py` builds model, optimizer and step and loads checkpoints into them, `fitting.py` is `fit`, `run.py` is one
training under way, `callbacks` is what happens between its steps, `step` compiles an optimizer step around the model's
own `train_step`, `update_rules` do everything after the backward pass, `evaluation` evaluates and predicts. May import
every room below it; `runs`, `bench` and `cli` import it.
"""
