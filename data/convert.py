"""Documents to token shards: what the prepare scripts have in common.

A folder under preparation holds progress.json. It is written before anything else, says from where a killed run goes on, and is
removed after meta.json has been written, so a half-written folder is never taken for a finished one.
"""
import argparse
import hashlib
import inspect
import json
import os
import re
import signal
import sys
import threading
from collections import deque
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.shards import MAX_ID, PROGRESS, SHARD_TOKENS, DataError, ShardWriter, TokenSplit, check_ids, is_prepared, shard_path, write_json
from data.tokenizer import need, tokenizer_from_meta, tokenizer_from_name

SPLITS = ("train", "val")
CHUNK_DOCUMENTS = 256                 # documents handed to a worker at a time
CORES = min(32, os.cpu_count() or 1)  # default number of processes


def split_of(digest, val_every):
    """'val' for one document in `val_every`, else 'train'. It depends on the content's digest (bytes) alone: equal texts stay together."""
    return "val" if int.from_bytes(digest[:8], "big") % val_every == 0 else "train"


def digest_of(text):
    """A digest of the text, 16 bytes: equal for equal texts only."""
    return hashlib.blake2b(text.encode("utf-8", errors="surrogatepass"), digest_size=16).digest()


# ---------------------------------------------------------------------------------------------------------------------
# The life of a folder under preparation

def begin(out_dir, made_with, resume=False):
    """Start on a folder, or go on with it. Returns what save_progress stored last, or None for a start from nothing.

    `made_with` is a dict of the options that shape the result. With `resume` the shards of an earlier run are kept; if that run,
    finished or not, had other options, that is a DataError. Otherwise old shards and meta.json are removed, but not files that no
    prepare script wrote: DataError.
    """
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    if resume:
        for path in (out_dir / PROGRESS, out_dir / "meta.json"):
            if path.exists():
                before = json.loads(path.read_text(encoding="utf-8"))
                if before.get("made_with") != made_with:
                    raise DataError(f"{out_dir}: the folder was begun with {before.get('made_with')} and cannot go on with {made_with}; "
                                    f"use the same options or another --out_dir, or delete {path.name} to begin anew.")
                state = before.get("state")
                save_progress(out_dir, made_with, state)
                return state
    old = [path for split in SPLITS for path in out_dir.glob(f"{split}*.bin")]
    for path in old:
        if not re.fullmatch(r"(train|val)_\d{6}\.bin", path.name):
            raise DataError(f"{path}: found a file that this script did not write, expected none such; move it away or set another --out_dir.")
    save_progress(out_dir, made_with, None)
    for path in (*old, out_dir / "meta.json"):
        path.unlink(missing_ok=True)
    return None


def save_progress(out_dir, made_with, state):
    """Record that all up to `state` (anything JSON can hold) is on the disk."""
    write_json(Path(out_dir) / PROGRESS, {"made_with": made_with, "state": state})


def finish(out_dir, vocab_size, tokenizer_meta=None, text_bytes=None):
    """Check both splits, write meta.json, declare the folder finished, and say what it holds."""
    out_dir = Path(out_dir)
    tokens, shards = {}, 0
    for split in SPLITS:
        paths = sorted(out_dir.glob(f"{split}_*.bin"))
        if not paths:
            raise DataError(f"{out_dir}: no document fell to the {split} split; use more documents, or another --val_every.")
        tokens[split], shards = TokenSplit(paths).n_tokens, shards + len(paths)
    made_with = json.loads((out_dir / PROGRESS).read_text(encoding="utf-8"))["made_with"]
    meta = {"vocab_size": vocab_size, "bytes": text_bytes, "made_with": made_with, "tokenizer": tokenizer_meta}
    write_json(out_dir / "meta.json", {key: value for key, value in meta.items() if value is not None})
    (out_dir / PROGRESS).unlink()
    print(f"{out_dir}: {tokens['train']:,} training and {tokens['val']:,} validation tokens in {shards} shards, vocabulary {vocab_size:,}.")


# ---------------------------------------------------------------------------------------------------------------------
# Work for several processes

def process_pool(processes, start=None, arguments=()):
    """A pool of fresh processes, or of a thread for one. Not forks: the parent has threads, of downloads for one, that a fork would cut off.

    Each process first calls start(*arguments).
    """
    if processes <= 1:
        return ThreadPoolExecutor(1)
    return ProcessPoolExecutor(processes, get_context("spawn"), start_worker, (start, arguments))


def start_worker(start, arguments):
    signal.signal(signal.SIGINT, signal.SIG_IGN)       # Ctrl-C is the parent's business, which then ends its workers
    threading.Thread(target=end_with_parent, daemon=True).start()
    if start:
        start(*arguments)


def end_with_parent():
    """Wait for the parent to die and follow it: the workers of a killed script would otherwise wait for jobs for ever."""
    parent_process().join()
    os._exit(1)


def result_of(future):
    """The result of a pool's future. Raises DataError if the process that worked on it was killed."""
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise DataError("A worker process was killed, perhaps for want of memory; run the script again, with fewer --processes.") from error


def run_jobs(pool, function, jobs, desc):
    """Call function(*job) for every job in the pool, each of which makes one shard, with a progress bar."""
    with tqdm(total=len(jobs), desc=desc, unit="shard") as bar:
        try:
            for future in [pool.submit(function, *job) for job in jobs]:
                result_of(future)
                bar.update()
        finally:
            pool.shutdown(cancel_futures=True)


worker_tokenizer = None               # of this process, if it is a worker


def set_worker_tokenizer(meta):
    global worker_tokenizer
    worker_tokenizer = tokenizer_from_meta(meta)


def encode_chunk(chunk, read=None, tokenizer=None):
    """
    Encode a list of (split, text), or of (split, what the function `read` makes a text of). Returns a list of (split, ids, bytes of the text); ids end
    with the separator, a token without bytes.
    """
    tokenizer = tokenizer or worker_tokenizer
    end = [] if tokenizer.eot is None else [tokenizer.eot]
    texts = ((split, read(text) if read else text) for split, text in chunk)
    return [(split, np.array(tokenizer.encode(text) + end, np.uint16), len(text.encode("utf-8", errors="replace"))) for split, text in texts]


def encode_in_order(chunks, tokenizer, processes, read=None):
    """For each (chunk, position) of the iterable, in order: (encode_chunk(chunk, read), position), computed by several processes."""
    if processes <= 1:
        for chunk, position in chunks:
            yield encode_chunk(chunk, read, tokenizer), position
        return
    pool, waiting = process_pool(processes, set_worker_tokenizer, (tokenizer.to_meta(),)), deque()
    try:
        for chunk, position in chunks:
            waiting.append((pool.submit(encode_chunk, chunk, read), position))
            if len(waiting) > 4 * processes:           # so much is read ahead of the workers, and no more
                future, position = waiting.popleft()
                yield result_of(future), position
        for future, position in waiting:
            yield result_of(future), position
    finally:
        pool.shutdown(cancel_futures=True)


def convert(documents, tokenizer, out_dir, made_with, resume=False, processes=1, shard_tokens=SHARD_TOKENS, total_bytes=None, read=None):
    """Encode documents into shards and meta.json.

    documents    function of a position that yields (list of (split, text), position after them) from there on, in a fixed order;
                 positions are what JSON can hold, None is the start
    made_with    the options that shape the result, see begin
    resume       whether to go on with what an earlier, killed run has left
    total_bytes  how much text there is, if known, for the progress bar
    read         a module's function that turns each document into its text, in the processes that encode; None if they are texts already
    """
    if tokenizer.n_vocab > MAX_ID + 1:
        raise DataError(f"The tokenizer has {tokenizer.n_vocab:,} ids, but uint16 shards hold ids from 0 to {MAX_ID}; choose a smaller vocabulary.")
    out_dir = Path(out_dir)
    state = begin(out_dir, made_with, resume) or {"position": None, "shards": dict.fromkeys(SPLITS, (0, 0)), "bytes": dict.fromkeys(SPLITS, 0)}
    writers = {}
    for split, (index, pending) in state["shards"].items():
        tokens = TokenSplit([shard_path(out_dir, split, index)]).read(0, 0, pending) if pending else ()
        writers[split] = ShardWriter(out_dir, split, shard_tokens, index, tokens)
    text_bytes = state["bytes"]

    def save(position):
        for writer in writers.values():
            writer.save()
        save_progress(out_dir, made_with, {"position": position, "bytes": text_bytes,
                                           "shards": {split: (writer.index, writer.pending) for split, writer in writers.items()}})

    with tqdm(total=total_bytes, initial=sum(text_bytes.values()), unit="B", unit_scale=True, desc="tokenizing") as bar:
        for encoded, position in encode_in_order(documents(state["position"]), tokenizer, processes, read):
            shard_done = False
            for split, ids, size in encoded:
                shard_done |= writers[split].add(ids)
                text_bytes[split] += size
                bar.update(size)
            if shard_done:
                save(position)
    for writer in writers.values():
        writer.save()
    finish(out_dir, tokenizer.n_vocab, tokenizer.to_meta(), text_bytes)


def from_hub(name, function, *args, **options):
    """Call a function that reads the data set `name` from the Hugging Face Hub. Raises DataError if it fails for any reason."""
    try:
        return function(*args, **options)
    except Exception as error:                         # of a dozen classes, from three packages, for one broken connection
        reason = str(error).strip().split("\n")[0][:200]
        raise DataError(f"{name} could not be read from the Hugging Face Hub ({type(error).__name__}: {reason}); check the network and run the "
                        "script again: it goes on where it stopped. data/pystdlib/prepare.py and data/pycode/prepare.py need no network.") from error


def rows_of(dataset, name, val_every):
    """The `documents` of convert for a streaming data set of the package `datasets` that has a column 'text'.

    One document in `val_every` goes to validation. The position is the data set's own state, with which it goes on without
    downloading again what lies before.
    """
    def documents(position):
        if position is not None:
            dataset.load_state_dict(position)
        rows = iter(dataset)
        while chunk := from_hub(name, list, islice(rows, CHUNK_DOCUMENTS)):
            texts = [row["text"] for row in chunk]
            yield [(split_of(digest_of(text), val_every), text) for text in texts], dataset.state_dict()

    return documents


def prepare_text(name, config, out_dir, tokenizer, processes, shard_tokens, val_every):
    """Make a data set of the column 'text' of a Hub data set's train split, streaming, going on where a killed run stopped."""
    if is_prepared(out_dir):
        print(f"{out_dir}: already prepared; delete its meta.json to prepare it again.")
        return
    datasets = need("datasets", f"Reading {name}")
    made_with = {"data": name, "config": config, "tokenizer": tokenizer, "shard_tokens": shard_tokens, "val_every": val_every}
    encoder = tokenizer_from_name(tokenizer)
    dataset = from_hub(name, datasets.load_dataset, name, config, split="train", streaming=True)
    convert(rows_of(dataset, name, val_every), encoder, out_dir, made_with, True, processes, shard_tokens)


def val_bytes(out_dir, tokenizer):
    """{"val": bytes of text that the ids of the validation shards stand for}, for finish; None if the tokenizer cannot tell.

    It is for data sets that come as ids. The training shards are not counted: they may be tens of gigabytes, and only validation
    is reported in bits per byte.
    """
    lengths = tokenizer.byte_lengths()
    if lengths is None:
        return None
    shards = TokenSplit(sorted(Path(out_dir).glob("val_*.bin")))
    for path, tokens in shards.chunks():
        check_ids(tokens, tokenizer.n_vocab, path, "the tokenizer")
    return {"val": sum(int(lengths[tokens].sum()) for _, tokens in shards.chunks())}


# ---------------------------------------------------------------------------------------------------------------------

def command_line(prepare):
    """Run `prepare` with the options given as --name=value; they are its parameters, and its docstring is the help.

    What a user can put right ends with one sentence on stderr and exit code 1.
    """
    parser = argparse.ArgumentParser(description=inspect.getdoc(prepare), formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    for name, parameter in inspect.signature(prepare).parameters.items():
        parser.add_argument(f"--{name}", default=parameter.default, help=f"default: {parameter.default}",
                            type=int if isinstance(parameter.default, int) else str)
    options = vars(parser.parse_args())
    try:
        prepare(**options)
    except DataError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("error: interrupted; run the script again to finish.")
