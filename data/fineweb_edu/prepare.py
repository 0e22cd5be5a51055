"""FineWeb-Edu: web pages chosen for their educational value; the sample of 10 billion GPT-2 tokens by default."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))   # the repository, so that the script runs from any folder

from data.convert import CORES, command_line, prepare_text
from data.shards import SHARD_TOKENS

HERE = Path(__file__).resolve().parent


def prepare(out_dir=str(HERE), sample="sample-10BT", tokenizer="gpt2", processes=CORES, shard_tokens=SHARD_TOKENS, val_every=2000):
    """Stream HuggingFaceFW/fineweb-edu from the Hugging Face Hub into token shards.

    A killed run goes on where it stopped when the script is run again.

    out_dir       the folder to write to
    sample        which part of the data set: sample-10BT, sample-100BT, sample-350BT or default (all of it)
    tokenizer     a tiktoken encoding, 'bytes', or the path of a tokenizer.json
    processes     how many processes encode
    shard_tokens  at how many tokens a new shard begins
    val_every     one document in so many goes to validation
    """
    prepare_text("HuggingFaceFW/fineweb-edu", sample, out_dir, tokenizer, processes, shard_tokens, val_every)


if __name__ == "__main__":
    command_line(prepare)
