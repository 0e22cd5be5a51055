"""OpenWebText: 8 million documents, 40 GB of English text from the web, about 9 billion GPT-2 tokens."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))   # the repository, so that the script runs from any folder

from data.convert import CORES, command_line, prepare_text
from data.shards import SHARD_TOKENS

HERE = Path(__file__).resolve().parent


def prepare(out_dir=str(HERE), tokenizer="gpt2", processes=CORES, shard_tokens=SHARD_TOKENS, val_every=2000):
    """Stream Skylion007/openwebtext from the Hugging Face Hub into token shards.

    A killed run goes on where it stopped when the script is run again.

    out_dir       the folder to write to
    tokenizer     a tiktoken encoding, 'bytes', or the path of a tokenizer.json
    processes     how many processes encode
    shard_tokens  at how many tokens a new shard begins
    val_every     one document in so many goes to validation
    """
    prepare_text("Skylion007/openwebtext", None, out_dir, tokenizer, processes, shard_tokens, val_every)


if __name__ == "__main__":
    command_line(prepare)
