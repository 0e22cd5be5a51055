"""
What a training run needs, before it is started: the memory of each GPU and the days it takes, from its configuration alone.

`python bench.py config/depth_3b.py --plan` prints it. Activations are counted tensor by tensor, as model.py and kernels.py keep them for the backward
pass under bfloat16 autocast on CUDA; a test holds the count against what autograd really saves. Sizes are in bytes, GB are 10^9 of them.
"""
import math
import re

import torch

from model import GPT, GPTConfig

CARDS = (80, 141)  # nominal GB, of H100 and A100 and of H200; what they have beyond it (6 %) is left to CUDA's context, NCCL and the allocator's gaps
# Peak dense 16-bit matmul rates in TFLOP/s, from the makers' data sheets; all words of a key must be in the device's name, first match wins.
PEAKS = {"B200": 2250, "GB200": 2250, "H200": 989, "GH200": 989, "H800": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H20": 148,
         "A100": 312, "A800": 312, "L40S": 362, "L4": 121, "A10G": 70, "RTX 4090": 165, "RTX 3090": 71}
LOGITS = 2**29  # elements of a chunk of logits, as in model.LinearCrossEntropy on CUDA


# ----------------------------------------------------------------------------------------------------------------------
# activations, in bytes a token; every tensor is bfloat16 unless it says otherwise. C, M, H, G, D as in model.py

def stream(model, grad_checkpoint):
    """What carries the residual stream, for all layers: at every sub-layer, or with grad_checkpoint only where a layer begins."""
    c, M, C, n = model.config, len(model.order), 2 * model.config.n_embd, model.config.mhc_num_streams
    borders, inside = {
        "residual": (2 * M * C, C),  # x before each norm; with the branch that is not added yet, where a layer begins
        "denseformer": ((M + 1 + sum(map(bool, getattr(model.connector, "lengths", ())))) * C, M * C),  # outputs and averages; x before the MLP
        "attnres": ((M + 1) * C + C, M * C + 2 * M * (C + 4)),  # x after each sub-layer; what a sub-layer reads, with a log-sum-exp in float32
        "mhc": ((M * (n + 1) + 1) * C + 4 * M * (n * n + n), M * (n + 1) * C + 4 * M * (3 * n * n + 7 * n + 2)  # streams and a branch's output; maps in float32
                + 2 * M * C * (c.norm_order == "post")),  # what a branch reads, which no norm has made
    }.get(c.connector, (2 * M * C, C))
    return borders if grad_checkpoint else borders + inside


def layers(model):
    """What the insides of all layers keep, by kind, without the sources and slots that later layers read."""
    c, M = model.config, len(model.order)
    q, kv = 2 * c.n_head * c.head_dim, 2 * c.n_kv_head * c.head_dim
    mixes = sum(map(bool, getattr(model.depth, "candidates", ())))
    return {"norms": M * 2 * 2 * c.n_embd,  # their outputs; in post-norm order their inputs
            "qkv projections": M * (q + 2 * kv),
            "queries, keys, values": M * (q + kv) + mixes * (kv + 4 * c.n_kv_head),  # a value that is not mixed is a part of its projection
            "attention outputs": M * (q + 4 * c.n_head),  # with log-sum-exps in float32
            "MLPs": M * 3 * 2 * c.n_inner}


def shared(model, grad_checkpoint):
    """Keys and values that later layers read, beyond what their own layer keeps of them."""
    c, kv = model.config, 2 * model.config.n_kv_head * model.config.head_dim
    own = 2 * kv if grad_checkpoint else 0  # what a layer that is computed again would not keep
    if c.depth == "depth_attention":
        return len(model.depth.read_later) * own + kv * (0 in model.depth.read_later)  # layer 0 mixes nothing: its values are copied
    if c.depth == "moda":
        ffn = sum(model.layers[l].ffn_kv is not None for l in model.order)
        return len(model.order) * (kv + own / 2) + ffn * (2 * kv + (0 if grad_checkpoint else 2 * kv))
    return 0


def activations(model, tokens, grad_checkpoint=False):
    """
    Bytes that the forward pass of a micro-batch of `tokens` tokens leaves for the backward pass, by kind. With grad_checkpoint these are the layers'
    inputs, and the inside of the one layer that is being computed again. model: a GPT, which may be on the meta device.
    """
    parts = {"residual stream": stream(model, grad_checkpoint)}
    inside = layers(model)
    if grad_checkpoint:
        parts["one layer, computed again"] = (sum(inside.values()) + stream(model, False) - stream(model, True)) / len(model.order)
    else:
        parts |= inside
    parts |= {"depth sources and slots": shared(model, grad_checkpoint), "gradient at the head": 2 * model.config.n_embd}
    return {name: round(tokens * size) for name, size in parts.items() if size}


def reader_gradients(model):
    """Bytes a token of the buffers in which later layers' readers add up the gradients of what they read. All are there early in the backward pass."""
    c, M, C, kv = model.config, len(model.order), 2 * model.config.n_embd, 2 * model.config.n_kv_head * model.config.head_dim
    depth = {"depth_attention": len(getattr(model.depth, "read_later", ())),
             "moda": M + sum(model.layers[l].ffn_kv is not None for l in model.order)}.get(c.depth, 0)
    states = {"denseformer": M + 1, "attnres": 1 + 2 * M // c.attnres_block_size}.get(c.connector, 0)
    return depth * 2 * kv + states * C


# ----------------------------------------------------------------------------------------------------------------------
# all of the memory, and time

def peak_flops(device_name, dtype):
    """Peak FLOP/s of a device for matmuls in that dtype, None if unknown: then no MFU is reported rather than a wrong one."""
    words = set(re.split(r"[\s\-_]+", device_name))
    known = [peak * 1e12 for key, peak in PEAKS.items() if set(key.split()) <= words]
    return known[0] if known and dtype != "float32" else None


def skeleton(config):
    """The model without its numbers."""
    with torch.device("meta"):
        return GPT(config)


def peak_memory(model, batch_size, world_size=1, micro_steps=1, zero1=False, grad_checkpoint=False):
    """
    Bytes on each GPU when most are in use, by kind; their sum is the peak. micro_steps: micro-batches a step (gradient accumulation).

    Three moments can be the highest: the end of the forward pass, in the head; the beginning of the backward pass; its end, when all gradients are
    there. With several GPUs (whose gradients are views of DDP's buckets) or several micro-steps, the gradients are there all the time; with both,
    they are there twice, since DDP brings what it has not synchronised yet into its buckets only in the last micro-step.
    """
    c, tokens, n, head = model.config, batch_size * model.config.block_size, model.num_params(), model.head_weight.numel()
    saved = activations(model, tokens, grad_checkpoint)
    casts = 2 * sum(p.numel() for module in (model.layers, model.connector) for p in module.parameters() if p.ndim == 2)
    rows = min(tokens, max(16, LOGITS // c.vocab_size))  # of logits in a chunk
    held = {"parameters": 4 * n, "AdamW's moments": 8 * n // (world_size if zero1 else 1)}
    keeps_gradients = world_size > 1 or micro_steps > 1
    if keeps_gradients:
        held["gradients"] = 4 * n * (2 if world_size > 1 and micro_steps > 1 else 1)
    passing = {"gradients of activations": 2 * tokens * 3 * (c.n_inner + c.n_embd) + tokens * reader_gradients(model)}
    forward = {kind: size for kind, size in saved.items() if kind != "one layer, computed again"}
    forward |= {"weights in bfloat16": casts + 2 * head, "logits": 2 * rows * c.vocab_size, "gradient of the head": (4 + 2) * head}
    begin = saved | {"weights in bfloat16": casts, "gradient of the head": 4 * head} | passing
    end = passing | ({} if keeps_gradients else {"gradients": 4 * n})
    return held | max((forward, begin, end), key=lambda moment: sum(moment.values()))


def largest_batch(model, limit, **options):
    """The most sequences a micro-batch whose peak is within `limit` bytes; 0 if not even one is."""
    fits = lambda batch: sum(peak_memory(model, batch, **options).values()) <= limit
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def sentences(model, batch_size, peak_flops, mfu, train_tokens=0, grad_checkpoint=False, **options):
    """
    What the memory allows and the time that a run takes, as sentences. peak_flops: of one GPU, or None if unknown; train_tokens: of the whole run, or 0;
    options: world_size, micro_steps and zero1 of `peak_memory`.
    """
    T, world_size = model.config.block_size, options.get("world_size", 1)
    parts = peak_memory(model, batch_size, grad_checkpoint=grad_checkpoint, **options)
    found = [f"{model.num_params():,} parameters, {model.num_params(embedding=False):,} without the input embedding. The peak is {sum(parts.values()) / 1e9:.1f} GB."]
    for checkpointed in (False, True):
        largest = ", ".join(f"{largest_batch(model, 1e9 * card, grad_checkpoint=checkpointed, **options)} in {card} GB" for card in CARDS)
        found.append(f"Largest micro-batch of {T:,} tokens {'with' if checkpointed else 'without'} --grad_checkpoint: {largest}.")
    flops = model.mfu_flops_per_token(T)
    text = f"A token takes {flops / 1e9:.3g} GFLOP by MFU's convention, {model.flops_per_token(T) / 1e9:.3g} with the method's own work."
    if peak_flops:
        speed = mfu * peak_flops * world_size / flops
        text += f" At {100 * mfu:g} % of {world_size} x {peak_flops / 1e12:,.0f} TFLOP/s that is {speed:,.0f} tokens/s"
        text += f"; {train_tokens / 1e9:.3g}B tokens take {train_tokens / speed / 86400:.3g} days." if train_tokens else "."
    return found + [text]


# ----------------------------------------------------------------------------------------------------------------------
# what each method adds to a vanilla Transformer: the README's table

COMPARED = {"vanilla": {}, "Depth-Attention, stride L/2": dict(depth="depth_attention"), "Depth-Attention, stride 4": dict(depth="depth_attention", depth_stride=4),
            "MoDA": dict(depth="moda"), "MoDA without FFN slots": dict(depth="moda", moda_ffn_kv=False), "DenseFormer": dict(connector="denseformer"),
            "AttnRes, blocks of 12 sub-layers": dict(connector="attnres"), "mHC, 4 streams": dict(connector="mhc"), "looped twice": dict(n_loop=2)}
SHAPE = dict(n_layer=32, n_head=16, n_kv_head=4, n_embd=1024, n_inner=2816, block_size=2048, vocab_size=50304)  # config/vanilla_410m.py


def passed_up(model):
    """Numbers a token that one layer hands to later ones besides a residual stream of width C. They live within a forward pass; none is cached."""
    c, M, kv = model.config, len(model.order), 2 * model.config.n_kv_head * model.config.head_dim
    if c.depth == "depth_attention":
        return kv * len(model.depth.read_later)
    if c.depth == "moda":
        return kv * sum(1 + (model.layers[l].ffn_kv is not None) for l in model.order[:-1])
    sources = {"denseformer": M, "attnres": 1 + 2 * M // (2 * math.ceil(c.attnres_block_size / 2)), "mhc": c.mhc_num_streams - 1}
    return c.n_embd * sources.get(c.connector, 0)


def method_table():
    """The README's table of methods as lines of Markdown, every number computed from the model on the meta device."""
    vanilla = skeleton(GPTConfig(**SHAPE))
    T, lines = vanilla.config.block_size, ["| method | parameters | FLOPs a token | KV cache a token | passed up the layers, a token |", "|---|---|---|---|---|"]
    for name, fields in COMPARED.items():
        model = skeleton(GPTConfig(**SHAPE | fields))
        more = model.num_params() - vanilla.num_params()
        flops = model.flops_per_token(T) / vanilla.flops_per_token(T) - 1
        cache = 2 * 2 * len(model.order) * model.config.n_kv_head * model.config.head_dim / 1024
        cells = (f"{vanilla.num_params():,}", f"{vanilla.flops_per_token(T) / 1e9:.2f} G") if model.config == vanilla.config else (f"+{more:,}", f"+{100 * flops:.2f} %")
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {cache:.0f} KiB | {passed_up(model):,} |")
    return lines


if __name__ == "__main__":
    print(*method_table(), sep="\n")
