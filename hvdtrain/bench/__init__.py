"""The engine of `python -m hvdtrain bench`: what is measured, how, and what is made of it."""
