"""Token shards: the files, which tokens a step reads, and what is refused."""
import os
import pickle
import threading
import time

import numpy as np
import pytest
import torch

from data import shards
from data.shards import DataError, Prefetcher, batch_at, check_vocab, check_windows, eval_windows, open_split, permute, write_shard


def header(magic=shards.MAGIC, version=1, count=0):
    words = np.zeros(256, "<i4")
    words[:3] = magic, version, count
    return words.tobytes()


def make_split(folder, *counts, split="train"):
    """Shards of the given sizes in which every token of the split is its own number, so a window tells where it was read."""
    start = 0
    for index, count in enumerate(counts):
        write_shard(shards.shard_path(folder, split, index), np.arange(start, start + count))
        start += count
    return open_split(folder, split)


def run_batches(split, steps, world_size=1, batch_size=2, global_batch_size=8, block_size=4, seed=1):
    """For each step the list of window starts that all ranks and micro-steps read, checking that y is x moved on by one."""
    starts = []
    for step in steps:
        starts.append([])
        for micro_step in range(global_batch_size // (batch_size * world_size)):
            for rank in range(world_size):
                x, y = batch_at(split, step, micro_step, rank, world_size, batch_size, global_batch_size, block_size, seed)
                assert x.shape == y.shape == (batch_size, block_size) and x.dtype == y.dtype == torch.int64
                assert torch.equal(y, x + 1)
                starts[-1] += x[:, 0].tolist()
    return starts


# Files

def test_shard_has_the_public_format(tmp_path):
    write_shard(tmp_path / "train.bin", [5, 0, 65535])
    raw = (tmp_path / "train.bin").read_bytes()
    assert raw == header(20240520, 1, 3) + np.array([5, 0, 65535], "<u2").tobytes()
    assert open_split(tmp_path, "train").read(0, 0, 3).tolist() == [5, 0, 65535]
    assert os.listdir(tmp_path) == ["train.bin"]


@pytest.mark.parametrize("tokens", [[3], [7] * 600, list(range(600)), [1] + [0] * 599, [0] * 600])
def test_headerless_files_are_read(tmp_path, tokens):
    if tokens[0] == 1:
        tokens[20] = 9                          # 1 and then nothing but zeros would be taken for a header
    np.array(tokens, "<u2").tofile(tmp_path / "val.bin")
    split = open_split(tmp_path, "val")
    assert split.n_tokens == len(tokens) and split.read(0, 0, len(tokens)).tolist() == tokens


@pytest.mark.parametrize("ids, words", [
    ([1, 70000], "70000"), ([3, -1], "-1"), ([65536], "65536"), ([], "0 were given"), ([0.5], "integers"), ([[1, 2]], "flat"),
    (np.array([2**40]), str(2**40)), (np.array([-2], np.int16), "-2")])
def test_unsuitable_ids_are_refused_and_leave_no_file(tmp_path, ids, words):
    with pytest.raises(DataError, match=words):
        write_shard(tmp_path / "train.bin", ids)
    assert os.listdir(tmp_path) == []


BAD_FILES = {
    "empty": (b"", ["even|0 bytes"]),
    "odd": (header(count=4) + b"\0" * 7, ["even number", "1,031"]),
    "odd without header": (b"\1\0\1", ["even number", "3"]),
    "cut off": (header(count=100) + b"\0" * 160, ["expected 100 tokens", "found 80", "cut off"]),
    "longer than its header says": (header(count=10) + b"\0" * 40, ["expected 10 tokens", "found 20"]),
    "negative count": (header(count=-5) + b"\1\0" * 40, ["expected -5 tokens", "found 40"]),
    "no tokens": (header(count=0), ["found 0"]),
    "cut inside the header": (header(count=100)[:500], ["1024 bytes", "500 bytes"]),
    "version": (header(version=2, count=4) + b"\1\0" * 4, ["version 1", "version 2"]),
    "llm.c's 32-bit shards": (header(20240801, 7, 3) + b"\1\0\0\0" * 3, ["20240520", "20240801"]),
    "magic one too large": (header(20240521, 1, 4) + b"\1\0" * 4, ["20240520", "20240521"]),
    "magic zero": (header(0, 1, 600) + b"\1\0" * 600, ["20240520", "found 0"]),
    "magic and version unknown": (header(12345, 99, 4) + b"\1\0" * 4, ["20240520", "12345"]),
    "big-endian": (np.frombuffer(header(20240520, 1, 4), "<i4").astype(">i4").tobytes() + b"\1\0" * 4, ["20240520"]),
    "unknown magic with words after the count": (np.array([777, 3, 4] + [9] * 253, "<i4").tobytes() + b"\1\0" * 4, ["20240520", "777"]),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_files_are_refused_with_file_expected_and_found(tmp_path, kind):
    content, words = BAD_FILES[kind]
    write_shard(tmp_path / "train_000000.bin", [1, 2, 3])
    (tmp_path / "train_000001.bin").write_bytes(content)
    with pytest.raises(DataError) as error:
        open_split(tmp_path, "train")
    message = str(error.value)
    assert "train_000001.bin: expected" in message and "found" in message and "\n" not in message
    assert all(any(option in message for option in word.split("|")) for word in words), message


def test_missing_shards_and_folders_are_named(tmp_path):
    with pytest.raises(DataError, match=r"val\*\.bin, found none.*prepare\.py"):
        open_split(tmp_path, "val")
    with pytest.raises(DataError, match="absent.*no such folder"):
        open_split(tmp_path / "absent", "val")


def test_public_file_names_are_found(tmp_path):
    write_shard(tmp_path / "fineweb_train_000001.bin", [1, 2])
    write_shard(tmp_path / "fineweb_val_000000.bin", [3])
    assert open_split(tmp_path, "train").n_tokens == 2 and open_split(tmp_path, "val").n_tokens == 1


def test_killed_writer_leaves_the_old_shard(tmp_path):
    write_shard(tmp_path / "train.bin", [1, 2, 3])

    def dies(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shards.write_atomically(tmp_path / "train.bin", dies)
    assert open_split(tmp_path, "train").read(0, 0, 3).tolist() == [1, 2, 3] and os.listdir(tmp_path) == ["train.bin"]


def test_file_cut_off_after_opening_is_noticed(tmp_path):
    split = make_split(tmp_path, 100)
    os.truncate(split.paths[0], 1024 + 50)
    with pytest.raises(DataError, match="cut off after"):
        split.windows([20], 4)


def test_shard_writer_never_cuts_a_document_and_continues(tmp_path):
    documents = [list(range(n)) for n in (3, 5, 4, 1, 9, 2)]
    writer = shards.ShardWriter(tmp_path / "a", "train", shard_tokens=6)
    (tmp_path / "a").mkdir()
    assert [writer.add(document) for document in documents] == [False, True, False, False, True, False]
    writer.save()
    whole = open_split(tmp_path / "a", "train")
    assert whole.counts.tolist() == [8, 14, 2]

    (tmp_path / "b").mkdir()
    first = shards.ShardWriter(tmp_path / "b", "train", shard_tokens=6)
    for document in documents[:3]:
        first.add(document)
    first.save()
    second = shards.ShardWriter(tmp_path / "b", "train", 6, index=1, pending=open_split(tmp_path / "b", "train").read(1, 0, 4))
    for document in documents[3:]:
        second.add(document)
    second.save()
    for one, other in zip(whole.chunks(), open_split(tmp_path / "b", "train").chunks(), strict=True):
        assert one[0].name == other[0].name and np.array_equal(one[1], other[1])


# meta.json

def test_meta_is_read_and_checked(tmp_path):
    assert shards.load_meta(tmp_path) == {}
    meta = {"vocab_size": 10, "bytes": {"train": 4, "val": 2}, "tokenizer": {"kind": "char", "chars": ["é"]}}
    shards.write_json(tmp_path / "meta.json", meta)
    assert shards.load_meta(tmp_path) == meta
    for text in ("{", "[1]", '{"vocab_size": "ten"}', '{"vocab_size": true}', '{"vocab_size": 0}', '{"bytes": 3}', '{"tokenizer": "gpt2"}', "\xff"):
        (tmp_path / "meta.json").write_text(text, encoding="latin-1")
        with pytest.raises(DataError, match="meta.json: expected"):
            shards.load_meta(tmp_path)


def test_nanogpt_character_meta_is_read_without_running_code(tmp_path):
    itos = {0: "\n", 1: "a", 2: "é"}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 3, "itos": itos, "stoi": {c: i for i, c in itos.items()}}))
    assert shards.load_meta(tmp_path) == {"vocab_size": 3, "tokenizer": {"kind": "char", "chars": ["\n", "a", "é"]}}
    for content in (pickle.dumps(os.getcwd), pickle.dumps({"other": 1}), b"", pickle.dumps(5)):
        (tmp_path / "meta.pkl").write_bytes(content)
        with pytest.raises(DataError, match="meta.pkl: expected"):
            shards.load_meta(tmp_path)


# Which tokens a step reads

@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 100, 1000, 4097])
def test_permute_is_a_permutation_that_changes_with_seed_and_epoch(n):
    orders = [permute(np.arange(n), n, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0), (10, 0), (1, 1))]
    for order in orders:
        assert np.array_equal(np.sort(order), np.arange(n))
    if n >= 16:
        assert len({tuple(order) for order in orders}) == len(orders)
    assert np.array_equal(permute(np.arange(n)[::-1], n, 0, 0), orders[0][::-1])


def test_permute_looks_random():
    n = 10000
    order = permute(np.arange(n), n, 3, 0)
    assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.05
    steps = np.abs(np.diff(order)) / n
    assert abs(steps.mean() - 1 / 3) < 0.02            # mean distance of two random points
    assert (order == np.arange(n)).sum() < 10
    places = np.stack([permute(np.arange(5), 5, 0, epoch) for epoch in range(500)])
    counts = np.stack([np.bincount(places[:, i], minlength=5) for i in range(5)])
    assert abs(counts - 100).max() < 45               # every window takes every place equally often (5 standard deviations)


def test_an_epoch_reads_every_window_once_and_none_crosses_a_shard(tmp_path):
    split = make_split(tmp_path, 41, 4, 5, 44, 23)     # 10, 0, 1, 10 and 5 windows of 4 + 1 tokens
    expected = [start + i for start, n in ((0, 10), (45, 1), (50, 10), (94, 5)) for i in range(0, 4 * n, 4)]
    assert split.n_windows(4) == len(expected) == 26
    read = [start for step in run_batches(split, range(13)) for start in step]   # 13 * 8 = 4 epochs
    epochs = [read[i:i + 26] for i in range(0, 104, 26)]
    assert all(sorted(epoch) == expected for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4 and sorted(epochs[0]) != epochs[0]


@pytest.mark.parametrize("world_size, batch_size", [(1, 1), (1, 4), (2, 4), (4, 1), (8, 1), (2, 2), (1, 8)])
def test_a_step_reads_the_same_windows_for_any_world_size_and_micro_batch(tmp_path, world_size, batch_size):
    split = make_split(tmp_path, 60, 33)
    steps = range(5)                                   # runs over the ends of epochs of 14 + 8 = 22 windows
    assert run_batches(split, steps, world_size, batch_size) == run_batches(split, steps)


def test_batches_depend_on_step_alone_and_on_the_seed(tmp_path):
    split = make_split(tmp_path, 400)
    whole = run_batches(split, range(20))
    assert run_batches(open_split(tmp_path, "train"), range(7, 20)) == whole[7:]
    assert run_batches(split, [19, 3]) == [whole[19], whole[3]]
    assert run_batches(split, range(20), seed=2) != whole


def test_fewer_windows_than_a_global_batch_cross_epochs(tmp_path):
    split = make_split(tmp_path, 9, 5)                 # 3 windows
    read = [start for step in run_batches(split, range(3)) for start in step]
    assert all(sorted(read[i:i + 3]) == [0, 4, 9] for i in range(0, 24, 3))


def test_far_steps_do_not_overflow(tmp_path):
    split = make_split(tmp_path, 21)
    read = run_batches(split, [10**12, 10**12 + 4])[0]
    assert set(read) <= {0, 4, 8, 12, 16}


def test_micro_steps_outside_the_global_batch_are_refused(tmp_path):
    split = make_split(tmp_path, 100)
    for micro_step, rank in ((2, 0), (0, 4), (-1, 0)):
        with pytest.raises(ValueError, match="global_batch_size=8"):
            batch_at(split, 0, micro_step, rank, 2, 2, 8, 4, 0)


def test_public_scale_opens_at_once(tmp_path):
    for index in range(26):                            # 26B tokens as sparse files
        with open(tmp_path / f"train_{index:06d}.bin", "wb") as file:
            file.write(header(count=10**9))
            file.truncate(1024 + 2 * 10**9)
    started = time.perf_counter()
    split = open_split(tmp_path, "train")
    check_windows(split, 2048, 8)
    x, _ = batch_at(split, 12345, 0, 3, 8, 4, 1024, 2048, 0)
    check_vocab(split, 50304)
    assert split.n_tokens == 26 * 10**9 and x.shape == (4, 2048)
    assert time.perf_counter() - started < 1.5


def resident():
    """Megabytes of this process in memory, pages of mapped files included."""
    return next(int(line.split()[1]) for line in open("/proc/self/status", encoding="ascii") if line.startswith("VmRSS")) / 1024


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="resident memory is read from /proc")
def test_reading_everything_twice_keeps_memory_flat(tmp_path):
    with open(tmp_path / "train.bin", "wb") as file:
        file.write(header(count=24 * 2**20))
        file.truncate(1024 + 48 * 2**20)
    split = open_split(tmp_path, "train")
    split.windows([0] * 64, 4096)
    before = resident()
    for _ in range(2):
        for first in range(0, split.n_windows(4096) - 64, 64):
            split.windows(range(first, first + 64), 4096)
    assert resident() - before < 16                    # a mapping read whole would add 48


# Checks for start-up

def test_too_few_windows_is_an_error_on_every_rank(tmp_path):
    split = make_split(tmp_path, 16)
    with pytest.raises(DataError, match="at least 17 tokens.*found 16.*block_size"):
        check_windows(split, 16)
    with pytest.raises(DataError, match="at least 17 tokens"):
        batch_at(split, 0, 0, 0, 1, 1, 1, 16, 0)
    with pytest.raises(DataError, match="at least 17 tokens"):
        eval_windows(split, 16, 100)
    check_windows(split, 5, at_least=3)
    with pytest.raises(DataError, match="at least 4 windows.*found 3"):
        check_windows(split, 5, at_least=4)


def test_block_plus_one_tokens_are_one_window(tmp_path):
    split = make_split(tmp_path, 17)
    assert eval_windows(split, 16, 1).tolist() == [0]
    x, y = split.windows([0], 16)
    assert x[0].tolist() == list(range(16)) and y[0].tolist() == list(range(1, 17))


def test_eval_windows_are_fixed_and_spread(tmp_path):
    split = make_split(tmp_path, 401)                  # 100 windows of 4
    assert eval_windows(split, 4, 0).tolist() == eval_windows(split, 4, 400).tolist() == eval_windows(split, 4, 10**9).tolist() == list(range(100))
    assert eval_windows(split, 4, 43).tolist() == list(range(0, 100, 10))
    assert eval_windows(split, 4, 3).tolist() == [0]


@pytest.mark.parametrize("place", [0, 49, 50, 99])
def test_ids_outside_the_vocabulary_are_found_anywhere(tmp_path, place):
    ids = np.zeros(100, np.int64)
    ids[place] = 300
    write_shard(tmp_path / "train_000000.bin", ids[:50])
    write_shard(tmp_path / "train_000001.bin", ids[50:])
    split = open_split(tmp_path, "train")
    check_vocab(split, 301)
    with pytest.raises(DataError, match=f"train_00000{place // 50}.bin: found token id 300.*vocab_size=300 as meta.json says.*at least 301"):
        check_vocab(split, 300, "meta.json")


def test_large_splits_are_sampled(tmp_path, monkeypatch):
    split = make_split(tmp_path, 1000, 1000)
    monkeypatch.setattr(shards, "CHUNK_TOKENS", 10)
    read = [tokens for _, tokens in split.chunks(max_tokens=100)]
    assert sum(map(len, read)) == 100 and {int(tokens[0]) // 200 for tokens in read} == set(range(10))
    assert sum(len(tokens) for _, tokens in split.chunks()) == 2000


def test_batches_are_checked_against_the_vocabulary(tmp_path):
    write_shard(tmp_path / "train.bin", [0, 1, 2, 3, 9])
    split = open_split(tmp_path, "train")
    batch_at(split, 0, 0, 0, 1, 1, 1, 4, 0, vocab_size=10)
    with pytest.raises(DataError, match="token id 9.*vocab_size=9"):
        batch_at(split, 0, 0, 0, 1, 1, 1, 4, 0, vocab_size=9)


# Reading ahead

ARGUMENTS = {"rank": 1, "world_size": 2, "batch_size": 2, "global_batch_size": 12, "block_size": 4, "seed": 5}


def test_prefetcher_gives_the_batches_of_batch_at_in_any_order(tmp_path):
    split = make_split(tmp_path, 300)
    order = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 0), (7, 2), (8, 0), (2, 1)]
    with Prefetcher(split, micro_steps=3, **ARGUMENTS) as batches:
        for step, micro_step in order:
            for got, expected in zip(batches.next_batch(step, micro_step), batch_at(split, step, micro_step, **ARGUMENTS), strict=True):
                assert torch.equal(got, expected)


def test_prefetcher_reads_ahead_in_another_thread(tmp_path, monkeypatch):
    split, read, done = make_split(tmp_path, 300), [], threading.Event()

    def recording(split, step, micro_step, **arguments):
        read.append((step, micro_step, threading.current_thread() is threading.main_thread()))
        if len(read) == 3:
            done.set()
        return batch_at(split, step, micro_step, **arguments)

    monkeypatch.setattr(shards, "batch_at", recording)
    with Prefetcher(split, micro_steps=2, **ARGUMENTS) as batches:
        batches.next_batch(4, 1)
        assert done.wait(10)
    assert read == [(4, 1, False), (5, 0, False), (5, 1, False)]


def test_prefetcher_raises_the_error_of_its_batch_and_closes(tmp_path):
    split = make_split(tmp_path, 300)
    batches = Prefetcher(split, micro_steps=3, **ARGUMENTS)
    batches.next_batch(0, 0)
    os.truncate(split.paths[0], 1024)
    with pytest.raises(DataError, match="cut off"):
        for step in range(1, 4):
            batches.next_batch(step, 0)
    batches.close()
    assert not any(thread.name.startswith("prefetch") for thread in threading.enumerate())
