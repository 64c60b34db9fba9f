"""The trainer and what it is composed of; start with `trainer.py`.

`objective` says what is minimized and measured, `step` compiles one optimizer step, `update_rules` own what follows the
backward pass, `loop` calls steps and hooks, `evaluation` evaluates and predicts. May import every room below it;
`runs`, `bench` and `cli` import it.
"""
