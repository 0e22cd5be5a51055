"""The source text of the running Python's standard library, about 12 MB that are on every machine: a data set without a download."""
import io
import os
import platform
import sys
import sysconfig
import tokenize
from itertools import islice
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))   # the repository, so that the script runs from any folder

from data.convert import CHUNK_DOCUMENTS, command_line, convert, digest_of, process_pool, result_of, split_of
from data.shards import SHARD_TOKENS, DataError
from data.tokenizer import train_bpe

HERE = Path(__file__).resolve().parent
INSTALLED = {"site-packages", "dist-packages", "__pycache__"}
# The standard library's tests are left out although they are more than half of its text: Linux distributions package them apart, so the
# data would differ from machine to machine, and they are largely tables of data and long runs of similar assertions.
TESTS = {"test", "tests", "idle_test"}
BPE_BYTES = 100_000_000               # the vocabulary is trained on about this much of the train part


def python_files(folder, exclude=()):
    """All .py files below the folder except in folders named in `exclude`, in the order of their paths' bytes.

    That order is the same in every locale. Symbolic links to folders are not followed.
    """
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in exclude]
        found += [os.path.join(place, name) for name in files if name.endswith(".py")]
    return sorted(found, key=os.fsencode)


def read_source(path):
    """The text of a Python file, decoded as Python does (UTF-8 or what its first lines declare, never the locale's encoding), with
    \\n line ends; None if it cannot be read or decoded."""
    try:
        raw = Path(path).read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        return raw.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, SyntaxError, UnicodeError, LookupError):
        return None


def text_of(path):
    """The text of a file that was readable before; "" if it has gone since."""
    return read_source(path) or ""


def describe(paths):
    """[(path, digest, bytes of text)] of those of the files that hold any text."""
    texts = ((path, read_source(path)) for path in paths)
    return [(path, digest_of(text), len(text.encode("utf-8", errors="replace"))) for path, text in texts if text and not text.isspace()]


def unique_sources(paths, val_every, processes=1):
    """Sort the files into splits by their content, each content once and empty ones not at all.

    Returns a list of (split, path, size) in the order of `paths`.
    """
    seen, kept = set(), []
    with process_pool(processes) as pool, tqdm(total=len(paths), desc="reading", unit="file") as bar:
        for first, job in [(i, pool.submit(describe, paths[i:i + CHUNK_DOCUMENTS])) for i in range(0, len(paths), CHUNK_DOCUMENTS)]:
            for path, digest, size in result_of(job):
                if digest not in seen:
                    seen.add(digest)
                    kept.append((split_of(digest, val_every), path, size))
            bar.update(len(paths[first:first + CHUNK_DOCUMENTS]))
    return kept


def train_texts(sources):
    """The texts that the vocabulary is trained on: train files, every k-th where they are more than BPE_BYTES."""
    train = [(path, size) for split, path, size in sources if split == "train"]
    every = 1 + sum(size for _, size in train) // BPE_BYTES
    for path, _ in tqdm(train[::every], desc="training the vocabulary", unit="file"):
        yield text_of(path)


def prepare_code(name, paths, out_dir, vocab_size, val_every, processes=1, shard_tokens=SHARD_TOKENS):
    """Make a data set of Python files: de-duplicate, split by file, train a byte-pair vocabulary on the train part, encode."""
    sources = unique_sources(paths, val_every, processes)
    if not sources:
        raise DataError("No Python source files were found; name folders that hold some, or use another data set.")
    tokenizer = train_bpe(train_texts(sources), vocab_size)

    def documents(position):
        left = iter(sources)
        while chunk := list(islice(left, CHUNK_DOCUMENTS)):
            yield [(split, path) for split, path, _ in chunk], None

    made_with = {"data": name, "python": platform.python_version(), "files": len(sources), "vocab_size": vocab_size, "val_every": val_every}
    total_bytes = sum(size for *_, size in sources)
    convert(documents, tokenizer, out_dir, made_with, processes=processes, shard_tokens=shard_tokens, total_bytes=total_bytes, read=text_of)


def prepare(out_dir=str(HERE), vocab_size=4096, val_every=20):
    """Make a data set of the Python standard library's source text, without a network and in less than two minutes.

    out_dir     the folder to write to
    vocab_size  ids of the byte-pair vocabulary, which is trained on the train part
    val_every   one file in so many goes to validation
    """
    folder = sysconfig.get_paths()["stdlib"]
    prepare_code("pystdlib", python_files(folder, INSTALLED | TESTS), out_dir, vocab_size, val_every)


if __name__ == "__main__":
    command_line(prepare)
