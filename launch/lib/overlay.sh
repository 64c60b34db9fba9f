#!/usr/bin/env bash
# launch/lib/overlay.sh NAME REQUIREMENT... -- COMMAND...: runs COMMAND with other packages in front of those that are
# installed in the active environment, which stays as it is. They are installed once, without what they depend on:
#   launch/lib/overlay.sh keras-3.14 'keras==3.14.*' -- python -m pytest tests/unit
#   launch/lib/overlay.sh keras-hub -r launch/requirements-keras-hub.txt -- python -m pytest tests/keras_hub
set -euo pipefail

overlay="${VIRTUAL_ENV:?activate the environment first}/hvdtrain/$1"
shift
requirements=()
while [ "${1:?a -- comes before the command}" != -- ]; do
    requirements+=("$1")
    shift
done
shift
if [ ! -d "$overlay" ]; then
    made="$(mktemp -d "$overlay.XXXXXX")"
    python -m pip install --quiet --no-deps --target "$made" "${requirements[@]}"
    mv -T "$made" "$overlay"
fi
PYTHONPATH="$overlay${PYTHONPATH:+:$PYTHONPATH}" exec "$@"
