"""decode.py, its kernels through Triton's interpreter: the same logits and tokens as model.py's own cached decoding."""
import pytest
import torch
from tiny import PAIRS, close, name, tiny, tokens

from model import KVCache

decode = pytest.importorskip("decode")
METHODS = [options for options in PAIRS if options["n_loop"] > 1 and (options["norm_order"] == "post") == (options["depth"] == "none")]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A few tokens fill a program's block, and the longest cache here takes two blocks of each split."""
    monkeypatch.setattr(decode, "BLOCK", 2)
    monkeypatch.setattr(decode, "SPLITS", 2)


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
    model = tiny(dtype=torch.float32, head_dim=8, **options | dict(n_loop=2, n_layer=2))
    assert compare(model, tokens(model, length=4), 2).launch is None


def test_the_step_that_is_recorded_far_into_the_cache():
    model = tiny(dtype=torch.float32, n_layer=1, norm_order="post")
    compare(model, tokens(model, length=11), 4)


ONE_LAUNCH = [dict(), dict(qk_norm="none"), dict(depth="depth_attention"), dict(depth="depth_attention", k_norm_after_rope=True, n_loop=2, depth_recent_window=2),
              dict(n_kv_head=1, depth="depth_attention", depth_stride=1), dict(n_head=6, n_kv_head=2, tie_embeddings=True), dict(n_kv_head=4, n_inner=17, head_dim=2)]


@pytest.mark.parametrize("options", ONE_LAUNCH, ids=lambda options: name(options) or "vanilla")
@pytest.mark.parametrize("prompt, tile", [(1, 256), (7, 1024)])
def test_all_layers_in_one_launch(options, prompt, tile, monkeypatch):
    """From the first cached token on and across the ends of blocks; with one tile for a matrix and with several."""
    monkeypatch.setitem(decode.SETTINGS, "tile", tile)
    model = tiny(dtype=torch.float32, **options)
    assert compare(model, tokens(model, batch=1, length=prompt + 4), prompt).launch
