"""
What a run of train.py tells about itself: the first line of its log, wandb, and a sample of what the trained model writes. None of it is training.
"""
import importlib.util
import inspect
import os
import platform
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import numpy
import torch

import configurator
from data.tokenizer import tokenizer_from_meta


def describe(c, model, ranks):
    """The log's first line: everything that is needed to make the run again."""
    def git(*args):
        result = subprocess.run(["git", "-C", configurator.ROOT, *args], capture_output=True, text=True) if shutil.which("git") else None
        return result.stdout.strip() if result and result.returncode == 0 else ""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__, "cuda": torch.version.cuda}
    changes = "+changes" * bool(git("status", "--porcelain", "--untracked-files=no"))
    return {"config": c.as_dict(), "versions": versions, "git": git("rev-parse", "HEAD") + changes, "device": device_name(ranks.device),
            "world_size": ranks.world_size, "n_params": model.num_params(), "n_params_without_embedding": model.num_params(embedding=False)}


def device_name(device):
    """The device's model, such as NVIDIA H200; of a CPU what the system says."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def open_wandb(c, header):
    """A function (line) -> None that sends a log line to wandb. Whatever is missing costs one warning: never a prompt, never the run."""
    def nothing(line):
        pass
    if not c.wandb_log:
        return nothing
    if importlib.util.find_spec("wandb") is None:
        print("warning: --wandb_log=True, but wandb is not installed (pip install wandb); the run logs to log.jsonl alone.", file=sys.stderr)
        return nothing
    try:
        import wandb
        mode = os.environ.get("WANDB_MODE", "online")
        asks = "prompt" in inspect.signature(wandb.login).parameters  # else an older version, whose client knows
        if mode == "online" and not (wandb.login(prompt=False, verify=False) if asks else wandb.api.api_key):
            print("warning: wandb is not logged in (wandb login); this run is kept offline, `wandb sync` sends it later.", file=sys.stderr)
            mode = "offline"
        id_file = Path(c.out_dir) / "wandb_id.txt"  # a resumed run continues its curve
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:8])
        name = c.wandb_run_name or Path(c.out_dir).resolve().name
        run = wandb.init(project=c.wandb_project, name=name, id=id_file.read_text(), resume="allow", mode=mode, dir=c.out_dir, config=header,
                         settings=wandb.Settings(init_timeout=60, console="off"))
    except Exception as error:  # wandb's ways of failing are its own, and none is worth the run
        text = " ".join(str(error).split())
        print(f"warning: wandb did not start ({type(error).__name__}: {text}); the run logs to log.jsonl alone.", file=sys.stderr)
        return nothing
    return lambda line: run.log({name: value for name, value in line.items() if value is not None}, step=line["step"])


def print_sample(c, ranks, model, data):
    """Prints sample_tokens tokens that the trained model writes after sample_start. data: as checkpoints have it."""
    try:
        tokenizer = tokenizer_from_meta(data["tokenizer"])
        ids = tokenizer.encode(c.sample_start) or [tokenizer.eot or 0]
    except ValueError as error:
        return print(f"No sample: {error}")
    generator = torch.Generator(ranks.device).manual_seed(c.seed)
    prompt = torch.tensor([ids], device=ranks.device)
    out = model.generate(prompt, c.sample_tokens, temperature=0.8, top_k=50, generator=generator, stop_token=tokenizer.eot)
    print(f"{'-' * 40} a sample\n{tokenizer.decode(out[0].tolist())}\n{'-' * 40}", flush=True)
