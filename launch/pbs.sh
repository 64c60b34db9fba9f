#!/bin/bash
# Trains on the hosts of a PBS job. Takes what python -m hvdtrain takes, behind two dashes and the script:
#   qsub -l select=4:ncpus=32:mpiprocs=8:mem=64gb -l walltime=12:00:00 -- "$PWD/launch/pbs.sh" cifar10 --epochs 90
# or, with the #PBS lines below and the arguments in a variable:
#   ARGS="cifar10 --epochs 90" qsub -v ARGS launch/pbs.sh
# mpiprocs is the number of ranks on each host: one a GPU (ngpus), or one for a few cores.
# Two minutes before the time limit (WARN_SECONDS) the ranks save a checkpoint and end, and the job queues again. It goes
# on from its newest checkpoint in --run-dir (default: runs/JOB_NAME-JOB_ID), which all hosts that rank 0 may run on
# must see.
#PBS -N hvdtrain
#PBS -l select=2:ncpus=8:mpiprocs=2
#PBS -l walltime=01:00:00
#PBS -r y
#PBS -j oe

cd "${PBS_O_WORKDIR:-.}" || exit 2
# module load gcc openmpi; source /path/to/.venv/bin/activate

[ $# -gt 0 ] || eval "set -- ${ARGS:-}"
case " $* " in
*" --run-dir"*) ;;
*) set -- "$@" --run-dir "runs/${PBS_JOBNAME:-hvdtrain}-${PBS_JOBID%%.*}" ;;
esac
case " $* " in
*" --resume"*) ;;
*) set -- "$@" --resume auto ;;
esac

# Becomes mpiexec with the flags of the MPI on PATH and the hosts of this job.
python -m hvdtrain launch --run "$@" &
job=$!

# PBS sends SIGTERM at qdel, and nothing before the time limit. SIGUSR1 is what every mpiexec passes on at once.
deleted=
trap 'kill -USR1 $job 2>/dev/null' USR1
trap 'deleted=yes; kill -USR1 $job 2>/dev/null' TERM
limit=$(qstat -f "$PBS_JOBID" 2>/dev/null | sed -n 's/ *Resource_List.walltime = //p')
alarm=
if [ -n "$limit" ]; then
    IFS=: read -r hours minutes seconds <<<"$limit"
    rest=$((10#$hours * 3600 + 10#$minutes * 60 + 10#$seconds - ${WARN_SECONDS:-120}))
    (
        sleep $((rest > 0 ? rest : 0)) &
        trap 'kill $!' TERM
        wait $! && kill -USR1 $$
    ) &
    alarm=$!
fi

while true; do # a signal ends the wait, not the job
    wait $job
    code=$?
    kill -0 $job 2>/dev/null || break
done
[ -z "$alarm" ] || kill "$alarm" 2>/dev/null
# 75: saved, and to be continued. Where only operators may requeue a job, it is submitted again, for after this one.
if [ "$code" -eq 75 ] && [ -z "$deleted" ] && ! qrerun "$PBS_JOBID"; then
    ARGS=$(printf '%q ' "$@")
    export ARGS
    qsub -W "depend=afterany:$PBS_JOBID" -v ARGS -N "${PBS_JOBNAME:-hvdtrain}" -l walltime="${limit:-01:00:00}" "$0"
fi
exit "$code"
