"""Prepare scripts: what they keep of the text, killed runs, locales, and every data set's converter on small data of the same form."""
import importlib
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from data import convert
from data.convert import digest_of, split_of
from data.shards import DataError, is_prepared, load_meta, open_split, shard_path, write_shard
from data.tokenizer import ByteTokenizer, tokenizer_from_meta

ROOT = Path(__file__).resolve().parents[1]
pystdlib, pycode, openwebtext, fineweb_edu, smallpile, fineweb10b = (
    importlib.import_module(f"data.{name}.prepare") for name in ("pystdlib", "pycode", "openwebtext", "fineweb_edu", "smallpile", "fineweb10b"))


def tokens_of(folder, split):
    return np.concatenate([tokens for _, tokens in open_split(folder, split).chunks()])


def documents_of(folder, split):
    """The documents of a split, decoded; each must end with a separator."""
    tokenizer = tokenizer_from_meta(load_meta(folder)["tokenizer"], folder)
    tokens = tokens_of(folder, split)
    ends = np.flatnonzero(tokens == tokenizer.eot)
    assert ends[-1] == len(tokens) - 1
    return [tokenizer.decode(part.tolist()) for part in np.split(tokens, ends + 1)[:-1] for part in [part[:-1]]]


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}


@pytest.fixture
def library(tmp_path):
    """A small library of Python files of every awkward kind. Returns (its folder, the texts that belong into a data set of it)."""
    folder = tmp_path / "library"
    texts = [f"def function_{i}(argument):\n    return argument + {i} * other_{i % 5}\n" for i in range(150)]
    texts += ["text = '<|endoftext|>'\n", "# naïve 日本語 🐍\nλ = 'é'\n"]
    for i, text in enumerate(texts):
        path = folder / ("package" if i % 2 else "") / f"module_{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")
    (folder / "latin.py").write_bytes("# -*- coding: latin-1 -*-\nname = 'é'\n".encode("latin-1"))
    (folder / "dos.py").write_bytes(b"\xef\xbb\xbfa = 1\r\nb = 2\r\n")
    texts += ["# -*- coding: latin-1 -*-\nname = 'é'\n", "a = 1\nb = 2\n"]
    (folder / "copy.py").write_text(texts[0], encoding="utf-8")
    (folder / "empty.py").write_bytes(b"")
    (folder / "blank.py").write_bytes(b"\n  \n")
    (folder / "broken.py").write_bytes(b"x = '\xff\xfe'\n")
    (folder / "unknown.py").write_bytes(b"# coding: no-such-codec\n")
    (folder / "note.txt").write_text("not Python")
    for name in ("test", "package/tests", "site-packages", "__pycache__"):
        (folder / name).mkdir()
        (folder / name / "left_out.py").write_text(f"left_out = '{name}'\n")
    return folder, texts


# The standard library and other source code

def test_pystdlib_keeps_each_text_once_and_splits_by_content(library, tmp_path, monkeypatch):
    folder, texts = library
    trained_on = []
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(folder)})
    monkeypatch.setattr(pystdlib, "train_bpe", lambda given, size: convert_train(given, size, trained_on))
    pystdlib.prepare(tmp_path / "out", vocab_size=300)
    parts = {split: documents_of(tmp_path / "out", split) for split in ("train", "val")}
    expected = {split: [text for text in texts if split_of(digest_of(text), 20) == split] for split in parts}
    assert {split: sorted(part) for split, part in parts.items()} == {split: sorted(part) for split, part in expected.items()}
    assert 0 < len(parts["val"]) < len(parts["train"]) / 5
    assert trained_on == parts["train"]
    meta = load_meta(tmp_path / "out")
    assert meta["vocab_size"] == 300 == tokenizer_from_meta(meta["tokenizer"]).n_vocab
    assert meta["bytes"] == {split: sum(len(text.encode()) for text in part) for split, part in parts.items()}
    assert is_prepared(tmp_path / "out")


def convert_train(texts, vocab_size, trained_on):
    trained_on += list(texts)
    return importlib.import_module("data.tokenizer").train_bpe(trained_on, vocab_size)


def test_separators_are_the_only_end_of_text_ids(library, tmp_path):
    folder, _ = library
    pycode.prepare(f"{folder / 'package'},{folder / 'site-packages'}", tmp_path / "out", 300, 1, val_every=10)
    meta, documents = load_meta(tmp_path / "out"), documents_of(tmp_path / "out", "train") + documents_of(tmp_path / "out", "val")
    assert "left_out = 'site-packages'\n" in documents and "left_out = 'package/tests'\n" in documents
    ids = np.concatenate([tokens_of(tmp_path / "out", split) for split in ("train", "val")])
    assert (ids == meta["tokenizer"]["special"]["<|endoftext|>"]).sum() == len(documents)


def test_a_locale_and_several_processes_change_nothing(library, tmp_path):
    folder, _ = library
    (folder / "näme_日本.py").write_text("unusual = 'name'\n", encoding="utf-8")
    pycode.prepare(str(folder), tmp_path / "here", 300, processes=1, shard_tokens=500, val_every=10)
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "PYTHON"))}
    command = [sys.executable, ROOT / "data/pycode/prepare.py", f"--folders={folder}", f"--out_dir={tmp_path / 'there'}", "--vocab_size=300",
               "--processes=2", "--shard_tokens=500", "--val_every=10"]
    done = subprocess.run(command, cwd=tmp_path, env={**plain, "PYTHONUTF8": "0", "LC_ALL": "C"}, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    assert len(open_split(tmp_path / "here", "train").paths) > 2


def test_preparing_again_replaces_what_was_there(library, tmp_path):
    folder, _ = library
    pycode.prepare(str(folder), tmp_path / "out", 300, 1, shard_tokens=300, val_every=5)
    pycode.prepare(str(folder), tmp_path / "again", 270, 1, val_every=10)
    pycode.prepare(str(folder), tmp_path / "out", 270, 1, val_every=10)
    assert contents(tmp_path / "out") == contents(tmp_path / "again")


def test_foreign_files_are_not_deleted(library, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/train.bin").write_bytes(b"mine")
    with pytest.raises(DataError, match="train.bin.*did not write"):
        pycode.prepare(str(library[0]), tmp_path / "out", 300, 1)
    assert contents(tmp_path / "out") == {"train.bin": b"mine"}


def test_nothing_to_read_is_a_clean_error(tmp_path):
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="No Python source"):
        pycode.prepare(str(tmp_path / "none"), tmp_path / "out", 300, 1)
    with pytest.raises(DataError, match="absent is not a folder"):
        pycode.prepare(str(tmp_path / "absent"), tmp_path / "out", 300, 1)


def test_default_folders_hold_the_library_once():
    folders = pycode.default_folders()
    assert any(Path(os.__file__).resolve().is_relative_to(folder) for folder in folders)
    assert any(Path(np.__file__).resolve().is_relative_to(folder) for folder in folders)
    assert not any(one != other and one.is_relative_to(other) for one in folders for other in folders)


@pytest.mark.slow
def test_the_real_standard_library(tmp_path):
    pystdlib.prepare(tmp_path)
    meta = load_meta(tmp_path)
    assert meta["vocab_size"] == 4096 and meta["bytes"]["train"] > 5e6 and 0.02 < meta["bytes"]["val"] / meta["bytes"]["train"] < 0.1
    tokens = {split: open_split(tmp_path, split).n_tokens for split in ("train", "val")}
    assert all(3 < meta["bytes"][split] / tokens[split] < 4.5 for split in tokens)


# Killed runs

TEXTS = [f"Document {i}: " + "word " * (i % 13) for i in range(200)]


def documents_from(texts, chunk=16):
    """The `documents` of convert for a list; positions are places in it."""
    def documents(position):
        for start in range(position or 0, len(texts), chunk):
            part = texts[start:start + chunk]
            yield [(split_of(digest_of(text), 5), text) for text in part], start + len(part)
    return documents


def dying_after(documents, chunks):
    def dying(position):
        for i, item in enumerate(documents(position)):
            if i == chunks:
                raise KeyboardInterrupt
            yield item
    return dying


@pytest.mark.parametrize("chunks", [0, 1, 4, 9, 12])
def test_a_killed_run_is_not_taken_for_finished_and_goes_on(tmp_path, chunks):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    convert.convert(documents_from(TEXTS), ByteTokenizer(), straight, {"data": 1}, True, shard_tokens=1500)
    assert len(open_split(straight, "train").paths) > 3
    for survived in (chunks, 0):                       # killed, and killed again as soon as it has gone on
        with pytest.raises(KeyboardInterrupt):
            convert.convert(dying_after(documents_from(TEXTS), survived), ByteTokenizer(), killed, {"data": 1}, True, shard_tokens=1500)
        assert not is_prepared(killed)
        with pytest.raises(DataError, match="expected a finished data set.*run it again"):
            open_split(killed, "train")
    with pytest.raises(DataError, match="begun with {'data': 1} and cannot go on with {'data': 2}"):
        convert.convert(documents_from(TEXTS), ByteTokenizer(), killed, {"data": 2}, True, shard_tokens=1500)
    asked = []
    convert.convert(lambda position: asked.append(position) or documents_from(TEXTS)(position), ByteTokenizer(), killed, {"data": 1}, True,
                    shard_tokens=1500)
    assert contents(killed) == contents(straight)
    assert (asked[0] or 0) > 0 or chunks < 4           # finished shards are not made again


def test_a_rebuild_that_is_killed_does_not_leave_the_old_meta_in_force(tmp_path):
    convert.convert(documents_from(TEXTS), ByteTokenizer(), tmp_path, {})
    assert is_prepared(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        convert.convert(dying_after(documents_from(TEXTS), 0), ByteTokenizer(), tmp_path, {})
    assert not is_prepared(tmp_path)


def test_an_empty_split_and_a_large_vocabulary_are_clean_errors(tmp_path):
    def train_only(position):
        yield [("train", "text")], None

    with pytest.raises(DataError, match="no document fell to the val split"):
        convert.convert(train_only, ByteTokenizer(), tmp_path, {})

    class Large(ByteTokenizer):
        n_vocab = 100277

    with pytest.raises(DataError, match="100,277"):
        convert.convert(train_only, Large(), tmp_path / "large", {})
    assert not (tmp_path / "large").exists()


# Data sets of the Hugging Face Hub, in small

@pytest.fixture(scope="module")
def datasets():
    return pytest.importorskip("datasets")


@pytest.mark.parametrize("script, name, config", [
    (openwebtext, "Skylion007/openwebtext", None), (fineweb_edu, "HuggingFaceFW/fineweb-edu", "sample-10BT")], ids=["openwebtext", "fineweb_edu"])
def test_streamed_text_goes_on_where_it_was_killed(datasets, tmp_path, monkeypatch, script, name, config):
    files = []
    for i in range(3):
        files.append(str(tmp_path / f"{i}.parquet"))
        datasets.Dataset.from_dict({"text": TEXTS[60 * i:60 * i + 60], "id": list(range(60))}).to_parquet(files[-1])
    real = datasets.load_dataset

    def from_files(asked, asked_config, split, streaming):
        assert (asked, asked_config, split, streaming) == (name, config, "train", True)
        return real("parquet", data_files=files, split="train", streaming=True)

    def killed(*arguments):
        pool = real_encode(*arguments)
        yield from (next(pool) for _ in range(5))
        raise KeyboardInterrupt

    monkeypatch.setattr(datasets, "load_dataset", from_files)
    monkeypatch.setattr(convert, "CHUNK_DOCUMENTS", 8)
    options = {"tokenizer": "bytes", "processes": 1, "shard_tokens": 900, "val_every": 10}
    script.prepare(tmp_path / "straight", **options)
    real_encode = convert.encode_in_order
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(convert, "encode_in_order", killed)
        script.prepare(tmp_path / "killed", **options)
    assert json.loads((tmp_path / "killed/progress.json").read_text())["state"]["bytes"]["train"] > 0
    script.prepare(tmp_path / "killed", **options)
    assert contents(tmp_path / "killed") == contents(tmp_path / "straight")
    found = {split: documents_of(tmp_path / "killed", split) for split in ("train", "val")}
    assert found == {split: [text for text in TEXTS[:180] if split_of(digest_of(text), 10) == split] for split in found}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked the Hub for a finished data set"))
    script.prepare(tmp_path / "killed", **options)


def test_no_network_is_a_clean_error(datasets, tmp_path, monkeypatch):
    def unreachable(*arguments, **options):
        raise ConnectionError("no route\nto the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError, match="Skylion007/openwebtext could not be read.*ConnectionError: no route.*need no network"):
        openwebtext.prepare(tmp_path, tokenizer="bytes")
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    with pytest.raises(DataError, match="hyq718/uint16smallpile could not be read.*need no network"):
        smallpile.prepare(out_dir=tmp_path / "smallpile")
    monkeypatch.setattr(hub, "hf_hub_download", unreachable)
    with pytest.raises(DataError, match="kjj0/fineweb10B-gpt2 could not be read.*need no network"):
        fineweb10b.prepare(tmp_path / "fineweb10b")


def test_missing_packages_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    for script in (openwebtext, fineweb_edu, smallpile):
        with pytest.raises(DataError, match="pip install datasets"):
            script.prepare(out_dir=tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match="pip install huggingface_hub"):
        fineweb10b.prepare(tmp_path)


def id_rows(datasets, count, mask=False, kind="uint16", length=8):
    """`count` rows of ids that number all tokens; with `mask`, the last two of every third row are padding."""
    rows = np.arange(count * length).reshape(count, length)
    columns, features = {"input_ids": rows.tolist()}, {"input_ids": datasets.Sequence(datasets.Value(kind))}
    expected = rows.reshape(-1)
    if mask:
        masks = np.ones_like(rows)
        masks[::3, -2:] = 0
        columns["attention_mask"], features["attention_mask"] = masks.tolist(), datasets.Sequence(datasets.Value("int8"))
        expected = expected[masks.reshape(-1) == 1]
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features)), expected.tolist()


@pytest.mark.parametrize("mask, kind", [(False, "uint16"), (True, "uint16"), (True, "int64"), (False, "int32")])
def test_smallpile_rows_become_shards(datasets, tmp_path, mask, kind):
    train, train_ids = id_rows(datasets, 50, mask, kind)
    val, val_ids = id_rows(datasets, 7, mask, kind)
    datasets.DatasetDict({"train": train, "validation": val}).save_to_disk(str(tmp_path / "saved"))
    smallpile.prepare(str(tmp_path / "saved"), tmp_path / "out", vocab_size=500, processes=1, shard_tokens=100)
    assert tokens_of(tmp_path / "out", "train").tolist() == train_ids and tokens_of(tmp_path / "out", "val").tolist() == val_ids
    assert len(open_split(tmp_path / "out", "train").paths) == 5       # of 12 rows of 8
    assert load_meta(tmp_path / "out")["vocab_size"] == 500 and "tokenizer" not in load_meta(tmp_path / "out")


def test_smallpile_without_validation_cuts_it_from_the_end(datasets, tmp_path):
    train, ids = id_rows(datasets, 30)
    train.save_to_disk(str(tmp_path / "bare"))
    datasets.DatasetDict({"train": train}).save_to_disk(str(tmp_path / "hub/inner"))      # as a Hub folder may nest it
    for source, out in ((tmp_path / "bare", tmp_path / "a"), (tmp_path / "hub", tmp_path / "b")):
        smallpile.prepare(str(source), out, processes=1, shard_tokens=100)
        assert tokens_of(out, "train").tolist() == ids[:-8] and tokens_of(out, "val").tolist() == ids[-8:]


def test_smallpile_goes_on_with_its_finished_shards(datasets, tmp_path, monkeypatch):
    train, ids = id_rows(datasets, 40)
    train.save_to_disk(str(tmp_path / "saved"))
    written, real = [], smallpile.write_shard

    def dying(path, tokens):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path.name)
        real(path, tokens)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(smallpile, "write_shard", dying)
        smallpile.prepare(str(tmp_path / "saved"), tmp_path / "out", processes=1, shard_tokens=100)
    assert not is_prepared(tmp_path / "out")
    monkeypatch.setattr(smallpile, "write_shard", lambda path, tokens: written.append(path.name) or real(path, tokens))
    smallpile.prepare(str(tmp_path / "saved"), tmp_path / "out", processes=1, shard_tokens=100)
    assert sorted(written) == sorted(set(written))
    assert [*tokens_of(tmp_path / "out", "train"), *tokens_of(tmp_path / "out", "val")] == ids


def test_smallpile_with_its_tokenizer_counts_bytes_of_text(datasets, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    built = tokenizers.Tokenizer(tokenizers.models.BPE())
    built.pre_tokenizer, built.decoder = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    built.train_from_iterator(TEXTS, tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False,
                                                                    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    built.save(str(tmp_path / "neox.json"))
    text = "naïve 🐍 word"                              # rows may cut a character: its bytes count all the same
    ids = built.encode(text).ids
    rows = datasets.Dataset.from_dict({"input_ids": [ids[:5], [*ids[5:], 0]]})
    datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(str(tmp_path / "saved"))
    smallpile.prepare(str(tmp_path / "saved"), tmp_path / "out", str(tmp_path / "neox.json"), vocab_size=304, processes=1)
    meta = load_meta(tmp_path / "out")
    assert meta["bytes"] == {"val": len(text.encode())} and documents_of(tmp_path / "out", "val") == [text]
    datasets.Dataset.from_dict({"input_ids": [[301], [302]]}).save_to_disk(str(tmp_path / "other"))
    with pytest.raises(DataError, match="token id 302.*vocab_size=300 as the tokenizer says"):
        smallpile.prepare(str(tmp_path / "other"), tmp_path / "wrong", str(tmp_path / "neox.json"), processes=1)


def test_smallpile_refuses_what_is_not_of_its_form(datasets, tmp_path):
    (tmp_path / "empty").mkdir()
    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(str(tmp_path / "text"))
    datasets.DatasetDict({"test": id_rows(datasets, 3)[0]}).save_to_disk(str(tmp_path / "test_only"))
    datasets.Dataset.from_dict({"input_ids": [[70000], [1]]}).save_to_disk(str(tmp_path / "large"))
    datasets.Dataset.from_dict({"input_ids": [[1]]}).save_to_disk(str(tmp_path / "one_row"))
    datasets.Dataset.from_dict({"input_ids": [[1, 2], [3, 4]], "attention_mask": [[1], [1]]}).save_to_disk(str(tmp_path / "mask"))
    for name, words in {"empty": "save_to_disk", "text": "input_ids.*text", "test_only": "named train, found test", "large": "70000",
                        "one_row": "found 1", "mask": "attention_mask"}.items():
        with pytest.raises(DataError, match=words):
            smallpile.prepare(str(tmp_path / name), tmp_path / "out" / name, processes=1)
        assert not is_prepared(tmp_path / "out" / name)


def test_fineweb10b_keeps_checked_shards_and_adds_more(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    asked, damaged = [], {"fineweb_train_000002.bin"}

    def download(repo, name, repo_type, local_dir):
        assert (repo, repo_type) == ("kjj0/fineweb10B-gpt2", "dataset")
        asked.append(name)
        path = Path(local_dir) / name
        path.parent.mkdir(exist_ok=True)
        write_shard(path, [50256, int(name[-10:-4]), 65 + len(asked)])
        if name in damaged:
            os.truncate(path, 1026)
        return str(path)

    def no_encoding(name):
        raise DataError("It is not in the cache.")

    monkeypatch.setattr(hub, "hf_hub_download", download)
    monkeypatch.setattr(fineweb10b, "load_tiktoken", no_encoding)
    with pytest.raises(DataError, match="fineweb_train_000002.bin: expected 3 tokens.*found 1"):
        fineweb10b.prepare(tmp_path, shards=3)
    assert not is_prepared(tmp_path) and not shard_path(tmp_path, "train", 2).exists()
    assert not (tmp_path / "download/fineweb_train_000002.bin").exists()
    damaged.clear()
    first = shard_path(tmp_path, "train", 1).read_bytes()
    fineweb10b.prepare(tmp_path, shards=3)
    assert tokens_of(tmp_path, "train")[1::3].tolist() == [1, 2, 3] and tokens_of(tmp_path, "val")[1] == 0
    assert shard_path(tmp_path, "train", 1).read_bytes() == first
    meta = load_meta(tmp_path)
    assert meta["vocab_size"] == 50257 and meta["tokenizer"] == {"kind": "tiktoken", "name": "gpt2"} and "bytes" not in meta
    asked.clear()
    fineweb10b.prepare(tmp_path, shards=5)
    assert sorted(asked) == ["fineweb_train_000004.bin", "fineweb_train_000005.bin"] and len(open_split(tmp_path, "train").paths) == 5
    with pytest.raises(DataError, match="--shards=104"):
        fineweb10b.prepare(tmp_path, shards=104)


# The command line

def test_command_line_reads_options_and_ends_with_a_sentence(monkeypatch, capsys):
    seen = []

    def prepare(out_dir="here", size=3):
        """What it does."""
        seen.append((out_dir, size))
        if size == 5:
            raise DataError("Five is refused.")

    monkeypatch.setattr(sys, "argv", ["prepare.py", "--size=4", "--out_dir=2024"])
    convert.command_line(prepare)
    assert seen == [("2024", 4)]
    for options, words in ((["--size=5"], "Five is refused."), (["--size=x"], "invalid int value"), (["--siz=4"], "unrecognized")):
        monkeypatch.setattr(sys, "argv", ["prepare.py", *options])
        with pytest.raises(SystemExit) as error:
            convert.command_line(prepare)
        assert error.value.code not in (0, None) and words in str(error.value.code) + capsys.readouterr().err
