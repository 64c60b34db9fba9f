"""The trainer; start with `trainer.py`.

`objective` defines losses and metrics, `step` compiles an optimizer step, `update_rules` do everything after the
backward pass, `loop` calls steps and hooks, `evaluation` evaluates and predicts. May import every room below it;
`runs`, `bench` and `cli` import it.
"""
