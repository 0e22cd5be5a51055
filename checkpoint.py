"""
The folder of a run. Its checkpoints survive a crash at any moment: a file is either the old one or the new one, never half of one.

    out_dir/ckpt_last.pt         where the run stands; --init_from=resume continues from it
    out_dir/ckpt_best.pt         where the validation loss was lowest
    out_dir/ckpt_00005000.pt     numbered copies, if the run keeps them
    out_dir/log.jsonl            one JSON object a line: first the run's description, then updates (train_loss) and evaluations (val_loss)

A checkpoint is a dict of plain values and tensors (torch.load with weights_only=True reads it) with the keys
    model           state dict on the unwrapped model's names: no 'module.' of DDP, no '_orig_mod.' of torch.compile
    optimizer       AdamW's state dict, the same for any number of ranks, also after --zero1
    scaler          GradScaler's state dict (empty unless float16)
    step            optimizer steps done; with the seed, this is the whole position in the data
    best_val_loss   lowest validation loss so far, nats per token
    config          every option of the run, the model's fields resolved
    rng             {'torch': state, 'cuda': state if on CUDA}: equal on all ranks, since no rank draws numbers of its own
    data            what meta.json said: {'vocab_size', 'tokenizer', 'bytes'}; enough to sample without the shards
"""
import dataclasses
import fcntl
import itertools
import json
import os
import shutil
from pathlib import Path

import torch

import configurator
from data.shards import write_atomically
from model import GPT, GPTConfig

TYPES = {"model": dict, "optimizer": dict, "scaler": dict, "step": int, "best_val_loss": float, "config": dict, "rng": dict, "data": dict}
KEYS = tuple(TYPES)


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; the text says which file, why and what to do."""


def save(path, checkpoint):
    """
    Writes a checkpoint so that a crash at any moment leaves the old file or the new one: temporary name in the same folder, fsync,
    rename, fsync of the folder. Raises CheckpointError if it cannot be written; the file that was there before is then untouched.
    """
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")  # one writer a folder, so a leftover of a killed one is simply overwritten
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        _rename(temporary, path)
    except (OSError, RuntimeError) as error:  # torch reports a failed write of its own as a RuntimeError
        temporary.unlink(missing_ok=True)
        cause = error if isinstance(error, OSError) else error.__context__ or error
        kept = "the checkpoint that was there is untouched" if path.exists() else "no checkpoint of that name existed before"
        raise CheckpointError(f"could not write {path} ({_first_line(cause)}): {kept}. Free space, then continue with --init_from=auto.") from error


def copy(source, target):
    """Gives a finished checkpoint a second name, atomically: a hard link where the file system has them, else a copy."""
    source, target = Path(source), Path(target)
    temporary = target.with_name(target.name + ".tmp")
    temporary.unlink(missing_ok=True)
    try:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
        _rename(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"could not copy {source} to {target} ({_first_line(error)}): {source} itself is whole.") from error


def numbered(out_dir):
    """The numbered checkpoints of a run, oldest first."""
    return sorted(Path(out_dir).glob("ckpt_" + "[0-9]" * 8 + ".pt"))


def keep(out_dir, step, count):
    """Keeps ckpt_last.pt under its step's number and, if count > 0, only the newest `count` of the numbered ones."""
    copy(Path(out_dir) / "ckpt_last.pt", Path(out_dir) / f"ckpt_{step:08d}.pt")
    for old in numbered(out_dir)[:-count] if count else []:
        old.unlink(missing_ok=True)


def load(path, device="cpu"):
    """Reads a checkpoint, the wrappers' prefixes dropped from the model's names. Raises CheckpointError if the file is absent or not whole."""
    path = Path(path)
    if not path.is_file():
        there = ", ".join(sorted(p.name for p in path.parent.glob("*.pt"))) or "no .pt file"
        raise CheckpointError(f"no checkpoint {path} ({path.parent} holds {there}). Train first, or check --out_dir.")
    try:
        checkpoint = torch.load(path, map_location=device, weights_only=True, mmap=True)
        missing = [key for key in KEYS if key not in checkpoint]
    except Exception as error:  # a damaged zip or pickle fails in too many ways to list
        raise CheckpointError(f"{path} is not a whole checkpoint ({path.stat().st_size:,} bytes; {_first_line(error)}). "
                              f"It was cut off or damaged: use another .pt file of {path.parent}, or delete it and start again.") from error
    if missing:
        raise CheckpointError(f'{path} is not a checkpoint of train.py: it lacks {", ".join(missing)}.')
    for key, wanted in TYPES.items():
        if not isinstance(checkpoint[key], wanted):
            raise CheckpointError(f"{path} is damaged: its {key!r} is a {type(checkpoint[key]).__name__}, not a {wanted.__name__}. "
                                  f"Use another .pt file of {path.parent}, or delete it and start again.")
    checkpoint["model"] = strip_prefixes(checkpoint["model"])
    return checkpoint


def strip_prefixes(state_dict):
    """Removes the names that DDP ('module') and torch.compile ('_orig_mod') put anywhere into a state dict's keys."""
    return {".".join(part for part in key.split(".") if part not in ("module", "_orig_mod")): value for key, value in state_dict.items()}


def load_weights(model, state_dict, source):
    """Copies a state dict into a model, all names and shapes matching, or raises CheckpointError naming the first that do not."""
    wanted = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    found = {key: tuple(value.shape) for key, value in strip_prefixes(state_dict).items()}
    wrong = [f'{key} (model {wanted.get(key, "lacks it")}, file {found.get(key, "lacks it")})'
             for key in sorted(wanted.keys() | found.keys()) if wanted.get(key) != found.get(key)]
    if wrong:
        raise CheckpointError(f'{source} does not fit the model: {"; ".join(wrong[:4])}{f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""}.')
    model.load_state_dict(strip_prefixes(state_dict))


def model_config(checkpoint):
    """The GPTConfig of a checkpoint; a field that is newer than the checkpoint has its default."""
    fields = {field.name for field in dataclasses.fields(GPTConfig)}
    return GPTConfig(**{name: value for name, value in checkpoint["config"].items() if name in fields})


def load_run(out_dir, which="best", device="cpu"):
    """
    The model of a run, ready to use: (GPT in eval mode on the device, checkpoint dict).
    which: 'best' or 'last'; a run that has no best checkpoint yet gives its last. Raises CheckpointError.
    """
    path = Path(out_dir) / f"ckpt_{which}.pt"
    if which == "best" and not path.exists():
        path = path.with_name("ckpt_last.pt")
    checkpoint = load(path)
    model = GPT(model_config(checkpoint))
    load_weights(model, checkpoint["model"], path)
    return model.to(device).eval(), checkpoint


def start_log(out_dir, header, step=None):
    """
    Begins out_dir/log.jsonl with the header (a dict). With step, a run resumes there: the file is kept up to that step, since what
    came after is going to be done again, and the header is added once more. Otherwise an earlier run's files are moved aside.
    Raises ValueError if the folder cannot be made.
    """
    path = Path(out_dir) / "log.jsonl"
    configurator.make_folder("out_dir", out_dir)
    lock(path.parent)
    if step is None:
        set_aside(path.parent)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    write_atomically(path, lambda file: file.write("".join(line for line in lines if _stays(line, step)).encode()))
    log(out_dir, header if step is None else header | {"resumed_at": step})


def log(out_dir, line):
    """Appends a dict to out_dir/log.jsonl."""
    with open(Path(out_dir) / "log.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def lock(folder):
    """
    Claims a run's folder for this process until `unlock` or its end, however that comes: two runs in one folder would overwrite each other's
    checkpoints. Raises CheckpointError if another process has it. File systems without such locks, NFS among them, let everyone pass.
    """
    unlock()
    folder_fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder_fd)
        raise CheckpointError(f"another process is training in {folder} right now; end it first, or give another --out_dir.") from None
    except OSError:
        pass
    _locked.append(folder_fd)


def unlock():
    """Gives back what `lock` has claimed."""
    while _locked:
        os.close(_locked.pop())


_locked = []  # the open folder, whose descriptor is the lock


def _stays(line, step):
    """Whether a log line stays when the run resumes after `step` updates: the lines of these do; the evaluation after the last is made again."""
    try:
        line = json.loads(line)
    except ValueError:  # the half line of a killed run
        return False
    return line.get("step", line.get("resumed_at", -1)) <= step - ("val_loss" in line)


def set_aside(folder):
    """Moves the files of a run that a new one would overwrite into a subfolder and says so: a forgotten --init_from=resume loses nothing."""
    files = [path for path in (*folder.glob("ckpt_*.pt"), folder / "log.jsonl", folder / "wandb_id.txt") if path.exists()]
    if files:
        target = next(path for path in (folder / f"earlier_{n}" for n in itertools.count(1)) if not path.exists())
        target.mkdir()
        for path in files:
            path.rename(target / path.name)
        print(f"{folder} held a run already, which is in {target} now; to continue a run give --init_from=resume.", flush=True)


def _rename(temporary, path):
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)  # the new name itself must reach the disk too
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
