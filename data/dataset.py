"""A data set as train.py opens it: whatever can be wrong with it is found here, before anything is trained or written."""
import subprocess
import sys
from pathlib import Path

from data import shards
from data.tokenizer import tokenizer_from_meta

STDLIB = Path(__file__).resolve().parent / "pystdlib"   # the data set that needs no network and makes itself


def prepare(folder):
    """Runs the prepare.py of the standard library's data set, if that is the folder, unless its shards and meta.json are there. Raises ValueError."""
    if folder != STDLIB or (folder / "meta.json").exists() and list(folder.glob("train*.bin")) and list(folder.glob("val*.bin")):
        return
    print(f"{folder} has no data yet: running its prepare.py once.", flush=True)
    if subprocess.run([sys.executable, folder / "prepare.py"]).returncode:
        raise ValueError(f"{folder / 'prepare.py'} failed (see above); run it by itself, or give another --data_dir.")


def open_checked(folder, block_size, vocab_size, world_size):
    """
    (train split, val split, what checkpoints carry of meta.json: vocab_size, tokenizer, bytes) of a folder, checked against block_size,
    vocab_size (0 = what meta.json says) and the number of processes, each of which needs a window. Raises ValueError.
    """
    train, val = shards.open_split(folder, "train"), shards.open_split(folder, "val")
    meta = shards.load_meta(folder)
    said_by = "--vocab_size" if vocab_size else f"{folder / 'meta.json'}"
    vocab_size = vocab_size or meta.get("vocab_size", 0)
    if not vocab_size:
        raise ValueError(f"{folder} has no meta.json that says vocab_size; give --vocab_size.")
    if meta.get("vocab_size", 0) > vocab_size:
        raise ValueError(f"{folder / 'meta.json'} says vocab_size {meta['vocab_size']}, but the model's is {vocab_size}: "
                         f"give --vocab_size={meta['vocab_size']} or more.")
    for split, at_least in (train, world_size), (val, 1):
        shards.check_windows(split, block_size, at_least)
        shards.check_vocab(split, vocab_size, said_by)
    if meta.get("tokenizer", {}).get("kind") == "json":   # a tokenizer.json that meta.json may only name: checkpoints carry it whole
        meta["tokenizer"] = tokenizer_from_meta(meta["tokenizer"], folder).to_meta()
    return train, val, {"vocab_size": vocab_size, "tokenizer": meta.get("tokenizer"), "bytes": meta.get("bytes")}
