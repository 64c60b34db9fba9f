# shellcheck shell=bash
# To source, from bash or zsh: puts what launch/setup.sh installed on PATH.
#   source launch/env.sh && mpirun -np 2 python -m hvdtrain

_hvdtrain_bin="$(cd "$(dirname "${BASH_SOURCE[0]:-$0}")/.." && pwd)/.venv/bin"
case "$PATH" in
"$_hvdtrain_bin":*) ;;
*) export PATH="$_hvdtrain_bin:$PATH" ;;
esac
unset _hvdtrain_bin

# Open MPI refuses to run as root (in a container, say) unless it is told twice that this is meant.
if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
