"""Run a user's elastic script, as a worker of an elastic job, and say how it ended.

Usage: horovodrun --host-discovery-script … python run_elastic.py SCRIPT ARGUMENT...
"""

import json
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from run_scripts import hash_of, serve_mnist


def main(script, *arguments):
    sys.path.insert(0, str(Path(script).parent))
    sys.argv = [script, *arguments]
    serve_mnist()
    names = runpy.run_path(script, run_name="__main__")
    hvd, state, model = names["hvd"], names["state"], names["model"]
    weights = model if isinstance(model, list) else model.weights
    line = {
        "rank": hvd.rank(),
        "sizes": state.sizes,
        "rates": [round(rate, 6) for rate in state.rates],
        "expected_rates": [round(names["rate_of_one"] * size, 6) for size in state.sizes],
        "weights": hash_of(weights),
    }
    sys.stdout.write(f"\nENDED {json.dumps(line)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
