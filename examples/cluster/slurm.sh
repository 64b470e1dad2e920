#!/usr/bin/env bash
# A run on the nodes of a SLURM job: Ray on each of them, the driver on the first.
#
#   sbatch --nodes=2 examples/cluster/slurm.sh recipe=gsm8k_grpo trainer.default_local_dir=/shared/runs/first trainer.save_freq=20 ...
#
# Arguments are those of `burnish train`; nodes, workers and the cluster's address are filled in here. The run's folder has to be
# on a file system that all nodes mount. When the job's time is nearly over, or SLURM takes the nodes away, the run saves and ends,
# and the job is queued again and goes on from there. Before the first use: burnish in the same place on every node (BURNISH_ENV).
#
#SBATCH --job-name=burnish
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# To this script alone: workers that were ended too could not save.
#SBATCH --signal=B:TERM@600
set -euo pipefail

# What has burnish: an environment of Python's, or a module of your cluster's. With a container, put `srun --container-image=...`
# into `on` below, and run the driver through it too.
if [ -n "${BURNISH_ENV:-}" ]; then source "$BURNISH_ENV/bin/activate"; fi
workers=${WORKERS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
cpus=${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-8}}

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${nodes[0]}
on=(srun --overlap --nodes=1 --ntasks=1)

# The address by which the other nodes reach the first one: that of its name, unless the node itself takes its name for 127.0.1.1, else
# its first one. Where it has several networks, set HEAD_ADDRESS.
address=${HEAD_ADDRESS:-$("${on[@]}" --nodelist="$first" bash -c 'hostname --ip-address; hostname --all-ip-addresses' |
    tr ' ' '\n' | awk '/^[0-9.]+$/ && !/^127[.]/ && !found++')}
# Jobs that share a node must not meet.
port=$((20000 + SLURM_JOB_ID % 20000))
# One folder a job, on each node's own disk; the names of sockets in it must stay short.
scratch=/tmp/ray_$SLURM_JOB_ID
# The run is told by its arguments, not by another cluster's variable.
unset RAY_ADDRESS
# Only who knows the job's token may use its Ray; srun hands the variables to the nodes.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')

started=()
stop_ray() { kill "${started[@]}" 2>/dev/null || true; wait "${started[@]}" 2>/dev/null || true; }
trap stop_ray EXIT
"${on[@]}" --nodelist="$first" ray start --head --node-ip-address="$address" --port="$port" --num-cpus="$cpus" --temp-dir="$scratch" \
    --disable-usage-stats --block &
started+=($!)
for node in "${nodes[@]:1}"; do
    "${on[@]}" --nodelist="$node" ray start --address="$address:$port" --num-cpus="$cpus" --disable-usage-stats --block &
    started+=($!)
done

# Nodes take their time; the run itself refuses a cluster that is not there in full.
python - "$address:$port" "${#nodes[@]}" <<'PYTHON'
import sys, time
import ray

address, wanted = sys.argv[1], int(sys.argv[2])
deadline = time.monotonic() + 300
while True:
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
        alive = sum(node["Alive"] for node in ray.nodes())
    except (ConnectionError, RuntimeError):
        alive = 0
    if alive >= wanted:
        print(f"Ray at {address} has its {wanted} nodes.")
        break
    if time.monotonic() > deadline:
        sys.exit(f"Of the {wanted} nodes of the Ray cluster at {address} {alive} are there after five minutes.")
    time.sleep(1)
PYTHON

# By this time the run has saved and ended (docs/checkpoints.md). SLURM sets it; older versions of it do not.
if [ -z "${SLURM_JOB_END_TIME:-}" ]; then
    SLURM_JOB_END_TIME=$(date --date="$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e)" +%s 2>/dev/null || true)
fi
export SLURM_JOB_END_TIME

burnish train trainer.controller=ray trainer.nnodes="${#nodes[@]}" trainer.n_gpus_per_node="$workers" \
    ray_kwargs.ray_init.address="$address:$port" trainer.resume_mode=auto "$@" &
run=$!
ended_by_slurm=
trap 'ended_by_slurm=yes; kill -TERM $run' TERM
status=0
wait $run || status=$?
# A signal ends the first wait, not the run, which saves now.
while kill -0 $run 2>/dev/null; do status=0; wait $run || status=$?; done
echo "The run ended with status $status."
# 75: its time was over. After SLURM's own signal too, which comes when the time is nearly over: it saved, and is not finished.
# A job that was cancelled is not running any more, and stays cancelled.
if [ "$status" = 75 ] || { [ -n "$ended_by_slurm" ] && [ "$status" = 143 ]; }; then
    state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T 2>/dev/null || true)
    if [ "$state" = RUNNING ]; then scontrol requeue "$SLURM_JOB_ID"; fi
fi
exit "$status"
