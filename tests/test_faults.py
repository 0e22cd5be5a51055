"""
The fault test: a run on two processes is killed again and again, and ends as if nothing had happened. The job script for Slurm, with stand-ins for its
commands: the signal before the time limit stops the run, which goes on when the job is queued again.

    python -m pytest -m slow -n 0 -s tests/test_faults.py
"""
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from conftest import evaluations, losses, same_state, tiny_run

import checkpoint
import train
from configurator import ROOT

KILLS, STEPS, SAVE = 20, 260, 5


def start(argv, output):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", train.__file__, *argv, "--init_from=auto"]
    return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def children(pid):
    """Process ids of torchrun's workers, by their parent in /proc."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                parent = file.read().rpartition(")")[2].split()[1]
        except OSError:  # it has ended meanwhile
            continue
        if int(parent) == pid:
            found.append(int(name))
    return found


def last_step(log):
    try:
        return max(losses(log.parent), default=0)
    except (OSError, ValueError):  # not there yet, or half a line
        return 0


def saved_step(out):
    return checkpoint.load(out / "ckpt_last.pt")["step"] if (out / "ckpt_last.pt").exists() else 0


def file_number(log):
    return log.stat().st_ino if log.exists() else 0


def kill(job, whole):
    """SIGKILL to one worker, whose end torchrun must notice, or to torchrun and both workers, as when the machine fails."""
    workers = children(job.pid)
    for pid in [job.pid, *workers] if whole else [random.choice(workers)]:
        os.kill(pid, signal.SIGKILL)
    assert job.wait(timeout=60) != 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_that_is_killed_twenty_times_ends_like_the_unbroken_one(corpus, tmp_path):
    options = ["--batch_size=4", "--global_batch_size=16", f"--max_iters={STEPS}", "--eval_interval=25", f"--save_interval={SAVE}",
               "--connector=denseformer", "--depth=depth_attention"]
    with open(tmp_path / "output.txt", "w") as output:
        assert start([*tiny_run(corpus, tmp_path / "unbroken"), *options], output).wait(timeout=300) == 0
        out, lost, survived = tmp_path / "killed", 0, []
        log = out / "log.jsonl"
        argv = [*tiny_run(corpus, out), *options]
        for number in range(KILLS):
            saved, before = saved_step(out), file_number(log)
            target = saved + random.randint(1, (STEPS - saved) // (KILLS - number))
            job = start(argv, output)
            while file_number(log) == before or last_step(log) < target:  # a run that resumes writes the log anew
                assert job.poll() is None, (tmp_path / "output.txt").read_text()
                time.sleep(0.01)
            time.sleep(random.uniform(0, 0.05))  # anywhere in a step, a checkpoint or an evaluation
            kill(job, whole=number % 2 == 0)
            survived.append(last_step(log))
            lost += survived[-1] - saved_step(out)
        assert start(argv, output).wait(timeout=300) == 0
    a, b = (checkpoint.load(folder / "ckpt_last.pt") for folder in (out, tmp_path / "unbroken"))
    difference = max((a["model"][key] - b["model"][key]).abs().max().item() for key in b["model"])
    print(f"\n{len(survived)} kills survived, at steps {survived}; {lost} steps made again; "
          f"largest difference of a weight to the unbroken run: {difference}")
    assert losses(out) == losses(tmp_path / "unbroken") and evaluations(out) == evaluations(tmp_path / "unbroken")
    for name in ("ckpt_last.pt", "ckpt_best.pt"):
        assert same_state(out / name, tmp_path / "unbroken" / name)


# Stand-ins for Slurm's commands on a cluster of one node: srun runs the command in its place, so that signals to srun reach what it runs.
COMMANDS = {"srun": 'shift; exec "$@"', "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
            "scontrol": 'if [ "$1" = requeue ]; then echo "$2" >> "$REQUEUED"; else echo 127.0.0.1; fi'}


@pytest.mark.slow
def test_the_slurm_script_saves_before_the_limit_queues_itself_again_and_resumes(corpus, tmp_path):
    for name, text in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    requeued, out = tmp_path / "requeued", tmp_path / "out"
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "1",
                                "SLURM_JOB_NODELIST": "node1", "SLURM_GPUS_ON_NODE": "2", "REQUEUED": str(requeued)}
    argv = [*tiny_run(corpus, out), "--batch_size=4", "--max_iters=400", "--eval_interval=400"]

    def submit(*more):
        return subprocess.Popen(["bash", ROOT / "scripts/slurm.sh", *argv, *more], cwd=ROOT, env=environment, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True)
    job = submit()
    while last_step(out / "log.jsonl") < 20:
        assert job.poll() is None, job.stdout.read()
        time.sleep(0.01)
    job.send_signal(signal.SIGUSR1)
    printed, _ = job.communicate(timeout=60)
    step = saved_step(out)
    assert job.returncode == 0 and f"Stopped by SIGUSR1 after step {step}, saved" in printed, printed
    assert 20 <= step < 400 and requeued.read_text() == f"{os.getpid()}\n"
    job = submit()
    printed, _ = job.communicate(timeout=60)
    assert job.returncode == 0 and f"Resuming after step {step}." in printed and saved_step(out) == 400, printed
    assert sorted(losses(out)) == list(range(1, 401)) and requeued.read_text() == f"{os.getpid()}\n"  # it is done: not queued again
    job = submit("--n_layer=3")  # a mistake is not tried again either
    printed, _ = job.communicate(timeout=60)
    assert job.returncode != 0 and "n_layer is 2 in the checkpoint, 3 now" in printed and requeued.read_text() == f"{os.getpid()}\n", printed
