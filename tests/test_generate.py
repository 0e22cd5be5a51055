"""Generation: the window, the cache, sampling rules."""
import math

import pytest
import torch
from tiny import close, tiny, tokens

from model import GPT, GPTConfig, KVCache, sample, window_start


def greedy(model, idx, n, **options):
    return model.generate(idx, n, temperature=0, **options)


METHODS = [dict(connector="mhc", depth="moda"), dict(connector="attnres", depth="depth_attention", n_loop=2), dict(connector="denseformer", depth="depth_attention", depth_recent_window=1)]


@pytest.mark.parametrize("options", METHODS, ids=lambda options: options["connector"])
@pytest.mark.parametrize("prompt, new", [(1, 5), (3, 5), (3, 14), (8, 2), (9, 2), (20, 9)])
def test_same_greedy_tokens_with_and_without_a_cache(options, prompt, new):
    """Also for prompts longer than the block of 8 and for continuations beyond it; and the window is the documented one."""
    model = tiny(block_size=8, **options)
    idx = tokens(model, length=prompt)
    found = greedy(model, idx, new)
    assert found.shape == (2, prompt + new) and torch.equal(found[:, :prompt], idx)
    assert torch.equal(found, greedy(model, idx, new, use_cache=False))
    for length in range(prompt, prompt + new):
        window = found[:, window_start(length, 8):length]
        with torch.no_grad():
            assert torch.equal(model(window, last_only=True)[0][:, -1].argmax(-1), found[:, length])


def test_window_moves_by_half_a_block():
    assert [window_start(length, 16) for length in (1, 16, 17, 24, 25, 32, 33, 100)] == [0, 0, 8, 8, 16, 16, 24, 88]
    for block in (1, 2, 3, 7, 16):
        for length in range(1, 50):
            start = window_start(length, block)
            assert max(1, block - max(1, block // 2)) <= length - start <= block or start == 0 and length <= block
            assert window_start(length + 1, block) >= start


@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_smallest_blocks(block_size):
    model = tiny(block_size=block_size)
    idx = tokens(model, length=1)
    assert torch.equal(greedy(model, idx, 9), greedy(model, idx, 9, use_cache=False))


def test_cache_spares_work():
    """With the cache each token is run once until the window moves, and half a block once a move; without it the window is run for every token."""
    model, counted = tiny(), []
    model.embed.register_forward_hook(lambda module, args, output: counted.append(args[0].shape[1]))
    idx = tokens(model, length=4)
    greedy(model, idx, 12)
    assert counted == [4] + [1] * 11
    counted.clear()
    greedy(model, idx, 22)
    assert counted == [4] + [1] * 12 + [9] + [1] * 7 + [9]
    counted.clear()
    greedy(model, idx, 3, use_cache=False)
    assert counted == [4, 5, 6]


def test_last_only_is_the_last():
    model = tiny()
    idx = tokens(model)
    with torch.no_grad():
        close(model(idx, last_only=True)[0], model(idx)[0][:, -1:], 1e-12)


def test_nothing_to_do():
    model = tiny()
    idx = tokens(model)
    assert torch.equal(model.generate(idx, 0), idx)


def test_generation_keeps_no_graph_and_no_mode():
    model, graphs = tiny(), []
    model.train()
    model.norm.register_forward_hook(lambda module, args, output: graphs.append(output.requires_grad))
    model.generate(tokens(model), 2)
    assert graphs and not any(graphs) and model.training
    assert model(tokens(model), tokens(model))[1].requires_grad and graphs[-1]


# ----------------------------------------------------------------------------------------------------------------------
# stopping


def test_stop_token_ends_each_row_by_itself():
    model = tiny()
    idx = torch.cat([tokens(model, batch=1, length=3, seed=seed) for seed in range(6)])
    free = greedy(model, idx, 10)
    stop = free[0, 5].item()
    found = greedy(model, idx, 10, stop_token=stop)
    ends = []
    for row, expected in zip(found[:, 3:].tolist(), free[:, 3:].tolist()):
        end = expected.index(stop) if stop in expected else len(row)
        ends.append(end)
        assert row[:end] == expected[:end] and set(row[end:]) <= {stop}
    assert len(set(ends)) > 1 and found.shape[1] == 3 + min(10, max(ends) + 1)
    alone = greedy(model, idx[:1], 10, stop_token=stop)  # all rows have ended: nothing more is generated
    assert alone.shape[1] == 3 + ends[0] + 1 < 13


def test_stop_token_in_the_prompt_stops_nothing():
    model = tiny()
    idx = tokens(model, batch=1, length=3)
    free = greedy(model, idx, 4)
    stop = next(token for token in idx[0].tolist() if token not in free[0, 3:].tolist())
    assert torch.equal(greedy(model, idx, 4, stop_token=stop), free)


# ----------------------------------------------------------------------------------------------------------------------
# sampling


def drawn(logits, n=20000, **options):
    """Shares of each token in n draws."""
    logits = torch.tensor(logits).log().expand(n, -1)
    draws = sample(logits, generator=torch.Generator().manual_seed(0), **options)
    return torch.bincount(draws, minlength=logits.shape[1]) / n


P = [0.4, 0.1, 0.3, 0.05, 0.15]


@pytest.mark.parametrize("options, expected", [
    (dict(), P),
    (dict(temperature=0.5), [p**2 / sum(q**2 for q in P) for p in P]),
    (dict(temperature=2.0), [p**0.5 / sum(q**0.5 for q in P) for p in P]),
    (dict(top_k=2), [4 / 7, 0, 3 / 7, 0, 0]),
    (dict(top_k=1), [1, 0, 0, 0, 0]),
    (dict(top_k=0), P), (dict(top_k=5), P), (dict(top_k=100), P),
    (dict(top_p=0.3), [1, 0, 0, 0, 0]),
    (dict(top_p=0.5), [4 / 7, 0, 3 / 7, 0, 0]),
    (dict(top_p=0.8), [4 / 8.5, 0, 3 / 8.5, 0, 1.5 / 8.5]),
    (dict(top_p=1.0), P),
    (dict(top_k=3, top_p=0.8), [4 / 7, 0, 3 / 7, 0, 0]),  # the nucleus of what top_k has left
    (dict(temperature=0.5, top_p=0.5), [1, 0, 0, 0, 0]),  # of the distribution after the temperature: 0.58 for the first
    (dict(temperature=0), [1, 0, 0, 0, 0]), (dict(temperature=1e-40), [1, 0, 0, 0, 0]),
])
def test_distribution(options, expected):
    """Five standard deviations of 20,000 draws; what is excluded never occurs."""
    found, expected = drawn(P, **options), torch.tensor(expected)
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / 20000).sqrt() + 1e-9).all(), found


def test_uniform_logits_are_drawn_uniformly():
    found = drawn([1 / 64] * 64, n=64000)
    chi2 = (64000 * (found - 1 / 64) ** 2 * 64).sum()
    assert abs(chi2 - 63) < 5 * math.sqrt(2 * 63)


def test_samples_differ_and_a_seed_repeats_them():
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    idx = tokens(model, batch=1).expand(16, -1)
    draws = [model.generate(idx, 3, generator=torch.Generator().manual_seed(seed)) for seed in (7, 7, 8)]
    assert len(draws[0][:, -3].unique()) >= 4
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_generator_leaves_the_global_one_alone():
    model = tiny()
    state = torch.get_rng_state()
    model.generate(tokens(model), 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("options, message", [
    (dict(temperature=-0.5), r"temperature=-0.5 must not be negative; 0 takes the most likely token"),
    (dict(temperature=math.nan), r"temperature=nan must not be negative"),
    (dict(top_k=-1), r"top_k=-1 must not be negative; 0 keeps every token"),
    (dict(top_p=0.0), r"top_p=0.0 must be above 0 and at most 1"),
    (dict(top_p=1.5), r"top_p=1.5 must be above 0 and at most 1"),
])
def test_values_that_make_no_sense_are_refused(options, message):
    model = tiny()
    with pytest.raises(ValueError, match=message):
        model.generate(tokens(model), 1, **options)


def test_nothing_to_continue_is_refused():
    model = tiny()
    with pytest.raises(ValueError, match="at least one token"):
        model.generate(torch.empty(2, 0, dtype=torch.long), 1)


# ----------------------------------------------------------------------------------------------------------------------
# limits


def test_a_context_longer_than_the_block_is_refused():
    model = tiny()
    idx = tokens(model, length=17)
    with pytest.raises(ValueError, match="17 tokens is longer than block_size=16"):
        model(idx)
    cache = KVCache(model.config, 16)
    with torch.no_grad():
        model(idx[:, :16], cache=cache)
        with pytest.raises(ValueError, match="17 tokens is longer than block_size=16"):
            model(idx[:, 16:], cache=cache)
        assert cache.length == 16


def test_a_full_cache_is_refused_and_stays_usable():
    model = tiny()
    idx, cache = tokens(model, length=8), KVCache(model.config, 7)
    with torch.no_grad():
        model(idx[:, :6], cache=cache)
        with pytest.raises(ValueError, match="8 tokens do not fit into a KV cache of 7"):
            model(idx[:, 6:], cache=cache)
        close(model(idx[:, 6:7], cache=cache)[0], model(idx[:, :7])[0][:, 6:])


def test_a_cache_of_another_batch_is_refused():
    model = tiny()
    idx, cache = tokens(model), KVCache(model.config, 16)
    with torch.no_grad():
        model(idx, cache=cache)
        with pytest.raises(ValueError, match="a KV cache of 2 sequences cannot continue 1"):
            model(idx[:1], cache=cache)


def test_a_cache_can_be_taken_back():
    """Tokens behind `length` are forgotten: other tokens can take their places."""
    model = tiny(connector="attnres", depth="depth_attention", n_loop=2)
    idx, cache = tokens(model), KVCache(model.config, 16)
    with torch.no_grad():
        model(torch.cat((idx[:, :5], idx[:, :6]), 1), cache=cache)
        cache.length = 5
        close(model(idx[:, 5:], cache=cache)[0], model(idx)[0][:, 5:])


def test_single_token_vocabulary():
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=4, vocab_size=1, block_size=4))
    assert model.generate(torch.zeros(1, 1, dtype=torch.long), 6).tolist() == [[0] * 7]
