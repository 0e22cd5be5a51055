"""decode.py, its kernels through Triton's interpreter: the same logits and tokens as model.py's own cached decoding."""
import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import close, name, tiny, tokens

from model import KVCache, sample

decode = pytest.importorskip("decode")
METHODS = [dict(norm_order="post"), dict(connector="denseformer", depth="depth_attention"), dict(connector="attnres", depth="moda"), dict(connector="mhc", qk_norm="full")]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A few tokens fill a program's block, and the longest cache here takes two blocks of each split."""
    monkeypatch.setattr(decode, "BLOCK", 2)
    monkeypatch.setattr(decode, "SPLITS", 2)
    for key in ("block", "splits"):
        monkeypatch.setitem(decode.SETTINGS, key, 2)


@torch.no_grad()
def compare(model, idx, prompt, tolerance=2e-5):
    """The decoder, once its logits for each token behind the prompt are those of model.py's own decoding with a cache."""
    decoder, cache = decode.Decoder(model, len(idx), model.config.block_size, model.embed.weight.dtype), KVCache(model.config, model.config.block_size)
    for start, end in [(0, prompt), *((t, t + 1) for t in range(prompt, idx.shape[1]))]:
        expected = model(idx[:, start:end], cache=cache, last_only=True)[0][:, -1]
        close(decoder.step(model, idx[:, start]) if start else decoder.read(model, idx[:, :end]), expected, tolerance)
    return decoder


@pytest.mark.parametrize("options", METHODS, ids=name)
def test_the_step_that_is_recorded(options):
    model = tiny(dtype=torch.float32, head_dim=8, **options | dict(n_loop=2, n_layer=1))
    assert compare(model, tokens(model, length=3), 2).launch is None


def test_the_step_that_is_recorded_far_into_the_cache():
    model = tiny(dtype=torch.float32, n_layer=1, norm_order="post")
    compare(model, tokens(model, batch=1, length=10), 8)  # in the second step a part of the cache is a block more


ONE_LAUNCH = [dict(n_loop=1), dict(n_loop=1, qk_norm="none", n_head=6), dict(depth="depth_attention", k_norm_after_rope=True, depth_recent_window=1, depth_stride=2),
              dict(n_kv_head=1, depth="depth_attention", depth_stride=1), dict(n_kv_head=4, n_inner=17, head_dim=2, tie_embeddings=True)]


@pytest.mark.parametrize("options, prompt, tile", [*((options, 7, 1024) for options in ONE_LAUNCH), (ONE_LAUNCH[1], 1, 64)],
                         ids=lambda value: name(value) if isinstance(value, dict) else str(value))
def test_all_layers_in_one_launch(options, prompt, tile, monkeypatch):
    """From the first cached token on and across the ends of blocks; a matrix is one tile, and several. The layer is run as several."""
    monkeypatch.setitem(decode.SETTINGS, "tile", tile)
    monkeypatch.setitem(decode.SETTINGS, "warps", 2)
    model = tiny(dtype=torch.float32, **dict(n_layer=1, n_loop=3, head_dim=4) | options)
    assert compare(model, tokens(model, batch=1, length=prompt + 1 + (prompt == 1)), prompt).launch


@pytest.mark.parametrize("options, one_launch", [
    (dict(), True), (dict(depth="depth_attention", n_loop=2), True), (dict(depth="moda"), False), (dict(connector="mhc"), False), (dict(norm_order="post"), False),
    (dict(qk_norm="full"), False), (dict(head_dim=6), False), (dict(depth="depth_attention", depth_stride=1, n_loop=6), False)])
def test_which_models_take_one_launch(options, one_launch):
    model = tiny(**dict(head_dim=4) | options)
    assert decode.one_launch(model, 1) is one_launch and not decode.one_launch(model, 2)


# ----------------------------------------------------------------------------------------------------------------------
# the loop over tokens, with a decoder that is model.py's own

class Plain:
    def __init__(self, config, max_len):
        self.config, self.max_len = config, max_len

    def read(self, model, idx):
        self.cache = KVCache(self.config, self.max_len)
        return model(idx, cache=self.cache, last_only=True)[0][:, -1]

    def step(self, model, token):
        return model(token[:, None], cache=self.cache, last_only=True)[0][:, -1]


@pytest.fixture
def both(monkeypatch):
    """both(model, idx, n, ...) generates greedily with decode.generate, checks that GPT.generate gives the same tokens, and returns them."""
    monkeypatch.setattr(decode, "decoder_for", lambda model, batch, max_len: Plain(model.config, max_len))

    def call(model, idx, n, **options):
        found = decode.generate(model, idx, n, lambda logits: logits.argmax(-1), **options)
        assert torch.equal(found, model.generate(idx, n, temperature=0, **options))
        return found
    return call


@pytest.mark.parametrize("prompt, new", [(3, 0), (1, 1), (3, 14), (8, 2), (9, 2), (20, 29)])
def test_the_loop_gives_the_same_tokens(both, prompt, new):
    """Also beyond the block of 8, where the window moves."""
    model = tiny(block_size=8)
    assert both(model, tokens(model, length=prompt), new).shape == (2, prompt + new)


@pytest.mark.parametrize("look", [1, 4, 100])
def test_the_loop_ends_where_every_row_has(both, monkeypatch, look):
    """However seldom it looks: what it generated behind that is cut off."""
    monkeypatch.setattr(decode, "LOOK", look)
    model = tiny(block_size=32)
    idx = torch.cat([tokens(model, batch=1, length=3, seed=seed) for seed in range(6)])
    free = both(model, idx, 12)
    assert both(model, idx[:1], 12, stop_token=free[0, 7].item()).shape[1] <= 8
    for stop in free[0, 3:8].tolist():
        both(model, idx, 12, stop_token=stop)
    both(model, idx, 5, stop_token=next(token for token in range(23) if token not in free))


def test_draws_are_those_of_multinomial():
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    for seed in range(20):
        found = sample(logits, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(found, torch.multinomial(torch.softmax(logits, -1), 1, generator=torch.Generator().manual_seed(seed))[:, 0])


def test_a_decoder_serves_until_the_model_is_another():
    model = tiny(dtype=torch.float32, block_size=1024)
    with torch.autocast("cpu", torch.bfloat16):
        first = decode.decoder_for(model, 2, 20)
        assert first.weights["layers.0.mlp.down.weight"].dtype == torch.bfloat16 and first.weights["norm.weight"].data_ptr() == model.norm.weight.data_ptr()
        with torch.no_grad():
            model.lm_head.weight += 1
        assert decode.decoder_for(model, 2, 256) is first and torch.equal(first.weights["lm_head.weight"], model.lm_head.weight.bfloat16())
        assert decode.decoder_for(model, 2, 257) is not first  # does not fit
    longer = decode.decoder_for(model, 2, 257)
    assert longer.cache.dtype == torch.float32 and longer.cache.shape[4] == 512  # another dtype
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    assert decode.decoder_for(model, 2, 257) is not longer  # another parameter
    before = len(decode._decoders)
    del model
    gc.collect()
    assert len(decode._decoders) == before - 1


@pytest.mark.slow
@pytest.mark.parametrize("head_dim, dtype, depth", [(32, "bfloat16", "none"), (64, "bfloat16", "depth_attention"), (128, "bfloat16", "none"),
                                                    (128, "float32", "depth_attention"), (256, "bfloat16", "none"), (256, "float32", "none")])
def test_what_one_warp_stores_lies_in_that_warp(head_dim, dtype, depth):
    script = Path(__file__).with_name("compile_decode.py")
    result = subprocess.run([sys.executable, script, str(head_dim), dtype, depth], capture_output=True, text=True)
    assert result.returncode == 0 and int(result.stdout.split()[0]) >= 3, result.stderr[-2000:]
