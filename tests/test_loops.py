"""A looped model is the unlooped model of all its virtual layers; what attention reads across depth, counted by hand."""
from dataclasses import replace

import pytest
import torch
from tiny import close, config, gradients, name, tiny, tokens

import model as definitions
from model import CONNECTORS, DEPTHS, GPT, KVCache

SHAPES = [dict(n_layer=2, n_loop=3), dict(n_layer=3, n_loop=2, n_prelude=1, n_coda=1)]
VARIANTS = [dict(connector=connector, depth=depth) for connector in CONNECTORS for depth in DEPTHS]
VARIANTS += [dict(connector="attnres", attnres_sources="block_sums", depth="depth_attention"), dict(connector="denseformer", denseformer_period=2, depth="moda", moda_ffn_kv=False),
             dict(depth="depth_attention", depth_stride=3, depth_recent_window=2), dict(depth="moda", norm_order="post", qk_norm="full", tie_embeddings=True)]


def origin(looped, key):
    """The looped model's name of the parameter that an unlooped copy calls `key`."""
    head, index, *rest = key.split(".", 2) if key.startswith("layers.") else (None, None, key)
    if head:
        return f"layers.{looped.order[int(index)]}.{rest[0]}"
    if key.startswith("connector.sites."):
        site, rest = key.removeprefix("connector.sites.").split(".", 1)
        return f"connector.sites.{2 * looped.order[int(site) // 2] + int(site) % 2}.{rest}"
    return key  # embedding, norm, head, and a connector's tables that count virtual layers already


def unrolled(looped):
    """An unlooped model with a layer, holding a copy of the weights, for every virtual layer of `looped`."""
    model = GPT(replace(looped.config, n_layer=len(looped.order), n_loop=1, n_prelude=0, n_coda=0)).double()
    for layer, l in zip(model.layers, looped.order):
        if looped.layers[l].ffn_kv is None:  # a looped model's last layer has no FFN slot in any loop
            layer.ffn_kv = None
    weights = looped.state_dict()
    model.load_state_dict({key: weights[origin(looped, key)] for key in model.state_dict()})
    return model


@pytest.mark.parametrize("shape", SHAPES, ids=name)
@pytest.mark.parametrize("options", VARIANTS, ids=name)
def test_looped_equals_unlooped_copies(options, shape):
    looped = tiny(**options, **shape)
    copy = unrolled(looped)
    idx = tokens(looped)
    with torch.no_grad():
        close(looped(idx)[0], copy(idx)[0], 1e-11)
    loss, shared = gradients(looped, idx[:, :-1], idx[:, 1:])
    loss_of_copy, single = gradients(copy, idx[:, :-1], idx[:, 1:])
    close(loss, loss_of_copy, 1e-12)
    sums = {}
    for key, gradient in single.items():
        sums[origin(looped, key)] = sums.get(origin(looped, key), 0) + gradient
    assert sums.keys() == shared.keys()
    for key, gradient in shared.items():
        close(gradient, sums[key], 1e-10)
    assert looped.flops(8) == copy.flops(8)


def test_order_of_virtual_layers():
    assert config(n_layer=3).virtual_layers == [0, 1, 2]
    assert config(n_layer=3, n_loop=2).virtual_layers == [0, 1, 2, 0, 1, 2]
    assert config(n_layer=4, n_loop=3, n_prelude=1, n_coda=2).virtual_layers == [0, 1, 1, 1, 2, 3]
    assert config(n_layer=3, n_loop=2, n_coda=1).virtual_layers == [0, 1, 0, 1, 2]
    assert config(n_layer=3, n_loop=1, n_prelude=1, n_coda=1).virtual_layers == [0, 1, 2]


@pytest.mark.parametrize("depth", DEPTHS)
def test_one_loop_is_the_unlooped_model(depth):
    plain, once = tiny(depth=depth), tiny(depth=depth, n_loop=1, n_prelude=1, n_coda=1)
    idx = tokens(plain)
    assert torch.equal(plain(idx)[0], once(idx)[0])


@pytest.mark.parametrize("options, expected", [
    (dict(n_layer=4, depth_stride=2), [[], [0], [0], [0, 2]]),
    (dict(n_layer=4, depth_stride=1), [[], [0], [0, 1], [0, 1, 2]]),
    (dict(n_layer=4, depth_stride=3, depth_recent_window=1), [[], [0], [0, 1], [0, 2]]),
    (dict(n_layer=5, depth_stride=4, depth_recent_window=2), [[], [0], [0, 1], [0, 1, 2], [0, 2, 3]]),
    (dict(n_layer=2, n_loop=3, depth_stride=2), [[], [0], [0], [0, 2], [0, 2], [0, 2, 4]]),
    (dict(n_layer=2, n_loop=3, depth_stride=3, depth_recent_window=1), [[], [0], [0, 1], [0, 2], [0, 3], [0, 3, 4]]),
    (dict(n_layer=3, n_loop=2, n_prelude=1, n_coda=1, depth_stride=2), [[], [0], [0], [0, 2]]),
])
def test_depth_attention_reads_these_layers(options, expected, monkeypatch):
    """Candidates of every virtual layer, as a list and as what the mixing step is really given."""
    model = tiny(depth="depth_attention", **options)
    assert model.depth.candidates == expected
    finished, reads = [], []
    heads, mix = definitions.Attention.heads, definitions.depth_mix

    def recorded_heads(self, x, rope, mix=()):
        result = heads(self, x, rope, mix)
        finished.append(result)
        return result

    def recorded_mix(q, k, v, source_k, source_v):
        found = []
        for key, value in zip(source_k, source_v):
            found += [j for j, (_, k_j, v_j) in enumerate(finished) if key is k_j and value is v_j]
        reads.append((len(finished), found))
        assert len(found) == len(source_k) == len(source_v)
        return mix(q, k, v, source_k, source_v)

    monkeypatch.setattr(definitions.Attention, "heads", recorded_heads)
    monkeypatch.setattr(definitions, "depth_mix", recorded_mix)
    model(tokens(model))
    assert dict(reads) == {m: candidates for m, candidates in enumerate(expected) if candidates}
    c = model.config
    assert model.flops(8)["depth"] == 3 * 4 * c.n_kv_head * c.head_dim * sum(len(found) + 1 for _, found in reads)


@pytest.mark.parametrize("options, expected", [
    (dict(n_layer=3), [0, 2, 4]),
    (dict(n_layer=3, moda_ffn_kv=False), [0, 1, 2]),
    (dict(n_layer=3, n_loop=2), [0, 2, 4, 5, 7, 9]),
    (dict(n_layer=3, n_loop=2, moda_ffn_kv=False), [0, 1, 2, 3, 4, 5]),
    (dict(n_layer=3, n_loop=3, n_prelude=1, n_coda=1), [0, 2, 4, 6, 8]),
    (dict(n_layer=1, n_loop=2), [0, 1]),
])
def test_moda_reads_this_many_slots(options, expected, monkeypatch):
    model, counts, joint = tiny(depth="moda", **options), [], definitions.joint_attention
    monkeypatch.setattr(definitions, "joint_attention", lambda q, k, v, slots: (counts.append(len(slots)), joint(q, k, v, slots))[1])
    model(tokens(model))
    assert counts == expected
    assert model.flops(8)["depth"] == 3 * 4 * model.config.n_head * model.config.head_dim * sum(expected)


def test_depth_attention_keeps_what_later_layers_read_only():
    model, past = tiny(depth="depth_attention", n_layer=6, depth_stride=3), {}
    keep = model.depth.keep
    model.depth.keep = lambda m, p, kv, ffn_kv: (past.update({m: kv is not None}), keep(m, p, kv, ffn_kv))
    model(tokens(model))
    assert [m for m, kept in past.items() if kept] == [0, 3]


@pytest.mark.parametrize("depth", DEPTHS)
def test_cache_has_a_slot_for_every_virtual_layer(depth):
    """Keys and mixed values at KV heads, and nothing else: the memory of the unrolled model, whatever attention reads across depth."""
    model = tiny(n_layer=4, n_loop=3, n_prelude=1, depth=depth)
    idx = tokens(model, batch=2, length=5)
    cache = KVCache(model.config, 7)
    with torch.no_grad():
        model(idx, cache=cache)
    assert [slot.k.shape for slot in cache.slots] == [slot.v.shape for slot in cache.slots] == [(2, 2, 7, 6)] * 10


def test_loops_change_the_function():
    once, thrice = tiny(n_layer=2), tiny(n_layer=2, n_loop=3)
    thrice.load_state_dict(once.state_dict())
    idx = tokens(once)
    assert (once(idx)[0] - thrice(idx)[0]).abs().max() > 1e-2
