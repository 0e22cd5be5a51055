"""Token shards, tokenizers and one folder with a prepare.py for each data set."""
