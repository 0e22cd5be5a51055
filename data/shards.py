"""Token shards: the files that hold a data set, and which tokens each training step reads from them.

A shard is a `.bin` file: 256 little-endian int32 (magic 20240520, version 1, number of tokens, then zeros), followed by the
tokens as little-endian uint16. That is the format of the public FineWeb shards for GPT-2 speed runs. nanoGPT's files, uint16
tokens without a header, are read too. A data set is a folder with `train*.bin`, `val*.bin` and, optionally, `meta.json`.
"""
import hashlib
import json
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

MAGIC = 20240520
VERSION = 1
HEADER_WORDS = 256
HEADER_BYTES = 4 * HEADER_WORDS
MAX_TOKENS = 2**31 - 1                # the header counts tokens in an int32
MAX_ID = 2**16 - 1                    # the largest id a uint16 holds
SHARD_TOKENS = 100_000_000            # the size at which prepare scripts begin a new shard
SCAN_ALL_TOKENS = 256 * 2**20         # check_vocab reads every token of splits up to this size (half a GB) ...
SAMPLE_TOKENS = 16 * 2**20            # ... and this many of larger ones
CHUNK_TOKENS = 2**20                  # tokens read at a time when scanning
PROGRESS = "progress.json"            # lies in a data folder as long as its prepare.py has not finished


class DataError(ValueError):
    """Something is wrong with a data file or with the way a data set is used; the message is a sentence for the user."""


# ---------------------------------------------------------------------------------------------------------------------
# Writing

def write_atomically(path, write):
    """Call `write(file)` on a temporary binary file beside `path`, flush it to the disk, and only then give it its name.

    A reader therefore sees the old file or the whole new one, never a part, even if the writer is killed.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path, value):
    """Write `value` as JSON, atomically and in plain ASCII, so that no locale can change what is read back."""
    write_atomically(path, lambda file: file.write(json.dumps(value).encode("ascii")))


def checked_uint16(ids, where):
    """`ids` as a uint16 array. Raises DataError, naming `where`, if one of them is not an integer of 0..65535."""
    ids = np.asarray(ids)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise DataError(f"{where}: token ids must be a flat sequence of integers, found {ids.dtype} of shape {ids.shape}.")
    if ids.dtype != np.uint16 and ids.size:
        for wrong in (ids.min(), ids.max()):
            if not 0 <= wrong <= MAX_ID:
                raise DataError(f"{where}: token id {wrong} does not fit into a uint16 shard, which holds ids from 0 to {MAX_ID}; "
                                "use a tokenizer with a vocabulary of at most 65,536.")
    return np.ascontiguousarray(ids, "<u2")


def write_shard(path, ids):
    """Write the token ids (a flat sequence or array of integers) as one shard, atomically.

    Raises DataError for ids below 0 or above 65535, for no tokens at all, and for more than an int32 can count.
    """
    ids = checked_uint16(ids, path)
    if not 0 < len(ids) <= MAX_TOKENS:
        raise DataError(f"{path}: a shard holds from 1 to {MAX_TOKENS:,} tokens, but {len(ids):,} were given.")
    header = np.zeros(HEADER_WORDS, "<i4")
    header[:3] = MAGIC, VERSION, len(ids)
    write_atomically(path, lambda file: (file.write(header.tobytes()), file.write(ids.data)))


def shard_path(folder, split, index):
    """The name under which shard `index` of a split is written, such as train_000003.bin."""
    return Path(folder) / f"{split}_{index:06d}.bin"


class ShardWriter:
    """Collects the documents of one split and writes them as shards of about `shard_tokens` tokens.

    A shard ends with the document that makes it full, so no document is cut. With `index` and `pending` a writer continues where
    another one stopped: after shard `index` - 1, with the tokens `pending` already in hand.
    """
    def __init__(self, folder, split, shard_tokens=SHARD_TOKENS, index=0, pending=()):
        self.folder, self.split, self.shard_tokens, self.index = Path(folder), split, shard_tokens, index
        self.parts = [checked_uint16(pending, split)] if len(pending) else []
        self.pending = len(pending)

    def add(self, ids):
        """Append one document's ids. Returns True when the shard in hand has become full and been written."""
        ids = checked_uint16(ids, f"{self.split} document")
        self.parts.append(ids)
        self.pending += len(ids)
        if self.pending < self.shard_tokens:
            return False
        self.save()
        self.index, self.parts, self.pending = self.index + 1, [], 0
        return True

    def save(self):
        """Write the shard in hand, full or not, if it holds any token. The writer keeps its tokens and may go on adding."""
        if self.pending:
            self.parts = [np.concatenate(self.parts)]
            write_shard(shard_path(self.folder, self.split, self.index), self.parts[0])


# ---------------------------------------------------------------------------------------------------------------------
# Opening

def looks_like_header(words, size):
    """Whether the first 256 int32 of a file of `size` bytes are a header, be it a wrong one, rather than 512 tokens.

    Headerless files are told from headered ones by what no text produces. A block is taken for a header if its first word is a
    magic number in use (ours, or llm.c's for uint32 tokens, in either byte order); or if its third word is exactly the number of
    tokens that would follow it; or if its first three words are not all zero and nothing but zeros follows them. A block that
    passes for a header and is not the one expected is an error, never a headerless file.
    """
    known = (MAGIC, 20240801)
    return (words[0] in known or words[0].byteswap() in known or 0 < words[2] == (size - HEADER_BYTES) // 2
            or (words[:3].any() and not words[3:].any()))


def read_header(path):
    """Check a shard from its size and first bytes. Returns (byte offset of the first token, number of tokens).

    Raises DataError, naming the file, what was expected and what was found, for files that are missing, empty, of odd size,
    truncated or longer than their header says, or that have a header of another format.
    """
    try:
        size = os.path.getsize(path)
        words = np.fromfile(path, "<i4", count=HEADER_WORDS)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from error
    if size == 0:
        raise DataError(f"{path}: expected a token shard, found an empty file (0 bytes); run its prepare.py again.")
    if size % 2:
        raise DataError(f"{path}: expected an even number of bytes (uint16 tokens), found {size:,}; the file is damaged or cut off.")
    if size < HEADER_BYTES:
        if len(words) and words[0] == MAGIC:
            raise DataError(f"{path}: expected a header of {HEADER_BYTES} bytes, found a file of {size:,} bytes; the file is cut off.")
        return 0, size // 2
    if not looks_like_header(words, size):
        return 0, size // 2
    magic, version, count = words[:3].tolist()
    found = (size - HEADER_BYTES) // 2
    if magic != MAGIC:
        raise DataError(f"{path}: expected a header with magic number {MAGIC}, found {magic}; it is not a shard of uint16 tokens.")
    if version != VERSION:
        raise DataError(f"{path}: expected a header of version {VERSION}, found version {version}.")
    if count != found or count == 0:
        raise DataError(f"{path}: expected {count:,} tokens as its header says, found {found:,}; the file is "
                        f"{'cut off' if found < count else 'not what its header says'}.")
    return HEADER_BYTES, found


def is_prepared(data_dir):
    """Whether a prepare.py has run to its end in this folder."""
    return (Path(data_dir) / "meta.json").exists() and not (Path(data_dir) / PROGRESS).exists()


def load_meta(data_dir):
    """What the folder's meta.json says, checked: {"vocab_size": int, "tokenizer": {...}, "bytes": {"train": int, "val": int}}.

    Every key may be absent, and the result is {} when there is no such file. "bytes" counts the UTF-8 bytes of the documents'
    text; the separators between documents are tokens without bytes, so bits per byte is never flattered by them. nanoGPT's
    meta.pkl (a character vocabulary) is understood too. Raises DataError for a file that cannot be used.
    """
    path = Path(data_dir) / "meta.json"
    if not path.exists():
        return load_char_meta(path.with_name("meta.pkl"))
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: expected JSON, found something else ({error}); run its prepare.py again.") from error
    if not isinstance(meta, dict):
        raise DataError(f"{path}: expected a JSON object, found {type(meta).__name__}.")
    vocab_size = meta.get("vocab_size", 1)
    if type(vocab_size) is not int or vocab_size < 1:
        raise DataError(f"{path}: expected vocab_size to be a positive integer, found {vocab_size!r}.")
    for key in ("tokenizer", "bytes"):
        if not isinstance(meta.get(key, {}), dict):
            raise DataError(f"{path}: expected {key} to be a JSON object, found {meta[key]!r}.")
    return meta


class PlainUnpickler(pickle.Unpickler):
    """Reads pickles of plain dicts, lists, strings and numbers; anything that would import code is refused."""
    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it wants to import {module}.{name}")


def load_char_meta(path):
    """nanoGPT's meta.pkl for character-level data, {"vocab_size", "itos", "stoi"}, in the form of our meta.json; {} if absent."""
    if not path.exists():
        return {}
    try:
        with open(path, "rb") as file:
            itos = PlainUnpickler(file).load()["itos"]
        chars = [itos[i] for i in range(len(itos))]
    except (OSError, pickle.UnpicklingError, EOFError, LookupError, TypeError) as error:
        raise DataError(f"{path}: expected nanoGPT's character vocabulary (itos, stoi), found something else ({error!r}).") from error
    return {"vocab_size": len(chars), "tokenizer": {"kind": "char", "chars": chars}}


class TokenSplit:
    """One split of a data set: a row of shards, cut into windows of block_size + 1 tokens that overlap by one token.

    Window i of a shard with n tokens starts at token i * block_size, for i in 0..(n - 1) // block_size - 1: every token but a
    shard's first is a target at most once, and no window crosses from one shard into the next. Opening reads the headers only.
    Nothing stays open or mapped in memory; each window is read from its file when it is asked for, so the split may be used
    from several threads and its memory does not grow with what has been read.
    """
    def __init__(self, paths):
        self.paths = [Path(path) for path in paths]
        self.offsets, counts = zip(*map(read_header, self.paths), strict=True)
        self.counts = np.array(counts, np.int64)
        self.n_tokens = int(self.counts.sum())

    def n_windows(self, block_size):
        """How many windows of block_size + 1 tokens the split has."""
        return int(((self.counts - 1) // block_size).sum())

    def read(self, shard, start, count):
        """`count` tokens of shard number `shard` from token `start` on, a uint16 array."""
        path = self.paths[shard]
        try:
            tokens = np.fromfile(path, "<u2", count=count, offset=self.offsets[shard] + 2 * start)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}).") from error
        if len(tokens) < count:
            raise DataError(f"{path}: expected {count:,} tokens from token {start:,} on, found {len(tokens):,}; "
                            "the file was cut off after it had been opened.")
        return tokens

    def windows(self, indices, block_size):
        """The windows numbered `indices` as (x, y), int64 tensors [len(indices), block_size]; y is x moved on by one token."""
        import torch                           # here, since prepare scripts and their many processes have no use for its seconds of import

        first = np.concatenate(([0], np.cumsum((self.counts - 1) // block_size)))   # each shard's first window
        rows = np.empty((len(indices), block_size + 1), np.int64)
        for row, index in zip(rows, indices, strict=True):
            shard = int(np.searchsorted(first, index, side="right")) - 1
            row[:] = self.read(shard, int(index - first[shard]) * block_size, block_size + 1)
        rows = torch.from_numpy(rows)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def chunks(self, max_tokens=None):
        """Yields (path, tokens) over the whole split, or over about `max_tokens` tokens spread evenly over it if it is larger."""
        starts = [(shard, start) for shard, count in enumerate(self.counts.tolist()) for start in range(0, count, CHUNK_TOKENS)]
        if max_tokens is not None and self.n_tokens > max_tokens:
            wanted = max(1, max_tokens // CHUNK_TOKENS)
            starts = [starts[i * len(starts) // wanted] for i in range(min(wanted, len(starts)))]
        for shard, start in starts:
            yield self.paths[shard], self.read(shard, start, min(CHUNK_TOKENS, int(self.counts[shard]) - start))


def open_split(data_dir, split):
    """Open the shards of a split, 'train' or 'val', in the folder: SPLIT*.bin or, as public data sets are named, *_SPLIT_*.bin.

    Returns a TokenSplit. Raises DataError if there are none, if one of them cannot be used, or if the folder's prepare.py has not
    come to its end.
    """
    folder = Path(data_dir)
    if (folder / PROGRESS).exists():
        raise DataError(f"{folder}: expected a finished data set, found {PROGRESS}, which its prepare.py removes at its end; run it again to finish.")
    paths = sorted({*folder.glob(f"{split}*.bin"), *folder.glob(f"*_{split}_*.bin")})
    if not paths:
        raise DataError(f"{folder}: expected token shards named {split}*.bin, found {'none' if folder.is_dir() else 'no such folder'}; "
                        "run its prepare.py or set --data_dir.")
    return TokenSplit(paths)


# ---------------------------------------------------------------------------------------------------------------------
# Checks for start-up. All depend on the files alone, so every rank comes to the same answer and none is left waiting.

def check_windows(split, block_size, at_least=1):
    """Raise DataError unless the split has `at_least` windows (a rank needs one, so give the number of ranks)."""
    found = split.n_windows(block_size)
    if found == 0:
        raise DataError(f"{split.paths[0]}: expected at least {block_size + 1:,} tokens in one shard for a window of block_size={block_size}, "
                        f"found {split.counts.max():,}; use more data or a smaller --block_size.")
    if found < at_least:
        raise DataError(f"{split.paths[0]}: expected at least {at_least} windows of block_size={block_size}, one for each rank, found {found} "
                        f"in {split.n_tokens:,} tokens; use more data, a smaller --block_size or fewer processes.")


def check_vocab(split, vocab_size, said_by="--vocab_size"):
    """Raise DataError if the split holds an id that a vocabulary of `vocab_size` does not; `said_by` is where that number is from.

    Splits of up to 256M tokens are read whole, larger ones are sampled; batch_at can check the rest as it goes.
    """
    for path, tokens in split.chunks(SAMPLE_TOKENS if split.n_tokens > SCAN_ALL_TOKENS else None):
        check_ids(tokens, vocab_size, path, said_by)


def check_ids(ids, vocab_size, path, said_by="--vocab_size"):
    """Raise DataError if one of the ids (an array or tensor of any shape) is not below `vocab_size`."""
    largest = int(ids.max())
    if largest >= vocab_size:
        raise DataError(f"{path}: found token id {largest}, expected ids below vocab_size={vocab_size} as {said_by} says; the shards were "
                        f"made with another tokenizer: run prepare.py again or set --vocab_size to at least {largest + 1}.")


# ---------------------------------------------------------------------------------------------------------------------
# Which tokens a step reads

def mix(values, key):
    """A pseudo-random function of uint64 values: a multiplication spreads low bits upwards, a shift brings them down again."""
    values = (values + key) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(29))) * np.uint64(0xD6E8FEB86659FD93)
    return values ^ (values >> np.uint64(32))


def permute(positions, n, seed, epoch):
    """Where a seeded permutation of 0..n-1 sends `positions` (an integer array), in constant memory for any n.

    A Feistel network is a permutation of 0..4^h - 1, whatever its round function. Walking along its cycle until the value is
    below n restricts it to 0..n-1 (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002, method 2); as 4^h < 4n
    that takes fewer than four steps on average.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.frombuffer(hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=64).digest(), "<u8")   # one key a round
    values = np.asarray(positions).astype(np.uint64)
    walking = np.ones(len(values), bool)
    while walking.any():
        left, right = values[walking] >> half, values[walking] & mask
        for key in keys:
            left, right = right, left ^ (mix(right, key) & mask)
        values[walking] = (left << half) | right
        walking = values >= n
    return values.astype(np.int64)


def batch_at(split, step, micro_step, rank, world_size, batch_size, global_batch_size, block_size, seed, vocab_size=None):
    """The batch that one rank trains on in one micro-step, as (x, y): int64 tensors [batch_size, block_size], y = x moved on by one.

    It is a function of the arguments alone. The sequences of a whole run are numbered g = step * global_batch_size +
    micro_step * world_size * batch_size + rank * batch_size + i; sequence g is the window that epoch g // n_windows has at place
    g % n_windows of its own permutation. So an epoch reads every window exactly once, and an optimizer step reads the same
    global_batch_size windows however they are shared out among ranks and micro-steps.

    Raises DataError if the split has no window and, where `vocab_size` is given, for ids that are not below it; ValueError for a
    micro-step outside the global batch.
    """
    check_windows(split, block_size)
    first = (micro_step * world_size + rank) * batch_size
    if not 0 <= first <= global_batch_size - batch_size:
        raise ValueError(f"micro_step={micro_step} of rank {rank} of {world_size} with batch_size={batch_size} is outside "
                         f"global_batch_size={global_batch_size}.")
    n = split.n_windows(block_size)
    sequences = step * global_batch_size + first + np.arange(batch_size, dtype=np.int64)
    epochs, positions = sequences // n, sequences % n
    indices = np.empty_like(positions)
    for epoch in np.unique(epochs):            # nearly always one; more where a batch runs over the end of an epoch
        here = epochs == epoch
        indices[here] = permute(positions[here], n, seed, epoch)
    x, y = split.windows(indices, block_size)
    if vocab_size is not None:
        check_ids(x, vocab_size, split.paths[0].parent)
        check_ids(y, vocab_size, split.paths[0].parent)
    return x, y


def eval_windows(split, block_size, max_tokens):
    """The numbers of the windows that every evaluation uses (an int64 array, ascending), for TokenSplit.windows.

    All of them if they have at most `max_tokens` targets (0 = no limit), otherwise as many as fit, at least one, spread evenly.
    They depend on nothing else, so evaluations of one run, or of runs with other batch sizes and ranks, can be compared. Raises
    DataError if the split has no window.
    """
    check_windows(split, block_size)
    n = split.n_windows(block_size)
    wanted = min(n, max(1, max_tokens // block_size)) if max_tokens else n
    return np.arange(wanted, dtype=np.int64) * n // wanted


class Prefetcher:
    """Reads the batches of the next micro-steps in a background thread while the current one is trained on.

    `next_batch(step, micro_step)` gives what batch_at gives for those numbers, on `device`; what it reads ahead is only a guess of what
    will be asked for, so the batches are a function of step and micro_step, not of the calls before. Errors of the background
    thread are raised by the next_batch that asks for the batch concerned. Use it in a `with` block, or call close().

    `micro_steps` is the number of micro-steps of an optimizer step; `arguments` are those of batch_at after micro_step, by name.
    `waited` adds up the seconds that next_batch waited because the batch had not been read yet.
    """
    def __init__(self, split, micro_steps, device="cpu", depth=2, **arguments):
        self.split, self.micro_steps, self.device, self.depth, self.arguments = split, micro_steps, device, depth, arguments
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self.ahead = {}                        # (step, micro_step) -> future of its batch
        self.waited = 0.0

    def _load(self, step, micro_step):
        batch = batch_at(self.split, step, micro_step, **self.arguments)
        return tuple(t.pin_memory() for t in batch) if str(self.device).startswith("cuda") else batch   # a copy can overlap only from pinned memory

    def next_batch(self, step, micro_step):
        """(x, y) of this rank for that micro-step, int64 tensors [batch_size, block_size] on the device."""
        numbers = [divmod(step * self.micro_steps + micro_step + i, self.micro_steps) for i in range(self.depth + 1)]
        for stale in self.ahead.keys() - set(numbers):
            self.ahead.pop(stale).cancel()
        for number in numbers:
            if number not in self.ahead:
                self.ahead[number] = self.thread.submit(self._load, *number)
        start = time.perf_counter()
        batch = self.ahead.pop(numbers[0]).result()
        self.waited += time.perf_counter() - start
        return tuple(t.to(self.device, non_blocking=True) for t in batch)

    def close(self):
        """Stop reading ahead and wait for the thread to end."""
        self.thread.shutdown(wait=True, cancel_futures=True)
        self.ahead.clear()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()
