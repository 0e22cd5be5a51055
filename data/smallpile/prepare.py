"""smallpile: a de-duplicated part of the Pile that comes as token ids, the data of the Depth-Attention models."""
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))   # the repository, so that the script runs from any folder

from data.convert import CORES, begin, command_line, finish, from_hub, process_pool, run_jobs, val_bytes
from data.shards import SHARD_TOKENS, DataError, is_prepared, shard_path, write_shard
from data.tokenizer import json_tokenizer_from_file, need

HERE = Path(__file__).resolve().parent
VAL_PART = 200                        # without a validation split, one row in so many, from the end, becomes one
READ_ROWS = 1024                      # rows decoded at a time


def find_saved(folder):
    """The folder itself or the one below it that holds what `save_to_disk` wrote: (path, list of its splits; [] for a single data set)."""
    folder = Path(folder)
    for place in (folder, *sorted(path for path in folder.glob("*") if path.is_dir())):
        if (place / "dataset_dict.json").is_file():
            return place, sorted(path.parent.name for path in place.glob("*/state.json"))
        if (place / "state.json").is_file():
            return place, []
    raise DataError(f"{folder}: expected a data set written by save_to_disk (dataset_dict.json or state.json), found none.")


def plan(place, splits, shard_tokens):
    """Which rows make which shard: a list of (folder of the split, our name of it, shard number, first row, row after the last)."""
    datasets = need("datasets", "Reading smallpile")
    if splits and "train" not in splits:
        raise DataError(f"{place}: expected a split named train, found {', '.join(splits)}.")
    val = next((name for name in ("validation", "val", "test") if name in splits), None)
    train_at = place / "train" if splits else place
    sources = {"train": train_at, "val": place / val if val else train_at}
    jobs = []
    for split, folder in sources.items():
        dataset = datasets.load_from_disk(str(folder))
        if "input_ids" not in dataset.column_names:
            raise DataError(f"{folder}: expected a column input_ids, found {', '.join(dataset.column_names)}.")
        if len(dataset) < (2 if val is None else 1):
            raise DataError(f"{folder}: expected rows of token ids, found {len(dataset)}.")
        first, last = 0, len(dataset)
        if val is None:
            cut = last - max(1, last // VAL_PART)
            first, last = (0, cut) if split == "train" else (cut, last)
        rows = max(1, shard_tokens // max(1, len(dataset[0]["input_ids"])))
        jobs += [(str(folder), split, index, start, min(start + rows, last)) for index, start in enumerate(range(first, last, rows))]
    return jobs


def rows_to_ids(table):
    """The ids of an Arrow table's rows, one after the other, as an array; where there is an attention_mask, without what it masks.

    Rows are 2048 tokens of running text with separators already in it, so they are joined as they are.
    """
    ids = table["input_ids"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    if "attention_mask" not in table.column_names:
        return ids
    mask = table["attention_mask"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    if len(mask) != len(ids):
        raise DataError(f"attention_mask has {len(mask)} entries, expected {len(ids)}, one for each of input_ids.")
    return ids[mask.astype(bool)]


def convert_rows(out_dir, folder, split, index, start, stop):
    """Write one shard from the rows start..stop-1 of the data set in the folder."""
    dataset = need("datasets", "Reading smallpile").load_from_disk(folder).with_format("arrow")
    parts = [rows_to_ids(dataset[first:min(first + READ_ROWS, stop)]) for first in range(start, stop, READ_ROWS)]
    write_shard(shard_path(out_dir, split, index), np.concatenate(parts))


def convert_saved(folder, out_dir, vocab_size, tokenizer=None, processes=1, shard_tokens=SHARD_TOKENS):
    """Make shards and meta.json from a folder that `save_to_disk` wrote. Shards that a killed run has finished are kept."""
    place, splits = find_saved(folder)
    jobs = plan(place, splits, shard_tokens)
    rows = sum(stop - start for *_, start, stop in jobs)
    begin(out_dir, {"data": "smallpile", "rows": rows, "shard_tokens": shard_tokens, "vocab_size": vocab_size}, resume=True)
    jobs = [(out_dir, *job) for job in jobs if not shard_path(out_dir, job[1], job[2]).exists()]   # a shard is named once it is complete
    run_jobs(process_pool(processes), convert_rows, jobs, "converting")
    finish(out_dir, vocab_size, tokenizer and tokenizer.to_meta(), tokenizer and val_bytes(out_dir, tokenizer))


def prepare(source="hyq718/uint16smallpile", out_dir=str(HERE), tokenizer="", vocab_size=50304, processes=CORES, shard_tokens=SHARD_TOKENS):
    """Make token shards of smallpile, which comes as rows of ids. A killed run goes on where it stopped when the script is run again.

    source        a folder written by save_to_disk, or a data set of the Hugging Face Hub that holds one
    out_dir       the folder to write to
    tokenizer     the path of the tokenizer.json that the ids belong to, if known (GPT-NeoX's, most likely: the data does not say);
                  with it models can be sampled from and validation is reported in bits per byte
    vocab_size    ids that a model of this data needs
    processes     how many processes convert
    shard_tokens  at how many tokens a new shard begins
    """
    if is_prepared(out_dir):
        print(f"{out_dir}: already prepared; delete its meta.json to prepare it again.")
        return
    need("datasets", "Reading smallpile")
    loaded = json_tokenizer_from_file(tokenizer) if tokenizer else None
    if not Path(source).is_dir():
        hub = need("huggingface_hub", f"Downloading {source}")
        source = from_hub(source, hub.snapshot_download, source, repo_type="dataset", local_dir=str(Path(out_dir) / "download"))
    convert_saved(source, out_dir, vocab_size, loaded, processes, shard_tokens)


if __name__ == "__main__":
    command_line(prepare)
