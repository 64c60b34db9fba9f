#!/usr/bin/env bash
# launch/lib/keras.sh 3.14 COMMAND...: runs COMMAND with the newest Keras 3.14.x in front of the one that is installed in the
# active environment, which stays as it is.
set -euo pipefail

version="$1"
shift
overlay="${VIRTUAL_ENV:?activate the environment first}/hvdtrain/keras-$version"
if [ ! -d "$overlay" ]; then
    made="$(mktemp -d "$overlay.XXXXXX")"
    python -m pip install --quiet --no-deps --target "$made" "keras==$version.*"
    mv -T "$made" "$overlay"
fi
PYTHONPATH="$overlay${PYTHONPATH:+:$PYTHONPATH}" exec "$@"
