#!/bin/bash
# Trains on the hosts of an LSF job, with jsrun where there is one, else with mpirun. Takes what python -m hvdtrain takes:
#   bsub -nnodes 4 -W 12:00 -wa USR1 -wt 2 -r -Q 75 launch/lsf.sh digits --epochs 90     where there is jsrun
#   bsub -n 32 -R "span[ptile=8]" ... launch/lsf.sh digits                               slots: a rank for each
# or, with the #BSUB lines below and the arguments in a variable:
#   ARGS="digits --epochs 90" bsub -n 32 < launch/lsf.sh
# RANKS is the number of ranks in all; with jsrun it is one a host without it.
# Two minutes before the time limit LSF sends SIGUSR1 (-wa, -wt): the ranks save a checkpoint and end with code 75, with
# which LSF queues the job again (-Q). It goes on from its newest checkpoint in --run-dir (default: runs/JOB_NAME-JOB_ID),
# which all hosts that rank 0 may run on must see.
#BSUB -J hvdtrain
#BSUB -W 01:00
#BSUB -wa USR1 -wt 2
#BSUB -r
#BSUB -Q 75
#BSUB -o %J.log

cd "${LS_SUBCWD:-.}" || exit 2
# module load gcc openmpi; source /path/to/.venv/bin/activate

[ $# -gt 0 ] || eval "set -- ${ARGS:-}"
case " $* " in
*" --run-dir"*) ;;
*) set -- "$@" --run-dir "runs/${LSB_JOBNAME:-hvdtrain}-$LSB_JOBID" ;;
esac
case " $* " in
*" --resume"*) ;;
*) set -- "$@" --resume auto ;;
esac

# Becomes jsrun or mpirun, with the hosts of this job.
python -m hvdtrain launch --run ${RANKS:+-np "$RANKS"} "$@" &
job=$!
killed=
trap 'kill -USR1 $job 2>/dev/null' USR1
trap 'killed=143; kill -USR1 $job 2>/dev/null' TERM

while true; do # a signal ends the wait, not the job
    wait $job
    code=$?
    kill -0 $job 2>/dev/null || break
done
# What bkill has ended is not queued again.
exit "${killed:-$code}"
