"""The verbs of `python -m hvdtrain`, one file each."""
