"""Tokenizers: round trips, special ids, and what travels with a checkpoint."""
import json
import time

import numpy as np
import pytest
import torch

from data import tokenizer
from data.shards import DataError
from data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, JSONTokenizer, tokenizer_from_meta, train_bpe

TEXTS = ["", "def f(x):\n    return x_1 + 'é'\n", "naïve — 日本語 🐍\r\n\ttab  two spaces\n\n\n", "a <|endoftext|> b", "<|endoftext|>",
         "0123456789 __init__ self.__dict__[\"k\"] = {}\n", "e\u0301\u200d\x00\x7f", " " * 300 + "\n" * 40]
CORPUS = [f"class C{i}:\n    def method_{i % 7}(self, value):\n        return self.value + value * {i}\n" for i in range(200)] + TEXTS


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(CORPUS, 400)


@pytest.fixture(scope="module")
def gpt2_like():
    """A byte-pair encoding whose single bytes are not in byte order and whose ids have a gap, as some of tiktoken's do."""
    order = [*range(97, 123), *range(97), *range(123, 256)]
    return BPETokenizer(r"\p{L}+|[^\p{L}]", [bytes([b]) for b in order] + [b"ab", None, b"abc"], {"<|endoftext|>": 257, "<|extra|>": 300})


@pytest.fixture(scope="module")
def neox_like():
    """A byte-level tokenizer.json with a special id and an added one that is not special, as GPT-NeoX's runs of spaces are."""
    tokenizers = pytest.importorskip("tokenizers")
    built = tokenizers.Tokenizer(tokenizers.models.BPE())
    built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=350, special_tokens=["<|endoftext|>", "<|padding|>"], show_progress=False,
                                             initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    built.train_from_iterator(CORPUS, trainer)
    built.add_tokens([tokenizers.AddedToken("    ", special=False)])
    built.enable_truncation(4)                         # a tokenizer.json may carry such settings; they must not cut documents
    built.enable_padding(length=8)
    return JSONTokenizer(built.to_str())


@pytest.fixture(params=["bytes", "bpe", "gpt2_like", "neox_like"])
def any_tokenizer(request):
    return ByteTokenizer() if request.param == "bytes" else request.getfixturevalue(request.param)


@pytest.mark.parametrize("text", TEXTS)
def test_decode_undoes_encode(any_tokenizer, text):
    ids = any_tokenizer.encode(text)
    assert all(type(i) is int and 0 <= i < any_tokenizer.n_vocab for i in ids)
    assert any_tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", TEXTS)
def test_text_never_becomes_a_special_id(any_tokenizer, text):
    assert any_tokenizer.eot is not None and any_tokenizer.eot not in any_tokenizer.encode(text)


@pytest.mark.parametrize("text", TEXTS)
def test_byte_lengths_add_up_to_the_text(any_tokenizer, text):
    lengths = any_tokenizer.byte_lengths()
    assert len(lengths) == any_tokenizer.n_vocab and lengths[any_tokenizer.eot] == 0
    assert lengths[np.array(any_tokenizer.encode(text), int)].sum() == len(text.encode())


def test_special_ids_are_shown_and_padding_ids_are_not(any_tokenizer):
    ids = [*any_tokenizer.encode("a"), any_tokenizer.eot, any_tokenizer.n_vocab, 50303, *any_tokenizer.encode("b")]
    assert any_tokenizer.decode(ids) == "a<|endoftext|>b"


def test_tokens_that_cut_a_character_decode_to_a_replacement(any_tokenizer):
    ids = any_tokenizer.encode("🐍")
    assert len(ids) > 1 and "\ufffd" in any_tokenizer.decode(ids[:1])


def test_meta_is_enough_to_rebuild(any_tokenizer, tmp_path):
    meta = json.loads(json.dumps(any_tokenizer.to_meta()))
    torch.save({"data": meta}, tmp_path / "checkpoint.pt")
    again = tokenizer_from_meta(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["data"], tmp_path / "absent")
    assert (again.n_vocab, again.eot, again.to_meta()) == (any_tokenizer.n_vocab, any_tokenizer.eot, meta)
    for text in TEXTS:
        assert again.encode(text) == any_tokenizer.encode(text)


def test_tokenizer_json_is_read_from_a_file_beside_meta(neox_like, tmp_path):
    (tmp_path / "tokenizer.json").write_text(neox_like.text, encoding="utf-8")
    again = tokenizer_from_meta({"kind": "json", "file": "tokenizer.json"}, tmp_path)
    assert again.encode(TEXTS[1]) == neox_like.encode(TEXTS[1]) and again.to_meta() == {"kind": "json", "json": neox_like.text}
    assert tokenizer.tokenizer_from_name(str(tmp_path / "tokenizer.json")).n_vocab == neox_like.n_vocab
    with pytest.raises(DataError, match="other.json.*cannot be read"):
        tokenizer_from_meta({"kind": "json", "file": "other.json"}, tmp_path)


def test_tokenizer_json_without_byte_level_does_not_know_bytes():
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    built = JSONTokenizer(words.to_str())
    assert built.byte_lengths() is None and built.eot is None
    with pytest.raises(DataError, match="tokenizer.json"):
        JSONTokenizer("{}")


def test_trained_vocabulary_has_the_asked_size_and_is_reproducible(bpe):
    assert bpe.n_vocab == 400 and bpe.eot == 399 and bpe.tokens[:256] == [bytes([i]) for i in range(256)]
    assert train_bpe(CORPUS, 400).to_meta() == bpe.to_meta()
    text = CORPUS[5]
    assert len(bpe.encode(text)) < len(text) / 3
    small = train_bpe(["aaaa"], 5000)
    assert small.n_vocab < 262 and small.eot == small.n_vocab - 1 and small.decode(small.encode("é")) == "é"
    for size in (256, 65537):
        with pytest.raises(DataError, match=f"vocab_size={size}"):
            train_bpe(CORPUS, size)


def test_character_vocabulary_names_what_it_lacks():
    chars = CharTokenizer("ab\né")
    assert chars.encode("é\nab") == [3, 2, 0, 1] and chars.decode([3, 2, 0, 1, 50]) == "é\nab" and chars.eot is None
    assert chars.byte_lengths().tolist() == [1, 1, 1, 2]
    assert tokenizer_from_meta(chars.to_meta()).encode("é") == [3]
    with pytest.raises(DataError, match="'z' is not in the vocabulary"):
        chars.encode("abz")


@pytest.mark.parametrize("meta", [{}, None, {"kind": "words"}, {"kind": "bpe", "pattern": "x"}, {"kind": "char"},
                                  {"kind": "bpe", "pattern": ".", "tokens": [1], "special": {}}, {"kind": "json"},
                                  {"kind": "json", "json": "not json"}])
def test_damaged_meta_is_a_clean_error(meta):
    with pytest.raises(DataError, match="tokenizer"):
        tokenizer_from_meta(meta)


# tiktoken's encodings by name

def test_named_encoding_keeps_its_ids_and_needs_no_second_download(monkeypatch, gpt2_like):
    tiktoken = pytest.importorskip("tiktoken")
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: gpt2_like.encoding)
    loaded = tokenizer_from_meta({"kind": "tiktoken", "name": "gpt2"})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: pytest.fail("a second download"))
    again = tokenizer_from_meta(loaded.to_meta())
    assert again.encode("abcab!") == gpt2_like.encode("abcab!") == [258, 256, gpt2_like.tokens.index(b"!")]
    assert again.special == {"<|endoftext|>": 257, "<|extra|>": 300} and again.n_vocab == 301


def test_named_encoding_without_a_network_says_what_to_do(monkeypatch, tmp_path):
    requests = pytest.importorskip("requests")
    tiktoken = pytest.importorskip("tiktoken")

    def unreachable(url, **options):
        raise requests.ConnectionError("unreachable")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(requests, "get", unreachable)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    for make in (lambda: tokenizer.tokenizer_from_name("gpt2"), lambda: tokenizer_from_meta({"kind": "tiktoken", "name": "gpt2"})):
        with pytest.raises(DataError, match=r"'gpt2'.*ConnectionError.*TIKTOKEN_CACHE_DIR.*data/pystdlib/prepare\.py"):
            make()
    with pytest.raises(DataError, match="no tiktoken encoding 'gpt-two'; there are.*gpt2"):
        tokenizer.tokenizer_from_name("gpt-two")


def test_named_encoding_does_not_hang(monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: time.sleep(3))
    started = time.perf_counter()
    with pytest.raises(DataError, match="TimeoutError.*TIKTOKEN_CACHE_DIR"):
        tokenizer.load_tiktoken("gpt2", seconds=0.1)
    assert time.perf_counter() - started < 2


def test_missing_package_is_named():
    with pytest.raises(DataError, match="A thing needs the Python package not_there.*pip install not_there"):
        tokenizer.need("not_there", "A thing")
