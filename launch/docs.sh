#!/usr/bin/env bash
# Builds the site of docs/ into build/site, and fails at any warning or dead link.
#   launch/docs.sh && python -m http.server --directory build/site
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

launch/setup.sh
# shellcheck source=/dev/null
. .venv/bin/activate
launch/lib/overlay.sh docs -r launch/requirements-docs.txt -- \
    python -m sphinx -q --fail-on-warning --keep-going -c docs . build/site
cp build/site/README.html build/site/index.html
printf 'docs: build/site/index.html\n'
