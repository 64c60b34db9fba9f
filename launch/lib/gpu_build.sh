#!/usr/bin/env bash
# Builds Horovod for GPUs into an environment on top of .venv, as python -m hvdtrain setup --gpu does it for a user, and
# loads it; two ranks then sum on the CPU. Called by launch/test.sh --gpu-build, in the activated .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

venv="$(mktemp -d "${TMPDIR:-/tmp}/gpu-build.XXXXXX")"
trap 'rm -rf "$venv"' EXIT
base="$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
python -m venv "$venv"
# shellcheck source=/dev/null
. "$venv/bin/activate"
echo "$base" >"$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
python -m pip install --quiet --no-deps "$(grep '^nvidia-nccl' launch/requirements-cuda.txt)"
HVDTRAIN_WHEELS="$venv/wheels" python -m hvdtrain setup --gpu
python - <<'END'
import horovod.tensorflow as hvd

print(f"loaded {hvd.__file__}")
assert hvd.nccl_built() and hvd.cuda_built(), "Horovod came out without NCCL or CUDA"
print(f"Horovod with NCCL {hvd.nccl_built()} and CUDA, compiled, linked and loaded")
END
