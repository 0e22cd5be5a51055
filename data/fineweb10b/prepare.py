"""FineWeb, 10 billion tokens, downloaded as the GPT-2 token shards that the speed runs use: nothing is encoded here."""
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))   # the repository, so that the script runs from any folder

from data.convert import begin, command_line, finish, from_hub, run_jobs, val_bytes
from data.shards import DataError, read_header, shard_path
from data.tokenizer import load_tiktoken, need

HERE = Path(__file__).resolve().parent
SOURCE = "kjj0/fineweb10B-gpt2"
ALL_SHARDS = 103                      # training shards there are, of 100M tokens each but the last
VOCAB_SIZE = 50257


def collect(fetch, out_dir, shards, downloads=4):
    """Fetch the validation shard and the first `shards` training shards, several at a time, under the names used here.

    `fetch(name)` downloads one file and returns its path. A shard gets its name once its header agrees with its size; those that
    have theirs are not fetched again.
    """
    def get(split, index):
        path = shard_path(out_dir, split, index)
        if not path.exists():
            fetched = fetch(f"fineweb_{path.name}")
            try:
                read_header(fetched)
            except DataError:
                os.unlink(fetched)                     # or the next run would be given the same file again
                raise
            os.replace(fetched, path)

    get("val", 0)                                      # alone, so that a missing network is met once and not by every thread
    run_jobs(ThreadPoolExecutor(downloads), get, [("train", index) for index in range(1, shards + 1)], "downloading")


def prepare(out_dir=str(HERE), shards=10):
    """Download the validation shard and some of the 103 training shards of FineWeb, 100 million GPT-2 tokens and 200 MB each.

    A killed run goes on where it stopped when the script is run again; a larger --shards adds to what is there.

    out_dir  the folder to write to
    shards   how many training shards, 1 to 103
    """
    if not 1 <= shards <= ALL_SHARDS:
        raise DataError(f"--shards={shards}: expected a number from 1 to {ALL_SHARDS}.")
    hub = need("huggingface_hub", f"Downloading {SOURCE}")
    begin(out_dir, {"data": SOURCE}, resume=True)

    def fetch(name):
        return from_hub(SOURCE, hub.hf_hub_download, SOURCE, name, repo_type="dataset", local_dir=str(Path(out_dir) / "download"))

    collect(fetch, out_dir, shards)
    try:
        tokenizer = load_tiktoken("gpt2")
    except DataError as error:
        print(f"The shards are complete, but bits per byte will not be reported. {error}")
        finish(out_dir, VOCAB_SIZE, {"kind": "tiktoken", "name": "gpt2"})
    else:
        finish(out_dir, VOCAB_SIZE, tokenizer.to_meta(), val_bytes(out_dir, tokenizer))


if __name__ == "__main__":
    command_line(prepare)
