"""`python -m hvdtrain`: hands the command line to the verbs."""

import sys

from hvdtrain.cli.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
