"""Tokenizers: bytes, characters, byte-pair encodings (trained here, or tiktoken's by name) and tokenizer.json files.

All have the same few members: `encode(text) -> list[int]`, `decode(ids) -> str`, `n_vocab`, `eot` (the id that separates
documents, or None), `byte_lengths()` (how many bytes of text each id stands for, 0 for special ids: an int64 array [n_vocab], or
None where that is not known) and `to_meta()`, a plain dict that travels in meta.json and in checkpoints, and from which
`tokenizer_from_meta` makes the tokenizer again without any other file and without the network.

`encode` treats its text as text. If a document contains the characters <|endoftext|>, they are encoded as characters, never as
the special id: only the separators that a prepare script puts between documents are separators. `decode` shows special ids by
their names and ids outside the vocabulary (a model's may be padded to a round size) not at all.
"""
import importlib
import json
import threading
from pathlib import Path

import numpy as np

from data.shards import DataError

END_OF_TEXT = "<|endoftext|>"
ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")   # as tokenizer.json files call it
FETCH_SECONDS = 60                                                # how long the download of a tiktoken encoding may take

# Where text is cut into pieces before byte pairs are merged; no token crosses a cut. Made for source code: a word takes along the
# one space, dot, bracket, quote or underscore before it, and a line break is one piece with the indentation that follows.
PATTERN = r"(?: |[^\s\p{L}\p{M}\p{N}])?[\p{L}\p{M}]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}]+|\s+"


def need(module, purpose):
    """Import an optional package, or raise DataError that says what it is needed for."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"{purpose} needs the Python package {module}, which cannot be imported ({error}); run: pip install {module}") from error


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, and 256 for the end of a text. It needs no training and encodes any text."""
    n_vocab = 257
    eot = 256

    def encode(self, text):
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids):
        names = {self.eot: END_OF_TEXT.encode()}
        return b"".join(bytes([i]) if i < 256 else names.get(i, b"") for i in ids).decode("utf-8", errors="replace")

    def byte_lengths(self):
        return np.array([1] * 256 + [0])

    def to_meta(self):
        return {"kind": "bytes"}


class CharTokenizer:
    """One id a character, in the order of `chars`, and no end of text: the tokenizer of nanoGPT's character-level data sets."""
    eot = None

    def __init__(self, chars):
        self.chars = list(chars)
        self.n_vocab = len(self.chars)
        self.ids = {char: i for i, char in enumerate(self.chars)}

    def encode(self, text):
        try:
            return [self.ids[char] for char in text]
        except KeyError as error:
            raise DataError(f"The character {error.args[0]!r} is not in the vocabulary of this character-level tokenizer, which knows "
                            f"{''.join(self.chars)!r}; leave it out of the text.") from None

    def decode(self, ids):
        return "".join(self.chars[i] for i in ids if i < self.n_vocab)

    def byte_lengths(self):
        return np.array([len(char.encode("utf-8", errors="replace")) for char in self.chars])

    def to_meta(self):
        return {"kind": "char", "chars": self.chars}


class BPETokenizer:
    """A byte-pair encoding, run by tiktoken.

    pattern   the regular expression whose matches are the pieces of a text
    tokens    list of bytes: the token of each id, lower ids being merged first; None where an id is special or not used
    special   dict from name to id of the ids that encode never gives
    """
    def __init__(self, pattern, tokens, special):
        tiktoken = need("tiktoken", "A byte-pair encoding")
        self.pattern, self.tokens, self.special = pattern, list(tokens), dict(special)
        ranks = {token: i for i, token in enumerate(self.tokens) if token is not None}
        self.encoding = tiktoken.Encoding("bpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens=self.special)
        self.n_vocab = self.encoding.n_vocab
        self.eot = self.special.get(END_OF_TEXT)
        self.shown = [b"" if token is None else token for token in self.tokens] + [b""] * (self.n_vocab - len(self.tokens))
        for name, i in self.special.items():
            self.shown[i] = name.encode()

    def encode(self, text):
        return self.encoding.encode_ordinary(text)

    def decode(self, ids):
        return b"".join(self.shown[i] for i in ids if i < self.n_vocab).decode("utf-8", errors="replace")

    def byte_lengths(self):
        lengths = np.zeros(self.n_vocab, np.int64)
        lengths[:len(self.tokens)] = [len(token or b"") for token in self.tokens]
        return lengths

    def to_meta(self):
        # JSON has no bytes; as Latin-1 each byte is one character, and most tokens can still be read
        tokens = [None if token is None else token.decode("latin-1") for token in self.tokens]
        return {"kind": "bpe", "pattern": self.pattern, "special": self.special, "tokens": tokens}

    @classmethod
    def from_meta(cls, meta):
        return cls(meta["pattern"], [None if token is None else token.encode("latin-1") for token in meta["tokens"]], meta["special"])


def train_bpe(texts, vocab_size, pattern=PATTERN):
    """Train a byte-pair encoding on an iterable of texts: the 256 bytes, merges, and <|endoftext|> as the last id.

    `vocab_size` counts all of them (257 to 65,536). The result has fewer ids if the texts do not offer as many pairs to merge.
    Returns a BPETokenizer; equal texts give equal tokenizers.
    """
    if not 257 <= vocab_size <= 65536:
        raise DataError(f"vocab_size={vocab_size} was given, but bytes, merges and end of text in uint16 shards make 257 to 65,536 ids.")
    trainer = need("rustbpe", "Training a byte-pair encoding").Tokenizer()
    trainer.train_from_iterator(iter(texts), vocab_size - 1, pattern=pattern)
    tokens = [bytes(token) for token, _ in sorted(trainer.get_mergeable_ranks(), key=lambda item: item[1])]
    return BPETokenizer(pattern, tokens, {END_OF_TEXT: len(tokens)})


def load_tiktoken(name, seconds=FETCH_SECONDS):
    """tiktoken's encoding of that name, such as 'gpt2', as a BPETokenizer. tiktoken downloads it unless it is in its cache.

    Raises DataError, naming what to do without a network, if the encoding cannot be had within `seconds`.
    """
    tiktoken = need("tiktoken", f"The encoding {name!r}")
    if name not in tiktoken.list_encoding_names():
        raise DataError(f"There is no tiktoken encoding {name!r}; there are {', '.join(sorted(tiktoken.list_encoding_names()))}.")
    outcome = [TimeoutError(f"no answer within {seconds} seconds")]

    def fetch():
        try:
            outcome[0] = tiktoken.get_encoding(name)
        except Exception as error:                     # whatever it is, it is raised below, in the thread that waits
            outcome[0] = error

    # tiktoken sets no time limit itself, and where a firewall swallows packets it would hang for minutes
    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(seconds)
    encoding = outcome[0]
    if not isinstance(encoding, tiktoken.Encoding):
        raise DataError(f"The tiktoken encoding {name!r} is not in tiktoken's cache and could not be downloaded ({type(encoding).__name__}). "
                        "Without a network, set TIKTOKEN_CACHE_DIR to a cache folder copied from a machine where the encoding has been used, or "
                        "choose a tokenizer that needs no download: 'bytes', a tokenizer.json file, or what data/pystdlib/prepare.py trains.")
    ranks = encoding._mergeable_ranks                  # tiktoken's README extends encodings by these same members
    tokens = [None] * (max(ranks.values()) + 1)
    for token, i in ranks.items():
        tokens[i] = token
    return BPETokenizer(encoding._pat_str, tokens, encoding._special_tokens)


class JSONTokenizer:
    """The tokenizer of a tokenizer.json file, run by the package `tokenizers`; `text` is the file's content.

    This is the form of GPT-NeoX's tokenizer, which the Pile checkpoints use.
    """
    def __init__(self, text):
        tokenizers = need("tokenizers", "A tokenizer.json file")
        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:                     # the package raises bare Exception
            raise DataError(f"Expected the content of a tokenizer.json file, found something else ({error}).") from error
        self.text = text
        self.tokenizer.encode_special_tokens = True    # the name of a special id within a text is text
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.n_vocab = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        ids = (self.tokenizer.token_to_id(name) for name in ENDS_OF_TEXT)
        self.eot = next((i for i in ids if i is not None), None)

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        return self.tokenizer.decode([i for i in ids if i < self.n_vocab], skip_special_tokens=False)

    def byte_lengths(self):
        """Known for byte-level vocabularies only: there each character of a token's name stands for one byte."""
        decoder = json.loads(self.text).get("decoder") or {}
        if "ByteLevel" not in [part.get("type") for part in (decoder, *decoder.get("decoders", ()))]:
            return None
        lengths = np.zeros(self.n_vocab, np.int64)
        for token, i in self.tokenizer.get_vocab(with_added_tokens=False).items():
            lengths[i] = len(token)
        for i, added in self.tokenizer.get_added_tokens_decoder().items():
            lengths[i] = 0 if added.special else len(added.content.encode())
        return lengths

    def to_meta(self):
        return {"kind": "json", "json": self.text}


def tokenizer_from_meta(meta, base_dir="."):
    """The tokenizer that a dict from meta.json or from a checkpoint describes.

    {"kind": "bytes"}; {"kind": "char", "chars"}; {"kind": "bpe", "pattern", "special", "tokens"}; {"kind": "tiktoken", "name"};
    {"kind": "json", "json": content} or {"kind": "json", "file": name in base_dir}. Raises DataError for anything else.
    """
    try:
        kind = meta["kind"]
        if kind == "bytes":
            return ByteTokenizer()
        if kind == "char":
            return CharTokenizer(meta["chars"])
        if kind == "bpe":
            return BPETokenizer.from_meta(meta)
        if kind == "tiktoken":
            return load_tiktoken(meta["name"])
        if kind == "json":
            return JSONTokenizer(meta["json"]) if "json" in meta else json_tokenizer_from_file(Path(base_dir) / meta["file"])
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"The description of the tokenizer is incomplete or damaged ({error!r}); run the data set's prepare.py again.") from error
    raise DataError(f"The description of the tokenizer has kind {kind!r}, expected bytes, char, bpe, tiktoken or json.")


def same_ids(a, b):
    """Whether ids mean the same to two tokenizers, also of different kinds: an exported run's tokenizer.json is its byte-pair encoding."""
    if a.to_meta() == b.to_meta():
        return True
    return (a.n_vocab, a.eot) == (b.n_vocab, b.eot) and all(a.decode([i]) == b.decode([i]) for i in range(a.n_vocab))


def json_tokenizer_from_file(path):
    """The JSONTokenizer of a tokenizer.json file."""
    try:
        return JSONTokenizer(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: the tokenizer file cannot be read ({error.strerror}).") from error


def tokenizer_from_name(name):
    """The tokenizer that a user names on a command line: 'bytes', the path of a tokenizer.json, or a tiktoken encoding such as 'gpt2'."""
    if name == "bytes":
        return ByteTokenizer()
    return json_tokenizer_from_file(name) if name.endswith(".json") else load_tiktoken(name)
