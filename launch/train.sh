#!/usr/bin/env bash
# Sets everything up where that is not done yet, then trains; see -h.
set -euo pipefail
LAUNCH="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"

usage() {
    cat <<'END'
Usage: launch/train.sh [-np N] [--gloo | --mpi] [hvdtrain arguments...]

Runs launch/setup.sh, then horovodrun -np N python -m hvdtrain with the arguments:
  launch/train.sh                           the recipe digits on 2 ranks
  launch/train.sh -np 4 digits --epochs 3   4 ranks, 3 epochs
  launch/train.sh train --help              hvdtrain's own options

  -np N    number of ranks on this machine (default 2)
  --gloo   Horovod's controller. Without either, horovodrun takes MPI where
  --mpi    Horovod was built with it, else Gloo.
  -h       shows this
END
}

die() {
    printf 'train: %s\n' "$*" >&2
    exit 1
}

ranks=2
controller=()
while [ $# -gt 0 ]; do
    case "$1" in
    -np)
        [[ "${2:-}" =~ ^[1-9][0-9]*$ ]] || die "-np takes a number of ranks, as in -np 2; received: ${2:-nothing}"
        ranks="$2"
        shift 2
        ;;
    --gloo | --mpi)
        controller=("$1")
        shift
        ;;
    -h | --help)
        usage
        exit 0
        ;;
    *) break ;; # all from here on is hvdtrain's
    esac
done

"$LAUNCH/setup.sh"
# shellcheck source=/dev/null
. "$LAUNCH/../.venv/bin/activate"
exec horovodrun -np "$ranks" ${controller[@]+"${controller[@]}"} python -m hvdtrain "$@"
