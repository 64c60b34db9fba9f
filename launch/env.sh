# shellcheck shell=bash
# To source, from bash or zsh: the same as source .venv/bin/activate, from any folder.
#   source launch/env.sh && mpirun -np 2 python -m hvdtrain

# shellcheck source=/dev/null
. "$(cd "$(dirname "${BASH_SOURCE[0]:-$0}")/.." && pwd)/.venv/bin/activate"
