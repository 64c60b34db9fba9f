"""`python -m hvdtrain`: hands the command line to the verbs."""

import sys

from hvdtrain.cli.main import run

if __name__ == "__main__":
    sys.exit(run())
