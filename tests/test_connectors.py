"""Every connector with every depth method, looped or not: decoding, gradients, state dicts; and what each connector is by itself."""
import math

import pytest
import torch
import torch.nn as nn
from tiny import OPTIONS, PAIRS, SIZES, close, config, gradients, name, tiny, tokens

import model as definitions
from model import CONNECTORS, DEPTHS, GPT, Aggregator, GPTConfig, HyperConnection, KVCache, Residual, sinkhorn

# ----------------------------------------------------------------------------------------------------------------------
# all pairs


@pytest.mark.parametrize("options", PAIRS + OPTIONS, ids=name)
def test_decoding_with_a_cache_gives_the_same_logits_for_any_chunks(options):
    model = tiny(**options)
    idx = tokens(model, length=5)
    with torch.no_grad():
        expected = model(idx)[0]
        for chunk in (1, 3, idx.shape[1]):
            cache = KVCache(model.config, idx.shape[1])
            pieces = [model(piece, cache=cache)[0] for piece in idx.split(chunk, dim=1)]
            close(torch.cat(pieces, 1), expected)
            assert cache.length == idx.shape[1] and len(cache.slots) == len(model.order)


def has_no_influence(model, parameter):
    """AttnRes' very first aggregator mixes equal sources (or a single one); the residual map and the read-out of a single stream are always 1."""
    first = parameter.startswith("connector.sites.0.") and model.config.connector == "attnres" and model.order.count(0) == 1
    return first or parameter.endswith(("residual_logits", "alpha_res", "reduce_logits")) and model.config.mhc_num_streams == 1


@pytest.mark.parametrize("options", PAIRS + OPTIONS, ids=name)
def test_every_parameter_has_a_gradient(options):
    model = tiny(**options)
    idx = tokens(model)
    _, found = gradients(model, idx[:, :-1], idx[:, 1:])
    assert found.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    for parameter, gradient in found.items():
        assert gradient.isfinite().all()
        assert has_no_influence(model, parameter) or gradient.abs().max() > 1e-12, f"{parameter} has no influence on the loss"


@pytest.mark.parametrize("options", PAIRS[::2] + OPTIONS[:3], ids=name)
def test_checkpointing_changes_no_gradient(options):
    model = tiny(**options)
    idx = tokens(model, length=3)
    loss, found = gradients(model, idx, idx)
    model.grad_checkpoint = True
    again, recomputed = gradients(model, idx, idx)
    assert torch.equal(again, loss) and recomputed.keys() == found.keys()
    for parameter in found:
        close(recomputed[parameter], found[parameter], 1e-13)


def test_checkpointing_runs_each_layer_twice():
    model, calls = tiny(n_layer=2, n_loop=2, depth="moda", connector="denseformer"), []
    for layer in model.layers:
        layer.attn.register_forward_hook(lambda *_: calls.append(model.grad_checkpoint))
    idx = tokens(model)
    for model.grad_checkpoint in (False, True):
        gradients(model, idx, idx)
    assert calls == [False] * 4 + [True] * 8


@pytest.mark.parametrize("options", PAIRS[::2] + OPTIONS, ids=name)
def test_state_dict_round_trip_and_keys_under_loops(options):
    model, other = tiny(**options), tiny(seed=5, **options)
    idx = tokens(model, batch=1, length=2)
    with torch.no_grad():
        assert not torch.equal(other(idx)[0], model(idx)[0])
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(idx)[0], model(idx)[0])
    with torch.device("meta"):
        unlooped = GPT(config(**options | {"n_loop": 1}))
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    expected = {key: value.shape for key, value in unlooped.state_dict().items()}
    if model.config.connector == "denseformer":  # one row of coefficients a virtual layer: the packed vector is longer, by exactly those
        k, p, M = model.config.denseformer_dilation, model.config.denseformer_period, len(model.order)
        expected["connector.alpha"] = torch.Size([sum(t // k + 1 for t in range(p, M + 1, p))])
    assert shapes == expected
    extra = model.num_params() - unlooped.num_params()
    assert extra == 0 if model.config.connector != "denseformer" else extra == len(model.connector.alpha) - len(unlooped.connector.alpha)


# ----------------------------------------------------------------------------------------------------------------------
# DenseFormer


def plain(**options):
    """A model at its initial values, in float64."""
    torch.manual_seed(0)
    return GPT(config(**options)).double()


@pytest.mark.parametrize("options", [dict(denseformer_dilation=1), dict(denseformer_dilation=2, denseformer_period=2, n_loop=2), dict(denseformer_period=9)], ids=name)
@pytest.mark.parametrize("depth", DEPTHS)
def test_denseformer_starts_as_the_plain_transformer(depth, options):
    model, residual = plain(connector="denseformer", depth=depth, **options), plain(depth=depth, **options)
    residual.load_state_dict({key: value for key, value in model.state_dict().items() if key != "connector.alpha"})
    idx = tokens(model)
    assert torch.equal(model(idx)[0], residual(idx)[0])


@pytest.mark.parametrize("dilation, period", [(1, 1), (2, 1), (3, 2), (1, 4)])
def test_denseformer_averages_the_outputs_of_whole_layers(dilation, period):
    model = tiny(connector="denseformer", n_layer=5, denseformer_dilation=dilation, denseformer_period=period)
    idx = tokens(model)
    rope, alpha, x = rope_of(model, idx), model.connector.alpha.tolist(), [model.embed(idx)]
    y = x[0]
    for t, layer in enumerate(model.layers, start=1):
        y = y + layer.attn(layer.attn_norm(y), rope)[0]
        y = y + layer.mlp(layer.mlp_norm(y))
        x.append(y)
        if t % period == 0:
            sources = [j for j in range(t + 1) if j % dilation == t % dilation]
            row, alpha = alpha[:len(sources)], alpha[len(sources):]
            y = sum(a * x[j] for a, j in zip(row, sources))
    assert not alpha
    close(model.lm_head(model.norm(y)), model(idx)[0])


def test_denseformer_without_an_average_has_nothing_to_train():
    model = GPT(config(connector="denseformer", denseformer_period=4))
    assert model.connector.alpha.shape == (0,) and not model.connector.alpha.requires_grad


# ----------------------------------------------------------------------------------------------------------------------
# AttnRes


def rope_of(model, idx):
    return model.cos[:idx.shape[1]], model.sin[:idx.shape[1]]


def mixed(aggregator, sources):
    """Softmax over depth as the equation reads: <q, RMS_w(s)> for each source, the last one with the bias."""
    scores = [(aggregator.pseudo_query * aggregator.norm.weight * s / (s.square().mean(-1, keepdim=True) + aggregator.norm.eps).sqrt()).sum(-1) for s in sources]
    if aggregator.recency_bias is not None:
        scores[-1] = scores[-1] + aggregator.recency_bias
    weights = torch.stack(scores).softmax(0)
    return (weights.unsqueeze(-1) * torch.stack(sources)).sum(0)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 6, 12])
def test_attnres_block_sums_are_sums_of_sub_layer_outputs(block_size):
    model = tiny(connector="attnres", attnres_sources="block_sums", attnres_block_size=block_size)
    idx = tokens(model)
    rope, blocks, outputs = rope_of(model, idx), [model.embed(idx)], []
    for site in range(2 * model.config.n_layer):
        layer = model.layers[site // 2]
        h = mixed(model.connector.sites[site], blocks + ([sum(outputs)] if outputs else []))
        outputs.append(layer.mlp(layer.mlp_norm(h)) if site % 2 else layer.attn(layer.attn_norm(h), rope)[0])
        if len(outputs) == block_size:
            blocks, outputs = blocks + [sum(outputs)], []
    assert len(blocks) == 1 + 6 // block_size
    h = mixed(model.connector.final, blocks + ([sum(outputs)] if outputs else []))
    close(model.lm_head(model.norm(h)), model(idx)[0])


def test_attnres_reads_these_sources(monkeypatch):
    """Sources a read, by hand: embedding, snapshots, stream. Block 3 is rounded up to two whole layers, counted over virtual layers."""
    counts, forward = [], Aggregator.forward
    monkeypatch.setattr(Aggregator, "forward", lambda self, sources: (counts.append(len(sources)), forward(self, sources))[1])
    for options, expected in ((dict(attnres_block_size=3), [2, 2, 2, 2, 3, 3, 3]), (dict(attnres_block_size=2), [2, 2, 3, 3, 4, 4, 5]),
                              (dict(attnres_block_size=3, n_layer=2, n_loop=2), [2, 2, 2, 2, 3, 3, 3, 3, 4]),
                              (dict(attnres_block_size=3, attnres_sources="block_sums"), [1, 2, 2, 2, 3, 3, 3]),
                              (dict(attnres_block_size=1, attnres_sources="block_sums"), [1, 2, 3, 4, 5, 6, 7])):
        model = tiny(connector="attnres", **options)
        counts.clear()
        model(tokens(model))
        assert counts == expected
        assert model.flops(8)["connector"] == 3 * 6 * model.config.n_embd * sum(expected)


@pytest.mark.parametrize("n", [1, 2, 6, 9])
def test_attnres_starts_with_most_weight_on_the_stream(n):
    aggregator = Aggregator(config(connector="attnres"), bias=True).double()
    sources = [torch.eye(n + 1, 10, dtype=torch.float64)[i] for i in range(n + 1)]  # one-hot: the mix is the weights
    weights = aggregator(sources)
    close(weights[n], torch.tensor(math.exp(3) / (math.exp(3) + n), dtype=torch.float64), 1e-12)
    close(weights[:n], torch.full((n,), 1 / (math.exp(3) + n), dtype=torch.float64), 1e-12)


# ----------------------------------------------------------------------------------------------------------------------
# mHC


def test_sinkhorn_normalises_columns_last():
    logits = 2 * torch.randn(3, 5, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for iters in (1, 20):
        m = sinkhorn(logits, iters)
        assert (m > 0).all()
        close(m.sum(-2), torch.ones(3, 5, 4, dtype=torch.float64), 1e-12)
    assert 1e-9 < (m.sum(-1) - 1).abs().max() < 1e-2 < (sinkhorn(logits, 1).sum(-1) - 1).abs().max()
    close(sinkhorn(logits, 500).sum(-1), torch.ones(3, 5, 4, dtype=torch.float64), 1e-6)
    rows_first = logits.exp() / logits.exp().sum(-1, keepdim=True)
    close(sinkhorn(logits, 1), rows_first / rows_first.sum(-2, keepdim=True), 1e-12)
    close(sinkhorn(logits + 2000, 20), m, 1e-10)  # the shift keeps exp in range


def test_sinkhorn_of_one_and_two_streams():
    one = torch.randn(5, 1, 1, dtype=torch.float64, requires_grad=True)
    assert torch.equal(sinkhorn(one, 20), torch.ones_like(one))
    assert not torch.autograd.grad(sinkhorn(one, 20).sum(), one)[0].any()
    two = sinkhorn(torch.randn(5, 2, 2, dtype=torch.float64), 300)
    close(two, two.mT, 1e-6)


def maps_of(site, streams):
    """pre [B,T,n], post [B,T,n] and res [B,T,n,n] of streams [B,T,n,C]."""
    pre, post, res = site(streams).split([site.n, site.n, site.n**2], -1)
    return pre, post, res.unflatten(-1, (site.n, site.n))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_mhc_maps_at_the_start(n):
    site = HyperConnection(config(connector="mhc", mhc_num_streams=n, mhc_alpha_init=0.0, mhc_sinkhorn_iters=20)).double()
    pre, post, res = maps_of(site, torch.randn(2, 5, n, 10, dtype=torch.float64))
    close(pre, torch.full((2, 5, n), 1 / n, dtype=torch.float64), 2e-6)
    close(post, torch.ones(2, 5, n, dtype=torch.float64), 1e-12)
    off = 0.01 / (n - 1) if n > 1 else 0.0
    close(res, (torch.full((n, n), off).fill_diagonal_(1.0 if n == 1 else 0.99)).double().expand(2, 5, n, n), 1e-6)


def test_mhc_maps_are_functions_of_the_normed_streams():
    site = tiny(connector="mhc", mhc_num_streams=3).connector.sites[1]
    streams = torch.randn(2, 5, 3, 10, dtype=torch.float64)
    z = streams.flatten(2)
    y = (site.norm.weight * z / (z.square().mean(-1, keepdim=True) + site.norm.eps).sqrt()) @ site.projection.weight.T
    pre, post, res = maps_of(site, streams)
    close(pre, torch.sigmoid(site.alpha_pre * y[..., :3] + site.pre_logits))
    close(post, 2 * torch.sigmoid(site.alpha_post * y[..., 3:6] + site.post_logits))
    close(res, sinkhorn((site.alpha_res * y[..., 6:]).reshape(2, 5, 3, 3) + site.residual_logits, site.iters))


def test_mhc_starts_close_to_the_plain_transformer():
    for alpha, bounds in ((0.0, (0, 1e-6)), (0.01, (1e-6, 0.05))):
        model = plain(connector="mhc", mhc_alpha_init=alpha, mhc_sinkhorn_iters=20, init_std=0.1)
        residual = plain(init_std=0.1)
        residual.load_state_dict({key: value for key, value in model.state_dict().items() if not key.startswith("connector.")})
        idx = tokens(model)
        difference = (model(idx)[0] - residual(idx)[0]).norm() / residual(idx)[0].norm()
        assert bounds[0] <= difference <= bounds[1], difference


@pytest.mark.parametrize("n", [1, 3])
def test_mhc_moves_streams_by_its_maps(n):
    """With one stream: x <- x + post F(pre x)."""
    model = tiny(connector="mhc", mhc_num_streams=n)
    idx = tokens(model)
    rope, streams = rope_of(model, idx), torch.stack([model.embed(idx)] * n, -1)  # [B,T,C,n]
    for site in range(2 * model.config.n_layer):
        layer = model.layers[site // 2]
        pre, post, res = maps_of(model.connector.sites[site], streams.transpose(-1, -2))
        assert n > 1 or torch.equal(res, torch.ones_like(res)) and (post > 0).all() and (post < 2).all()
        h = (streams @ pre.unsqueeze(-1)).squeeze(-1)
        u = layer.mlp(layer.mlp_norm(h)) if site % 2 else layer.attn(layer.attn_norm(h), rope)[0]
        streams = streams @ res.mT + u.unsqueeze(-1) * post.unsqueeze(-2)  # X_i = sum_j res[i,j] X_j + post[i] u
    close(model.lm_head(model.norm(streams @ model.connector.reduce_logits.softmax(0))), model(idx)[0])


# ----------------------------------------------------------------------------------------------------------------------
# a connector of one's own, as the README says


class Gated(Residual):
    """x <- x + g F(x) with a learned g for every sub-layer (ReZero, arXiv 2003.04887; here from g = 1)."""

    def __init__(self, config):
        super().__init__(config)
        self.sites = nn.ParameterList(nn.Parameter(torch.ones(())) for _ in range(2 * config.n_layer))

    def write(self, carry, u, site):
        return super().write(carry, site * u, site)


@pytest.fixture
def gated(monkeypatch):
    monkeypatch.setitem(definitions.CONNECTORS, "gated", Gated)


def test_a_connector_defined_elsewhere_trains_and_decodes(gated):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SIZES | dict(connector="gated", depth="depth_attention", n_loop=2, init_std=0.1)))
    assert model.num_params() == GPT(config()).num_params() + 6
    optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95), "cpu")
    idx, losses = tokens(model, batch=4, length=13), []
    for _ in range(3):
        losses.append(model(idx[:, :-1], idx[:, 1:])[1])
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[0] > losses[1] > losses[2]
    assert all(gate != 1 for gate in model.connector.sites)
    model.double()
    assert torch.equal(model.generate(idx, 8, temperature=0), model.generate(idx, 8, temperature=0, use_cache=False))


def test_gates_of_one_are_the_plain_residual_stream(gated):
    model, residual = plain(connector="gated"), plain()
    idx = tokens(model)
    with torch.no_grad():
        assert torch.equal(model(idx)[0], residual(idx)[0])
        model.connector.sites[3].fill_(0.5)
        assert not torch.equal(model(idx)[0], residual(idx)[0])


def test_the_two_axes_have_these_names():
    assert list(CONNECTORS) == ["residual", "denseformer", "attnres", "mhc"] and list(DEPTHS) == ["none", "depth_attention", "moda"]
