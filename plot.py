"""
Figures of runs, as a paper would have them:

    python plot.py out/a out/b --x=tokens --out=loss.png           # loss curves of any number of runs, from their log.jsonl
    python plot.py out/a out/b out/c --difference=True             # the losses of b and c minus those of a
    python plot.py out/a --depth=True                              # what the run's model attends to across depth, on its val shards
    python plot.py --init_from=FOLDER --depth=True --prompt="..."  # the same for a Hugging Face folder, on a text

--depth draws one figure for each thing that the model does across depth: the weights of Depth-Attention or MoDA and those of AttnRes, DenseFormer or
mHC, as means over tokens. The model itself keeps none of them: while it runs here, its functions are wrapped by ones that compute them again. What was
drawn can be kept, as numbers, with --save=FILE.json, and `python plot.py FILE.json --depth=True` draws it again without the model.
"""
import contextlib
import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import torch

import configurator
import model as decoder
from data import shards
from hf import open_model

try:
    import matplotlib
except ImportError:
    raise SystemExit("error: plot.py needs matplotlib; run: pip install matplotlib") from None
matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D

# ----------------------------------------------------------------------------------------------------------------------
# loss curves
x = "steps"  # horizontal axis: steps, tokens or hours (of training alone, without evaluations)
difference = False  # draw the runs' losses minus those of the first
smooth = 0  # log lines that a point of a train curve is the mean of; 0 = a twentieth of the run's, at least 9
labels = ""  # names of the runs in the legend, separated by commas; empty = their folders' names
ymin = 0.0  # loss at the bottom; 0 = chosen
ymax = 0.0  # loss at the top; 0 = chosen so that the first twentieth of the runs does not flatten the rest
# depth
depth = False  # draw what the model attends to across depth instead
init_from = ""  # its Hugging Face folder or Hub id, if it is not a run
which = "best"  # a run's checkpoint: best or last
prompt = ""  # text that the model reads; empty = shards
data_dir = ""  # folder of the shards; empty = the run's own
split = "val"  # which of them: val or train
eval_tokens = 8192  # tokens to read, spread evenly over the shards
block_size = 0  # tokens in a window; 0 = the model's context
heads = False  # a panel for each KV head as well (Depth-Attention, MoDA)
device = ""  # cpu, cuda, cuda:1, mps; empty = the best there is
save = ""  # JSON file to write the weights to as well
# figure
title = ""  # above the figure; empty = what it shows
width = 7.0  # inches
dpi = 200  # dots an inch
out = ""  # file to write (.png, .pdf, .svg); empty = loss.png, difference.png or METHOD.png in the working directory
# ----------------------------------------------------------------------------------------------------------------------

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart, in an order that keeps neighbours far apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
STYLE = {"font.size": 8, "axes.titlesize": 9, "axes.labelsize": 8, "legend.fontsize": 7.5, "xtick.labelsize": 7.5, "ytick.labelsize": 7.5, "axes.spines.top": False,
         "axes.spines.right": False, "axes.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6, "xtick.major.size": 3, "ytick.major.size": 3,
         "axes.grid": True, "grid.color": "0.92", "grid.linewidth": 0.6, "axes.axisbelow": True, "legend.frameon": False, "svg.hashsalt": "plot", "svg.fonttype": "none"}


# ----------------------------------------------------------------------------------------------------------------------
# loss curves

def read_log(path):
    """
    A run's log.jsonl (or its folder) as a dict of float arrays: step, train_loss, tokens, hours of its train lines and val_step, val_loss of its
    evaluations, and its seed (None if it is not said). Hours count training alone: tokens over tokens_per_s. Raises ValueError if there is no such log or
    nothing in it.
    """
    path = Path(path) / "log.jsonl" if Path(path).is_dir() else Path(path)
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give the folder of a run of train.py, or its log.jsonl.")
    train, val, seed = [], [], None
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # the half line of a killed run
            continue
        if not isinstance(line, dict):
            continue
        if "train_loss" in line:
            before = train[-1][2:] if train else (0, 0.0)
            train.append((line["step"], line["train_loss"], line["tokens"], before[1] + (line["tokens"] - before[0]) / line["tokens_per_s"] / 3600))
        elif "val_loss" in line:
            val.append((line["step"], line["val_loss"]))
        elif "config" in line:
            seed = line["config"].get("seed")
    if not train:
        raise ValueError(f"{path} is no log or has no train lines yet; give a run of train.py that has made its first --log_interval steps.")
    step, loss, tokens, hours = np.array(train, float).T
    val_step, val_loss = np.array(val, float).reshape(-1, 2).T
    return {"step": step, "train_loss": loss, "tokens": tokens, "hours": hours, "val_step": val_step, "val_loss": val_loss, "seed": seed}


def positions(log, axis):
    """(x of the train lines, x of the evaluations) on the axis steps, tokens or hours; between two train lines time and tokens are linear in steps."""
    at = log[{"steps": "step"}.get(axis, axis)]
    return at, np.interp(log["val_step"], np.append(0, log["step"]), np.append(0, at))


def running_mean(values, n):
    """Means of n values around each (rounded up to odd). Near the ends the window shrinks on both sides, so that a slope is not shifted."""
    half = np.minimum(n // 2, np.minimum(np.arange(len(values)), np.arange(len(values))[::-1]))
    total = np.append(0, np.cumsum(values))
    index = np.arange(len(values))
    return (total[index + half + 1] - total[index - half]) / (2 * half + 1)


def run_names(paths):
    """A name for each run: its folder's or its log's, with as many folders before it as tell the runs apart."""
    folders = [(Path(p).parent if Path(p).name == "log.jsonl" else Path(p).with_suffix("") if Path(p).suffix == ".jsonl" else Path(p)).resolve().parts for p in paths]
    for n in range(1, max(map(len, folders)) + 1):
        names = ["/".join(parts[-n:]) for parts in folders]
        if len(set(names)) == len(set(folders)):
            break
    return names


def short(number):
    """1500 -> 1.5k, 2e9 -> 2B."""
    size, suffix = next(((size, suffix) for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")) if number >= size), (1, ""))
    return f"{number / size:g}{suffix}"


def style_of(i):
    """(colour, marker, dashes) of run number i."""
    return COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)], ("-", "--", ":")[i // len(COLOURS) % 3]


def draw_curves(ax, curves, names, axis, smooth, ymin, ymax, first=0):
    """
    Draws runs: train curves as running means of their faint logged losses, evaluations as points of the same colour. curves: (x, values) of the train lines
    and (x, values) of the evaluations of each run, of which the former may be empty; first: the number of the first one, which its colour and marker follow.
    The first twentieth does not decide the limits.
    """
    handles, tails = [], []
    for i, (((at, values), (val_at, val)), name) in enumerate(zip(curves, names), first):
        colour, marker, dashes = style_of(i)
        early = 0.05 * max(*at[-1:], *val_at[-1:], 0.0)
        if len(at):
            n = smooth or max(9, len(at) // 20)
            ax.plot(at, values, color=colour, lw=0.6, alpha=0.2, zorder=1)  # a logged loss is that of one step: with small batches it scatters
            end = max(1, len(at) - n // 4)  # the last means are of so few lines that they would end the curve in a spike
            at, curve = at[:end], running_mean(values, n)[:end]
            ax.plot(at, curve, dashes, color=colour, lw=1.1, alpha=0.75)
            tails += [*curve[at > early]]
        ax.plot(val_at, val, marker, color=colour, ms=4, mec="white", mew=0.5, zorder=3)
        handles.append(Line2D([], [], color=colour, ls=dashes if len(at) else "", marker=marker, ms=4, mec="white", mew=0.5, lw=1.1, label=name))
        tails += [*val[val_at > early]]
    low, high = np.nanmin(tails), np.nanmax(tails)
    ax.set_ylim(ymin or low - 0.04 * (high - low) - 1e-3, ymax or high + 0.04 * (high - low) + 1e-3)
    ax.set_xlim(left=0)
    ax.set_xlabel({"steps": "Optimizer steps", "tokens": "Training tokens", "hours": "Hours of training"}[axis])
    ax.xaxis.set_major_formatter(lambda value, _: short(value))
    return handles


def plot_loss(logs, names, axis="steps", smooth=0, ymin=0.0, ymax=0.0, title="", width=7.0):
    """The figure of several runs' losses: train curves as lines through their scatter, evaluations as points of the same colour."""
    fig, ax = plt.subplots(figsize=(width, 0.5 * width), layout="constrained")
    curves = [((at, log["train_loss"]), (val_at, log["val_loss"])) for log in logs for at, val_at in [positions(log, axis)]]
    names = [name + (f"  (last validation {log['val_loss'][-1]:.3f})" if len(log["val_loss"]) else "") for name, log in zip(names, logs)]
    handles = draw_curves(ax, curves, names, axis, smooth, ymin, ymax)
    ax.set(ylabel="Loss (nats per token)", title=title or "Training loss (lines: running means of the faint logged losses) and validation loss (points)")
    ax.legend(handles=handles, loc="upper right")
    return fig


def plot_difference(logs, names, axis="steps", smooth=0, ymin=0.0, ymax=0.0, title="", width=7.0):
    """
    The figure of several runs' losses minus those of the first at the same steps. Runs that read the same tokens differ by far less than the loss of one
    scatters from step to step, so this shows what curves on top of each other hide; of a run with another seed, which reads others, only the evaluations
    are drawn. Raises ValueError for a run that shares no step with the first.
    """
    first, curves, labels = logs[0], [], []
    for log, name in zip(logs[1:], names[1:]):
        (_, mine, base), (_, val_mine, val_base) = (np.intersect1d(log[key], first[key], return_indices=True) for key in ("step", "val_step"))
        same = log["seed"] == first["seed"]
        if not len(mine if same else val_mine):
            line, option = ("train line", "--log_interval") if same else ("evaluation", "--eval_interval")
            raise ValueError(f"{name} has no {line} at a step of {names[0]}, so that there is no difference to draw; the runs need the same {option}.")
        at, val_at = positions(log, axis)
        val = log["val_loss"][val_mine] - first["val_loss"][val_base]
        mine, base = (mine, base) if same else ([], [])
        curves.append(((at[mine], log["train_loss"][mine] - first["train_loss"][base]), (val_at[val_mine], val)))
        labels.append(name + (f"  ({val[-1]:+.4f})" if len(val) else ""))
    fig, ax = plt.subplots(figsize=(width, 0.5 * width + 0.15 * math.ceil(len(labels) / 3)), layout="constrained")
    ax.axhline(0, color=style_of(0)[0], lw=1.1)
    handles = draw_curves(ax, curves, labels, axis, smooth, ymin, ymax, first=1)
    ax.set(ylabel="Difference of the losses (nats per token)", title=title or f"Loss minus that of {names[0]}: training (lines: running means), validation (points; the last one in brackets)")
    fig.legend(handles=handles, loc="outside lower center", ncols=3)
    return fig


# ----------------------------------------------------------------------------------------------------------------------
# the weights of a model across depth: what its functions compute, computed once more from the same arguments

def depth_attention_weights(q, k, source_k):
    """The softmax of model.depth_mix, [N+1,B,G,T]: over the N sources and, last, the layer itself."""
    qbar = q.unflatten(1, (k.shape[1], -1)).mean(2)
    scores = (qbar * torch.stack([*source_k, k])).sum(-1) / math.sqrt(q.shape[-1])
    return torch.softmax(scores.double(), 0)


def moda_weights(q, k, depth_k):
    """The masses of model.moda_attention's softmax, [1+L,B,H,T]: of all sequence keys together, then of each depth slot."""
    B, H, T, D = q.shape
    grouped = q.view(B, k.shape[1], -1, T, D) / math.sqrt(D)
    ahead = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    sequence = (grouped @ k.unsqueeze(2).mT).masked_fill(ahead, float("-inf")).logsumexp(-1)
    slots = [(grouped * key.unsqueeze(2)).sum(-1) for key in depth_k]
    return torch.softmax(torch.stack([sequence, *slots]).double(), 0).view(-1, B, H, T)


def attnres_weights(site, sources):
    """The softmax of model.Aggregator, [n,B,T], over its n sources, the current stream last."""
    s = torch.stack(list(sources)).double()
    scores = (s * (site.pseudo_query * site.norm.weight)).sum(-1) * torch.rsqrt(s.square().mean(-1) + site.norm.eps)
    if site.recency_bias is not None:
        scores[-1] = scores[-1] + site.recency_bias
    return torch.softmax(scores, 0)


@contextlib.contextmanager
def recording(config):
    """
    While open, forward passes of a model with this config append to the list that it yields, once for each depth read and each connector call in
    order: (name, tensor), the tensor's last axes being batch and tokens. On CUDA the plain PyTorch functions run, not the kernels.
    """
    made = []
    mix, attend = decoder.depth_mix, decoder.joint_attention
    aggregate, connect = decoder.Aggregator.forward, decoder.HyperConnection.forward

    def recorded_mix(q, k, v, source_k, source_v):
        made.append(("depth_attention", depth_attention_weights(q, k, source_k)))
        return mix(q, k, v, source_k, source_v)

    def recorded_attend(q, k, v, slots=()):
        if config.depth == "moda":
            made.append(("moda", moda_weights(q, k, [key for key, _ in slots])))
        return attend(q, k, v, slots)

    def recorded_aggregate(site, sources):
        made.append(("attnres", attnres_weights(site, sources)))
        return aggregate(site, sources)

    def recorded_connect(site, streams):
        maps = connect(site, streams)
        made.append(("mhc", maps.movedim(-1, 0)))
        return maps

    wrapped = [(decoder, "depth_mix", recorded_mix), (decoder, "joint_attention", recorded_attend), (decoder.Aggregator, "forward", recorded_aggregate),
               (decoder.HyperConnection, "forward", recorded_connect), (decoder, "use_kernels", False)]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in wrapped]
    try:
        for owner, name, value in wrapped:
            setattr(owner, name, value)
        yield made
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@torch.no_grad()
def mean_weights(model, batches):
    """
    Runs the model on batches of ids [B,T] and returns {method: list of means over all tokens, one a call in the order of the calls}:
    depth_attention [N+1,G] and moda [1+L,G] (query heads averaged over the KV head that they share), attnres [n], mhc [n+n+n*n] (pre, post, res), and
    denseformer, whose coefficients depend on no token.
    """
    totals, tokens = None, 0
    for ids in batches:
        with recording(model.config) as made:
            model(ids.to(model.cos.device), last_only=True)
        means = [(name, w.double().mean(-1).mean(1)) for name, w in made]
        tokens += ids.numel()
        totals = [(name, ids.numel() * w + (totals[i][1] if totals else 0)) for i, (name, w) in enumerate(means)]
    weights = {}
    for name, total in totals or ():
        mean = (total / tokens).cpu().numpy()
        weights.setdefault(name, []).append(mean.reshape(len(mean), model.config.n_kv_head, -1).mean(-1) if name == "moda" else mean)
    if model.config.connector == "denseformer":
        connector = model.connector
        weights["denseformer"] = [row.double().cpu().numpy() for row in connector.alpha.split(connector.lengths)]
    return {name: rows for name, rows in weights.items() if any(len(row) > 1 for row in rows)}


# ----------------------------------------------------------------------------------------------------------------------
# heat maps

class Panel:
    """One heat map: image [rows, columns] with row 0 at the bottom and NaN where there is nothing; rows and columns are ticks, (position, name)."""

    def __init__(self, entries, rows, columns, title="", ylabel="", bar="", colours="Blues", low=0.0, high=None):
        """entries: for each column a list of (row, value)."""
        self.image = np.full((1 + max(row for column in entries for row, _ in column), len(entries)), np.nan)
        for j, column in enumerate(entries):
            for row, value in column:
                self.image[row, j] = value
        self.rows, self.columns, self.title, self.ylabel, self.bar, self.colours = rows, columns, title, ylabel, bar, colours
        # where there is but one source its weight can only be 1, which is no reason to wash out the others' colours
        self.low, self.high = low, max(value for column in entries for _, value in column if len(column) > 1 or len(entries) == 1) if high is None else high

    def draw(self, ax, inches):
        """Draws the panel, `inches` wide and high; numbers stand in the cells where they fit."""
        drawn = ax.imshow(self.image, origin="lower", aspect="auto", cmap=self.colours, vmin=self.low, vmax=self.high, interpolation="nearest")
        cell = inches[0] / self.image.shape[1], inches[1] / self.image.shape[0]
        for set_ticks, ticks, size, room in (ax.set_xticks, self.columns, cell[0], 0.2), (ax.set_yticks, self.rows, cell[1], 0.11):
            apart = min((b[0] - a[0] for a, b in zip(ticks, ticks[1:])), default=1) * size
            shown = ticks[::max(1, math.ceil(room / apart))]
            set_ticks([at for at, _ in shown], [name for _, name in shown])
        ax.set_xticks(np.arange(-0.5, self.image.shape[1]), minor=True)
        ax.set_yticks(np.arange(-0.5, self.image.shape[0]), minor=True)
        ax.grid(False)
        ax.grid(which="minor", color="white", lw=min(0.8, 4 * min(cell)))
        ax.tick_params(which="both", length=0)
        ax.spines[:].set_visible(False)
        ax.set_facecolor("0.95")
        ax.set_ylabel(self.ylabel)
        ax.set_title(self.title, loc="left")
        if cell[0] > 0.24 and cell[1] > 0.13:
            for (row, column), value in np.ndenumerate(self.image):
                if not np.isnan(value):
                    bright = np.dot(drawn.cmap(drawn.norm(value))[:3], (0.299, 0.587, 0.114))
                    ax.text(column, row, f"{round(value, 2) + 0.0:.2f}".replace("0.", ".", 1), ha="center", va="center", fontsize=6, color="white" if bright < 0.55 else "0.2")
        return drawn

    def colour_bar(self, fig, drawn, axes, inches):
        beyond = (np.nanmin(self.image) < self.low) + 2 * (np.nanmax(self.image) > self.high)
        bar = fig.colorbar(drawn, ax=axes, label=self.bar, pad=0.015, aspect=max(4, inches / 0.11), fraction=0.03,
                           extend=("neither", "min", "max", "both")[beyond], extendfrac=0.06)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=2)


def draw_panels(panels, title, xlabel, width):
    """A figure of panels, one below another, in which a row is as high in all of them; panels of one colour scale share a bar."""
    rows = sum(panel.image.shape[0] for panel in panels)
    high = min(0.19, 6 / rows)
    sizes = [high * panel.image.shape[0] for panel in panels]
    fig, axes = plt.subplots(len(panels), 1, figsize=(width, sum(sizes) + 0.65 + 0.3 * len(panels)), layout="constrained", squeeze=False, height_ratios=sizes)
    drawn = [panel.draw(ax, (0.78 * width, size)) for panel, ax, size in zip(panels, axes[:, 0], sizes)]
    scales = [(panel.bar, panel.colours, panel.low, panel.high) for panel in panels]
    if len(set(scales)) == 1:
        panels[0].colour_bar(fig, drawn[0], axes[:, 0], sum(sizes))
    else:
        for panel, ax, image, size in zip(panels, axes[:, 0], drawn, sizes):
            panel.colour_bar(fig, image, [ax], size)
    axes[-1, 0].set_xlabel(xlabel)
    fig.suptitle(title, fontsize=9.5)
    return fig


def numbers(names):
    """Ticks 0, 1, 2, ... with these names."""
    return list(enumerate(names))


def plot_depth_attention(model, weights, title, width, heads=False):
    readers = [(m, candidates) for m, candidates in enumerate(model.depth.candidates) if candidates]
    sources = sorted({j for _, candidates in readers for j in candidates})
    row = {j: i for i, j in enumerate(sources)}
    means = [("", lambda w: w.mean(1))] + [(f"KV head {g}", lambda w, g=g: w[:, g]) for g in range(model.config.n_kv_head if heads else 0)]
    panels = [Panel([[*((row[j], v) for j, v in zip(candidates, mean(w))), (len(sources), mean(w)[-1])] for (_, candidates), w in zip(readers, weights)],
                    numbers([f"layer {j}" for j in sources] + ["itself"]), numbers([str(m) for m, _ in readers]), name or "Mean of the KV heads" * heads,
                    "Source", "Weight", high=max(w.max() for w in weights) if heads else None) for name, mean in means]
    return draw_panels(panels, title, layer_axis(model, "that mixes"), width)


def plot_moda(model, weights, title, width, heads=False):
    M, slots = len(model.order), []  # the row of each slot: two for each virtual layer, attention below FFN
    for m, l in enumerate(model.order):
        slots += [2 * m] + [2 * m + 1] * (model.layers[l].ffn_kv is not None)
    columns = numbers([str(m) for m in range(M)])
    means = [("mean of the KV heads" * heads, lambda w: w.mean(1))] + [(f"KV head {g}", lambda w, g=g: w[:, g]) for g in range(model.config.n_kv_head if heads else 0)]
    panels = []
    for name, mean in means:
        of = f", {name}" * bool(name)
        panels.append(Panel([[(0, mean(w)[0]), (1, mean(w)[1:].sum())] for w in weights], numbers(["sequence", "depth"]), columns,
                            "Mass of the softmax on the sequence and on all depth slots" + of, bar="Mass", high=1.0))
        panels.append(Panel([[(slots[i], v) for i, v in enumerate(mean(w)[1:])] for w in weights],
                            [(2 * m + 0.5, str(m)) for m in range(M - 1)], columns, "Mass on each depth slot" + of,
                            layer_axis(model, "of the slot") + "\n(attention below, FFN above)", "Mass"))
    return draw_panels(panels, title, layer_axis(model, "that attends"), width)


def plot_attnres(model, weights, title, width):
    connector, M = model.connector, len(model.order)
    state, seen = connector.start(torch.tensor(0)), []  # the connector itself, run on counts of sub-layers instead of states
    for m in range(M):
        for _ in range(2):
            seen.append((len(state[1]), state[0] is not None))
            state = connector.write(state, torch.tensor(1), None)
        state = connector.end_layer(state, m)
    seen.append((len(state[1]), state[0] is not None))
    commits = [int(n) for n in state[1][1:]]
    names = ["embedding"] + ([f"after layer {n // 2 - 1}" for n in commits] if connector.snapshots else [f"block {i}" for i in range(1, len(commits) + 1)])
    top = len(names)
    entries = [[*enumerate(w[:n]), *((top, v) for v in w[n:])] for (n, _), w in zip(seen, weights)]
    columns = [(2 * m + 0.5, str(m)) for m in range(M)] + [(2 * M, "out")]
    panel = Panel(entries, numbers(names + ["current"]), columns, "", "Source", "Weight")
    return draw_panels([panel], title, layer_axis(model, "(attention, then MLP)"), width)


def plot_denseformer(model, weights, title, width):
    k = model.connector.dilation
    averages = [(t, row) for t, row in enumerate(weights, 1) if len(row)]
    entries = [[((t % k) + k * i, v) for i, v in enumerate(row)] for t, row in averages]
    largest = max((abs(v) for _, row in averages for v in row[:-1]), default=0.0) or 1.0  # the last coefficient, near 1, is that of the state itself
    names = ["embedding"] + [f"layer {m}" for m in range(len(model.order))]
    panel = Panel(entries, numbers(names[:1 + averages[-1][0]]), numbers([str(t - 1) for t, _ in averages]), "", "State averaged", "Coefficient",
                  "RdBu_r", -largest, largest)
    return draw_panels([panel], title, layer_axis(model, "after which the average is taken"), width)


def plot_mhc(model, weights, title, width):
    n, M = model.config.mhc_num_streams, len(model.order)
    weights = np.stack(weights)  # [sub-layers, n + n + n*n]
    columns, rows = [(2 * m + 0.5, str(m)) for m in range(M)], numbers([str(j) for j in range(n)])
    pre = Panel([list(enumerate(w[:n])) for w in weights], rows, columns, "Read from the streams (pre)", "Stream", "Weight")
    post = Panel([list(enumerate(w[n:2 * n])) for w in weights], rows, columns, "Written to the streams (post)", "Stream", "Weight")
    mixing = weights[:, 2 * n:].mean(0).reshape(n, n)
    res = Panel([list(enumerate(mixing[:, j])) for j in range(n)], rows, rows, "Mixing (res),\nmean of sub-layers", "To stream", "", high=1.0)
    fig = plt.figure(figsize=(width, 0.44 * n + 1.3), layout="constrained")
    grid = fig.add_gridspec(2, 2, width_ratios=(3.4, 1))
    for panel, place, inches in (pre, grid[0, 0], (0.58 * width, 0.19 * n)), (post, grid[1, 0], (0.58 * width, 0.19 * n)), (res, grid[:, 1], (0.2 * width, 0.2 * width)):
        ax = fig.add_subplot(place)
        drawn = panel.draw(ax, inches)
        ax.set_xlabel("From stream" if panel is res else layer_axis(model, "(attention, then MLP)") if panel is post else "")
        if panel is res:
            ax.set_aspect("equal")
        else:
            panel.colour_bar(fig, drawn, [ax], inches[1])
    fig.suptitle(title, fontsize=9.5)
    return fig


def layer_axis(model, rest):
    return f"{'Virtual layer' if model.config.n_loop > 1 else 'Layer'} {rest}"


PLOTS = {"depth_attention": plot_depth_attention, "moda": plot_moda, "attnres": plot_attnres, "denseformer": plot_denseformer, "mhc": plot_mhc}
TITLES = {"depth_attention": "Depth-Attention: what a layer's value is mixed from", "moda": "MoDA: what the softmax attends to",
          "attnres": "AttnRes: what a sub-layer's input is mixed from", "denseformer": "DenseFormer: coefficients of the depth-weighted averages",
          "mhc": "mHC: maps of the hyper-connections"}


# ----------------------------------------------------------------------------------------------------------------------

def batches_of(c, model, tokenizer, saved):
    """What the model reads: the prompt's ids as one batch, or fixed windows of the shards. Raises ValueError."""
    context = c.block_size or model.config.block_size
    if c.prompt:
        if tokenizer is None:
            raise ValueError("--prompt is text, but the model comes without a tokenizer; give --data_dir instead.")
        ids = tokenizer.encode(c.prompt)
        if len(ids) > context:
            raise ValueError(f"the prompt has {len(ids)} tokens, more than the model's context of {context}; shorten it.")
        return [torch.tensor([ids])]
    folder = c.data_dir or (saved["config"]["data_dir"] if saved else "")
    if not folder:
        raise ValueError("there is nothing for the model to read: give --prompt or --data_dir.")
    part = shards.open_split(configurator.find(folder), c.split)
    shards.check_vocab(part, model.config.vocab_size, "the model")
    windows = shards.eval_windows(part, context, c.eval_tokens)
    return [part.windows(windows[i:i + 1], context)[0] for i in range(len(windows))]


def read_depth(c):
    """(model, {method: weights}, tokens read) of what the options name: a model that reads, or the file of an earlier --save. Raises ValueError."""
    if c.out_dir.endswith(".json"):
        if not Path(c.out_dir).is_file():
            raise ValueError(f"{c.out_dir} does not exist; give a file that plot.py wrote with --save, or the folder of a run.")
        saved = json.loads(Path(c.out_dir).read_text(encoding="utf-8"))
        if not isinstance(saved, dict) or not saved.keys() >= {"config", "tokens", "weights"}:
            raise ValueError(f"{c.out_dir} is not a file that plot.py wrote with --save; give one, or the folder of a run.")
        with torch.device("meta"):  # drawing needs the shape, no parameter
            model = decoder.GPT(decoder.GPTConfig(**saved["config"]))
        return model, {name: [np.array(row) for row in rows] for name, rows in saved["weights"].items()}, saved["tokens"]
    model, tokenizer, run = open_model(c, configurator.find_device(c.device))
    if model.config.depth == "none" and model.config.connector == "residual":
        raise ValueError("this model has depth=none and connector=residual: nothing attends across depth, so there is nothing to draw.")
    batches = batches_of(c, model, tokenizer, run)
    weights = mean_weights(model, batches)
    if not weights:
        raise ValueError("this model has so few layers that none reads another, so there is nothing to draw.")
    return model, weights, sum(ids.numel() for ids in batches)


def depth_figures(c):
    """{method: figure} of what the model reads across depth. Raises ValueError if it reads nothing."""
    model, weights, tokens = read_depth(c)
    if c.save:
        rounded = {name: [np.round(row, 5).tolist() for row in rows] for name, rows in weights.items()}
        shards.write_json(c.save, {"config": dataclasses.asdict(model.config), "tokens": tokens, "weights": rounded})
    options = {name: {"heads": c.heads} if name in ("depth_attention", "moda") else {} for name in weights}
    titles = {name: c.title or TITLES[name] + f", mean of {tokens:,} tokens" * (name != "denseformer") for name in weights}
    return {name: PLOTS[name](model, w, titles[name], c.width, **options[name]) for name, w in weights.items()}


def validate(c):
    """Raises ValueError for options that cannot work, naming option, value and rule."""
    for name, ok, rule in (("x", c.x in ("steps", "tokens", "hours"), "must be steps, tokens or hours"), ("which", c.which in ("best", "last"), "must be best or last"),
                           ("split", c.split in ("train", "val"), "must be train or val"), ("width", c.width > 0, "must be positive"), ("dpi", c.dpi > 0, "must be positive"),
                           ("out", Path(c.out or ".png").suffix in (".png", ".pdf", ".svg") or not c.out, "must end in .png, .pdf or .svg"),
                           *((name, getattr(c, name) >= 0, "must not be negative") for name in ("smooth", "ymin", "ymax", "eval_tokens", "block_size"))):
        configurator.require(c, name, ok, rule)
    for name in ("save", "out"):
        configurator.require_writable(c, name)


def figures(c):
    """{what it shows: figure} as the options say."""
    validate(c)
    if c.depth:
        if len(c.operands) != (not c.init_from):
            raise ValueError("--depth=True draws one model: give the folder of a run, a file of --save, or --init_from=FOLDER_OR_ID.")
        c.out_dir = c.operands[0] if c.operands else ""
        return depth_figures(c)
    if not c.operands:
        raise ValueError("there is no run to draw: give the folders of one or more, as in python plot.py out/a out/b.")
    names = [name.strip() for name in c.labels.split(",")] if c.labels else run_names(c.operands)
    if len(names) != len(c.operands):
        raise ValueError(f"--labels={c.labels} has {len(names)} names for {len(c.operands)} runs.")
    if c.difference and len(c.operands) < 2:
        raise ValueError("--difference=True draws runs against the first: give two or more.")
    kind, draw = ("difference", plot_difference) if c.difference else ("loss", plot_loss)
    return {kind: draw([read_log(path) for path in c.operands], names, c.x, c.smooth, c.ymin, c.ymax, c.title, c.width)}


def main(argv=None):
    c = configurator.configure(__file__, argv, operands="RUN [RUN ...]")
    with configurator.clean_errors(), matplotlib.rc_context(STYLE):
        drawn = figures(c)
        for name, fig in drawn.items():
            path = Path(c.out or f"{name}.png")
            file = path if len(drawn) == 1 or not c.out else path.with_name(f"{path.stem}_{name}{path.suffix}")
            # no date and no version in the file: the same numbers give the same bytes
            fig.savefig(file, dpi=c.dpi, metadata={".png": {"Software": None}, ".pdf": {"CreationDate": None}, ".svg": {"Date": None}}[path.suffix])
            plt.close(fig)
            print(file)


if __name__ == "__main__":
    main()
