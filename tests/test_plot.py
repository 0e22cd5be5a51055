"""Figures: the weights that they show against what the model computes, where each number stands in them, and the curves of a log."""
import json
import math

import numpy as np
import pytest
import torch

import model as decoder
import plot
import train
from model import GPT, GPTConfig

SHAPE = dict(n_layer=4, n_head=4, n_kv_head=2, n_embd=32, block_size=24, vocab_size=50, init_std=0.2, mhc_sinkhorn_iters=4)


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plot.plt.close("all")


def make_model(**fields):
    torch.manual_seed(1)
    model = GPT(GPTConfig(**SHAPE | fields)).eval()
    for name, p in model.named_parameters():
        if name.startswith("connector"):
            p.data += 0.2 * torch.randn_like(p)
    return model


def ids(*shape, seed=0):
    return torch.randint(0, SHAPE["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def image(fig, panel=0):
    """The numbers of a figure's panel, row 0 at the bottom, NaN where there is nothing."""
    return np.ma.filled(fig.axes[panel].images[0].get_array(), np.nan)


def names(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


# ----------------------------------------------------------------------------------------------------------------------
# the weights are those that the model uses

def test_depth_attention_weights_reproduce_the_mixed_values():
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    keys, values = [torch.randn(2, 2, 5, 8) for _ in range(3)], [torch.randn(2, 2, 5, 8) for _ in range(3)]
    a = plot.depth_attention_weights(q, k, keys)
    assert a.shape == (4, 2, 2, 5)
    torch.testing.assert_close(a.sum(0), torch.ones(2, 2, 5).double())
    mixed = (a.unsqueeze(-1) * torch.stack([*values, v])).sum(0)
    torch.testing.assert_close(mixed.float(), decoder.depth_mix(q, k, v, keys, values))


def test_moda_weights_are_the_masses_of_the_joint_softmax():
    """Values that are one-hot vectors, the same for all sequence positions and another one for each slot, turn the output into the masses."""
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    keys, one_hot = [torch.randn(2, 2, 6, 8) for _ in range(3)], torch.eye(8)
    out = decoder.moda_attention(q, k, one_hot[0].expand_as(k), keys, [one_hot[l + 1].expand_as(k) for l in range(3)])
    masses = plot.moda_weights(q, k, keys)
    torch.testing.assert_close(masses.movedim(0, -1).float(), out[..., :4])
    torch.testing.assert_close(masses.sum(0), torch.ones(2, 4, 6).double())


@pytest.mark.parametrize("bias", [True, False])
def test_attnres_weights_reproduce_the_mix(bias):
    site = decoder.Aggregator(GPTConfig(**SHAPE), bias)
    for p in site.parameters():
        torch.nn.init.normal_(p)
    sources = [torch.randn(2, 5, 32) for _ in range(3)]
    a = plot.attnres_weights(site, sources)
    torch.testing.assert_close(a.sum(0), torch.ones(2, 5).double())
    torch.testing.assert_close(sum(w.unsqueeze(-1) * s for w, s in zip(a, sources)).float(), site(sources))


def test_mhc_records_the_maps_that_the_layer_gets():
    model, seen = make_model(connector="mhc"), []
    for site in model.connector.sites:
        site.register_forward_hook(lambda module, args, maps: seen.append(maps))
    weights = plot.mean_weights(model, [ids(2, 9)])["mhc"]
    assert len(weights) == len(seen) == 8
    for w, maps in zip(weights, seen):
        np.testing.assert_allclose(w, maps.mean((0, 1)).detach(), rtol=1e-5)
        np.testing.assert_allclose(w[8:].reshape(4, 4).sum(0), 1, rtol=1e-5)


def test_weights_of_models_whose_scores_are_known():
    """With queries of zero every source weighs the same: 1 of N+1 in Depth-Attention, and in MoDA at position t the L slots share L of t+1+L."""
    model = make_model(depth="depth_attention", depth_stride=1)
    moda = make_model(depth="moda", moda_ffn_kv=False)
    for layer in (*model.layers, *moda.layers):
        layer.attn.qkv.weight.data[:32] = 0
    for m, w in enumerate(plot.mean_weights(model, [ids(2, 9)])["depth_attention"], 1):
        np.testing.assert_allclose(w, np.full((m + 1, 2), 1 / (m + 1)), rtol=1e-6)
    for m, w in enumerate(plot.mean_weights(moda, [ids(2, 9)])["moda"]):
        np.testing.assert_allclose(w[0], np.mean([(t + 1) / (t + 1 + m) for t in range(9)]), rtol=1e-6)
        np.testing.assert_allclose(w[1:], np.mean([1 / (t + 1 + m) for t in range(9)]), rtol=1e-6)
    torch.manual_seed(0)
    w = plot.mean_weights(GPT(GPTConfig(**SHAPE | dict(connector="attnres", attnres_block_size=4))), [ids(2, 9)])["attnres"]
    assert [len(row) for row in w] == [2] * 4 + [3] * 4 + [4]  # the embedding, a snapshot every 2 layers, the stream
    np.testing.assert_allclose(w[-1], np.array([1, 1, 1, math.e**3]) / (3 + math.e**3), rtol=1e-6)


METHODS = [dict(depth="depth_attention", depth_stride=2), dict(depth="moda"), dict(connector="attnres", attnres_block_size=2), dict(connector="mhc")]


@pytest.mark.parametrize("fields", [*METHODS, dict(depth="moda", connector="attnres", n_loop=2, attnres_sources="block_sums", attnres_block_size=3)])
def test_means_are_over_tokens_not_batches(fields):
    model, a, b = make_model(**fields), ids(3, 20), ids(1, 7, seed=1)
    both, only_a, only_b = (plot.mean_weights(model, batches) for batches in ([a, b], [a], [b]))
    assert both.keys() == {name for name in (fields.get("depth"), fields.get("connector")) if name}
    for name, calls in both.items():
        for mean, x, y in zip(calls, only_a[name], only_b[name]):
            np.testing.assert_allclose(mean, (60 * x + 7 * y) / 67, rtol=1e-9)


@pytest.mark.parametrize("fields", METHODS)
def test_recording_changes_nothing(fields):
    model, x = make_model(**fields), ids(2, 12)
    functions = [decoder.depth_mix, decoder.joint_attention, decoder.Aggregator.forward, decoder.HyperConnection.forward, decoder.use_kernels]
    with torch.no_grad():
        before = model(x)[0]
        with plot.recording(model.config) as made:
            during = model(x)[0]
        assert made and torch.equal(before, during) and torch.equal(before, model(x)[0])
    with pytest.raises(ZeroDivisionError), plot.recording(model.config):
        assert not decoder.use_kernels
        raise ZeroDivisionError
    assert functions == [decoder.depth_mix, decoder.joint_attention, decoder.Aggregator.forward, decoder.HyperConnection.forward, decoder.use_kernels]


# ----------------------------------------------------------------------------------------------------------------------
# each number stands where the axes say

def test_depth_attention_figure():
    model = make_model(depth="depth_attention", depth_stride=3, depth_recent_window=1, n_layer=5)
    weights = plot.mean_weights(model, [ids(2, 12)])["depth_attention"]
    fig = plot.plot_depth_attention(model, weights, "a title", 7.0, heads=True)
    ax = fig.axes[0]
    assert fig.get_suptitle() == "a title" and names(ax.xaxis) == ["1", "2", "3", "4"]
    assert names(ax.yaxis) == ["layer 0", "layer 1", "layer 2", "layer 3", "itself"]
    shown = image(fig)
    np.testing.assert_allclose(np.nansum(shown, 0), 1)
    for column, sources in enumerate([[0], [0, 1], [0, 2], [0, 3]]):
        np.testing.assert_allclose(shown[[*sources, 4], column], weights[column].mean(1))
        assert np.isnan(np.delete(shown[:, column], [*sources, 4])).all()
    for head in (0, 1):
        np.testing.assert_allclose(image(fig, 1 + head)[4], [w[-1, head] for w in weights])


def test_moda_figure():
    model = make_model(depth="moda", n_layer=3, n_loop=2)
    weights = plot.mean_weights(model, [ids(2, 12)])["moda"]
    fig = plot.plot_moda(model, weights, "", 7.0)
    np.testing.assert_allclose(image(fig).sum(0), 1)
    np.testing.assert_allclose(image(fig)[0], [w[0].mean() for w in weights])
    slots, shown = [0, 1, 2, 3, 4, 6, 7, 8, 9], image(fig, 1)  # the last physical layer, virtual layers 2 and 5, has no FFN slot
    assert fig.axes[1].get_xlabel() == "Virtual layer that attends"
    for m, count in enumerate([0, 2, 4, 5, 7, 9]):
        np.testing.assert_allclose(shown[slots[:count], m], weights[m][1:].mean(1))
        assert np.isfinite(shown[:, m]).sum() == count


@pytest.mark.parametrize("sources, rows", [("snapshots", ["embedding", "after layer 1", "after layer 3", "current"]),
                                           ("block_sums", ["embedding", "block 1", "block 2", "current"])])
def test_attnres_figure(sources, rows):
    block = 3 if sources == "block_sums" else 4
    model = make_model(connector="attnres", attnres_sources=sources, attnres_block_size=block)
    weights = plot.mean_weights(model, [ids(2, 12)])["attnres"]
    fig = plot.plot_attnres(model, weights, "", 7.0)
    shown = image(fig)
    assert names(fig.axes[0].yaxis) == rows and names(fig.axes[0].xaxis) == ["0", "1", "2", "3", "out"] and shown.shape == (4, 9)
    np.testing.assert_allclose(np.nansum(shown, 0), 1)
    there = np.isfinite(shown)
    assert there[0].all() and there[1].tolist() == [site >= block for site in range(9)] and there[2].tolist() == [site >= 2 * block for site in range(9)]
    # a sub-layer at the start of a block has no running sum yet; a stream there is always
    assert there[3].tolist() == [sources == "snapshots" or site % block > 0 for site in range(9)]


def test_denseformer_figure():
    model = make_model(connector="denseformer", n_layer=6, denseformer_dilation=2, denseformer_period=3)
    weights = plot.mean_weights(model, [ids(1, 4)])["denseformer"]
    fig = plot.plot_denseformer(model, weights, "", 7.0)
    alpha, shown = model.connector.alpha.detach().numpy(), image(fig)  # Y_3 averages X_1 and X_3, Y_6 averages X_0, X_2, X_4 and X_6
    assert names(fig.axes[0].xaxis) == ["2", "5"] and names(fig.axes[0].yaxis)[:2] == ["embedding", "layer 0"]
    np.testing.assert_allclose(shown[[1, 3], 0], alpha[:2])
    np.testing.assert_allclose(shown[[0, 2, 4, 6], 1], alpha[2:])
    assert np.isfinite(shown).sum() == 6


def test_mhc_figure():
    model = make_model(connector="mhc", mhc_num_streams=3)
    weights = plot.mean_weights(model, [ids(2, 12)])["mhc"]
    fig = plot.plot_mhc(model, weights, "", 7.0)
    pre, post, res = (ax for ax in fig.axes if ax.get_ylabel() in ("Stream", "To stream"))
    np.testing.assert_allclose(pre.images[0].get_array(), np.transpose([w[:3] for w in weights]))
    np.testing.assert_allclose(post.images[0].get_array(), np.transpose([w[3:6] for w in weights]))
    np.testing.assert_allclose(res.images[0].get_array(), np.mean([w[6:] for w in weights], 0).reshape(3, 3))


# ----------------------------------------------------------------------------------------------------------------------
# loss curves

def write_log(folder, rate=3600, shift=0.0):
    """40 train lines, an evaluation every 20 steps from 0 on, a resumption, and a last line that was cut off."""
    folder.mkdir()
    lines = [{"config": {}, "n_params": 1}]
    for step in range(0, 401, 10):
        if step:
            lines.append({"step": step, "train_loss": 5 - step / 200 + shift, "lr": 1e-3, "tokens": 100 * step, "tokens_per_s": rate if step <= 200 else 2 * rate})
        if step % 20 == 0:
            lines.append({"step": step, "val_loss": 5.5 - step / 200 + shift})
        if step == 100:
            lines.append({"config": {}, "resumed_at": 100})
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 410, "tra')
    return folder


def test_read_log(tmp_path):
    log = plot.read_log(write_log(tmp_path / "a"))
    assert log["step"].tolist() == list(range(10, 401, 10)) and len(log["val_loss"]) == 21
    np.testing.assert_allclose(log["hours"][[0, 19, 39]], [1000 / 3600**2, 20000 / 3600**2, 30000 / 3600**2])
    at, val_at = plot.positions(log, "tokens")
    assert at[-1] == 40000 and val_at.tolist() == [2000 * i for i in range(21)]
    at, val_at = plot.positions(log, "hours")
    assert val_at[0] == 0 and val_at[20] == at[39] and val_at[1] == at[1]


def test_running_mean():
    values = np.random.default_rng(0).normal(size=30)
    np.testing.assert_allclose(plot.running_mean(values, 1), values)
    smoothed = plot.running_mean(values, 5)
    assert smoothed[10] == pytest.approx(values[8:13].mean()) and smoothed[1] == pytest.approx(values[:3].mean()) and smoothed[0] == pytest.approx(values[0])
    np.testing.assert_allclose(plot.running_mean(np.arange(30.0), 9), np.arange(30.0))


def test_loss_figure(tmp_path):
    logs = [plot.read_log(write_log(tmp_path / name, shift=shift)) for name, shift in (("a", 0), ("b", 0.1))]
    fig = plot.plot_loss(logs, ["first", "second"], "tokens")
    ax = fig.axes[0]
    raw_a, train_a, val_a, raw_b, train_b, val_b = ax.lines
    np.testing.assert_allclose(raw_b.get_ydata(), logs[1]["train_loss"])
    np.testing.assert_allclose(train_a.get_ydata(), logs[0]["train_loss"][:38])  # a straight line, which smoothing leaves as it is
    assert train_a.get_color() == val_a.get_color() != train_b.get_color() == val_b.get_color()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["first  (last validation 3.500)", "second  (last validation 3.600)"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("Training tokens", "Loss (nats per token)")
    low, high = ax.get_ylim()
    assert 2.8 < low < 3.1 and 5.4 < high < 5.6  # the first twentieth, up to 5.6, does not decide
    rare = plot.plot_loss([logs[0] | {"val_step": np.array([0.0, 1.0]), "val_loss": np.array([9.0, 8.0])}], ["first"])
    assert rare.axes[0].get_ylim()[1] < 6  # nor does it where evaluations are rare
    assert plot.short(0) == "0" and plot.short(1500) == "1.5k" and plot.short(2e9) == "2B" and plot.short(0.25) == "0.25"


def test_difference_figure(tmp_path):
    """Steps that one of the runs has not logged are left out, and so is what both have in common: here everything but a shift."""
    logs = [plot.read_log(write_log(tmp_path / name, shift=shift)) for name, shift in (("a", 0), ("b", 0.1), ("c", -0.2))]
    logs[2] = {key: values if key == "seed" else values[5:] if not key.startswith("val") else values[:-1] for key, values in logs[2].items()}
    fig = plot.plot_difference(logs, ["first", "second", "third"], "tokens")
    zero, raw_b, train_b, val_b, raw_c, train_c, val_c = fig.axes[0].lines
    np.testing.assert_allclose(train_b.get_ydata(), 0.1)
    np.testing.assert_allclose(val_b.get_ydata(), 0.1)
    assert train_b.get_xdata()[0] == 1000 and train_c.get_xdata()[0] == 6000 and len(val_b.get_xdata()) == 21 and len(val_c.get_xdata()) == 20
    np.testing.assert_allclose(train_c.get_ydata(), -0.2)
    assert [text.get_text() for text in fig.legends[0].get_texts()] == ["second  (+0.1000)", "third  (-0.2000)"]
    colours = [line.get_color() for line in plot.plot_loss(logs, ["first", "second", "third"]).axes[0].lines]
    assert [train_b.get_color(), train_c.get_color()] == colours[4::3]  # a run has one colour in both figures
    with pytest.raises(ValueError, match="b has no train line at a step of a"):
        plot.plot_difference([logs[0], logs[1] | {"step": logs[1]["step"] + 1}], ["a", "b"])
    zero, *drawn = plot.plot_difference([logs[0], logs[1] | {"seed": 2}], ["a", "b"]).axes[0].lines
    assert [len(line.get_xdata()) for line in drawn] == [21]  # it reads other tokens: only its evaluations compare
    with pytest.raises(ValueError, match="b has no evaluation at a step of a"):
        plot.plot_difference([logs[0], logs[1] | {"seed": 2, "val_step": logs[1]["val_step"] + 1}], ["a", "b"])


def test_names_of_runs_tell_them_apart(tmp_path):
    assert plot.run_names(["out/a", "out/b/log.jsonl"]) == ["a", "b"]
    assert plot.run_names(["results/moda_lr0.002_seed1.jsonl", "results/b.jsonl"]) == ["moda_lr0.002_seed1", "b"]
    assert plot.run_names([tmp_path / "x/out", tmp_path / "y/out"]) == ["x/out", "y/out"]


# ----------------------------------------------------------------------------------------------------------------------
# the command line

def test_figures_of_a_run_of_train(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train.main([*tiny, "--depth=depth_attention", "--depth_stride=1", "--connector=attnres", "--attnres_block_size=2", "--max_iters=2"])
    capsys.readouterr()
    for argv, files in ((["out"], {"loss.png"}), (["out", "--depth=True"], {"depth_attention.png", "attnres.png"}),
                        (["out", "--depth=True", "--prompt=abcab", "--out=new.png"], {"new_depth_attention.png", "new_attnres.png"})):
        plot.main([*argv, "--dpi=60"])
        assert set(capsys.readouterr().out.split()) == files
        assert all((tmp_path / file).read_bytes().startswith(b"\x89PNG") for file in files)
    before = (tmp_path / "loss.png").read_bytes()
    plot.main(["out", "--dpi=60"])
    assert (tmp_path / "loss.png").read_bytes() == before
    assert (tmp_path / "attnres.png").read_bytes() != (tmp_path / "new_attnres.png").read_bytes()  # the shard is not the prompt


@pytest.mark.parametrize("fields", [*METHODS, dict(connector="denseformer", depth="depth_attention", n_loop=2)])
def test_saved_weights_are_drawn_again_without_the_model(tmp_path, monkeypatch, fields):
    model = make_model(**fields)
    monkeypatch.setattr(plot, "open_model", lambda c, device: (model, None, {}))
    monkeypatch.setattr(plot, "batches_of", lambda *arguments: [ids(2, 12)])
    drawn = plot.figures(plot.configurator.configure(plot.__file__, ["run", "--depth=True", f"--save={tmp_path / 'w.json'}"], operands="RUN"))
    again = plot.figures(plot.configurator.configure(plot.__file__, [str(tmp_path / "w.json"), "--depth=True"], operands="RUN"))
    assert drawn.keys() == again.keys() and drawn
    for name, fig in drawn.items():
        assert fig.get_suptitle() == again[name].get_suptitle()
        for panel, ax in enumerate(fig.axes):
            if ax.images:
                np.testing.assert_allclose(image(again[name], panel), image(fig, panel), atol=1e-5)
                assert names(ax.yaxis) == names(again[name].axes[panel].yaxis)


def test_mistakes_end_in_a_sentence(tiny, tmp_path, refused):
    train.main([*tiny, "--max_iters=1"])
    out, log = str(tmp_path / "out"), str(write_log(tmp_path / "log"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/log.jsonl").write_text('{"config": {}}\n')
    (tmp_path / "bench.json").write_text('{"rows": []}')
    (tmp_path / "other.jsonl").write_text('5\nnull\n')
    for argv, sentence in (([], "there is no run to draw"), ([str(tmp_path / "bench.json"), "--depth=True"], "is not a file that plot.py wrote"),
                           ([str(tmp_path / "other.jsonl")], "has no train lines yet"), ([str(tmp_path)], "log.jsonl does not exist"), ([str(tmp_path / "empty")], "has no train lines yet"),
                           ([log, "--x=epochs"], "--x=epochs must be steps, tokens or hours"), ([log, "--out=loss.gif"], "must end in .png, .pdf or .svg"),
                           ([log, "--labels=a,b"], "has 2 names for 1 runs"), ([out, log, "--depth=True"], "draws one model"),
                           ([log, "--difference=True"], "give two or more"), ([f"{out}.json", "--depth=True"], "out.json does not exist"),
                           ([out, "--depth=True"], "nothing attends across depth"), ([log, f"--out={tmp_path}/no/loss.png"], "there is no folder"),
                           ([out, "--depth=True", f"--save={tmp_path}/no/w.json"], "there is no folder")):
        assert sentence in refused(plot.main, argv)
