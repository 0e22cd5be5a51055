#!/usr/bin/env bash
#SBATCH --job-name=nanodepth
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x_%j.log
#
# A run on several machines, which goes on by itself after the time limit, preemption or the loss of a node. From the repository's folder:
#
#     sbatch --nodes=4 scripts/slurm.sh config/depth_3b.py --out_dir=/a/folder/that/all/nodes/see
#
# The arguments are train.py's. Ten minutes before the limit (--signal above; some clusters send it before preemption too) train.py saves and ends,
# and the job queues itself again. A lost node makes Slurm queue it again (--requeue). An error of the run itself ends the job, with its message in
# the log and a code that is not 0: it would come again.
set -uo pipefail

host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))   # not one for all, since two jobs may share a node
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=180   # seconds that newer versions of torchrun leave train.py after SIGTERM to save; older ones leave it 30

# On each node: torchrun ignores the signal, of which it would die, and its children, the processes of train.py, get it.
on_each_node='
trap "" USR1
torchrun "$@" &
trap "pkill -USR1 -P $!" USR1
while wait $!; code=$?; kill -0 $! 2> /dev/null; do :; done   # the signal ends the wait, not torchrun
exit $code'

stopped=
trap 'stopped=yes; kill -USR1 $!' USR1   # srun passes it on to the nodes
srun --kill-on-bad-exit=1 bash -c "$on_each_node" node --nnodes="$SLURM_NNODES" --nproc_per_node="$SLURM_GPUS_ON_NODE" \
    --rdzv_id="$SLURM_JOB_ID" --rdzv_backend=c10d --rdzv_endpoint="$host:$port" train.py "$@" --init_from=auto &
while wait $!; code=$?; kill -0 $! 2> /dev/null; do :; done
if [ "$stopped" ] && [ "$code" = 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
