# Sourced by the run scripts: `launch` starts a training program, `run_python` an ordinary one.
# First argument `slurm`: through srun, one task per GPU, inside an allocation (sbatch or salloc).
# LAUNCH=echo shows the command without running it.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
if [[ -x "$root/.venv/bin/python" ]]; then
    export PATH="$root/.venv/bin:$PATH"
fi

under_slurm=no
if [[ "${1-}" == slurm ]]; then
    under_slurm=yes
    shift
fi

launch() {
    if [[ -n "${LAUNCH-}" ]]; then
        $LAUNCH "$@"
    elif [[ $under_slurm == yes ]]; then
        MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
        MASTER_PORT=${MASTER_PORT:-29500}
        export MASTER_ADDR MASTER_PORT
        srun --kill-on-bad-exit=1 python "$@"
    else
        deepspeed "$@"
    fi
}

run_python() {
    if [[ -n "${LAUNCH-}" ]]; then
        $LAUNCH "$@"
    elif [[ $under_slurm == yes ]]; then
        srun --ntasks 1 python "$@"
    else
        python "$@"
    fi
}
