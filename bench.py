"""
How fast the methods train, side by side in one process. One table a run:

    python bench.py                                                      # vanilla and Depth-Attention: 410M on a GPU, tiny on a CPU
    python bench.py --methods=vanilla,depth_attention:depth_stride=4,mhc --shape=3b --batch_size=4
    python bench.py --methods=vanilla --peer=hf_llama                    # against Hugging Face's Llama of the same shape
    python bench.py --shape=config/compare/vanilla.py --cuda_graph       # eager, and as a CUDA graph: what Python's launches cost
    python bench.py --kernels                                            # each kernel against the bytes it must move
    python bench.py --decode                                             # tokens/s of generate against the memory bandwidth
    python bench.py --profile                                            # where a step's time goes
    python bench.py config/depth_3b.py --plan --world_size=8 --gpu=H100  # memory and days of a run, computed, no GPU needed

A method is a name (vanilla, depth_attention, denseformer, attnres, mhc, moda, looped) plus fields of GPTConfig, as in attnres:attnres_block_size=8.
Methods take turns of a few steps, so that a clock that drifts hits all of them alike, and the overhead is the median over the turns of the ratio to
the first method. Nothing is timed that is wrong: the path that is timed is compared with float64 before. On a GPU all methods train the same weights
in turn, which leaves the speed as it is and lets any number of them fit into memory; the peak memory shown is what each would need alone.
"""
import contextlib
import concurrent.futures
import copy
import dataclasses
import difflib
import functools
import gc
import importlib.metadata
import importlib.util
import itertools
import math
import multiprocessing
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from json import dumps, loads
from pathlib import Path
from typing import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import configurator
import model as definitions
import plan as plan_memory
from graphs import EAGER_STEPS, GraphedGradients, reason_against
from model import GPT, GPTConfig
from plan import peak_flops
from runlog import device_name
from train import DTYPES

# what is measured
methods = ""  # names with fields, separated by commas; empty = vanilla,depth_attention, or with --plan the config file's own
shape = ""  # 410m, 3b, 124m, tiny or a config file; empty = 410m on CUDA, tiny elsewhere
batch_size = 0  # sequences a step; 0 = what the shape is measured with
block_size = 0  # tokens in a sequence; 0 = the shape's
steps = 0  # timed steps of each method; 0 = 40 on CUDA, 6 elsewhere
peer = ""  # hf_llama = Hugging Face's Llama of the same shape as well, compiled and eager
device = ""  # cpu, cuda, cuda:1, mps; empty = the best there is
dtype = ""  # bfloat16 or float32 of the matmuls; empty = bfloat16 on CUDA, float32 elsewhere
compile = True  # torch.compile the MLPs where no Triton kernels run, and --peer; on CPUs only if it is given
cuda_graph = False  # every method once more, with forward and backward as one CUDA graph
grad_checkpoint = False  # recompute each layer in the backward pass
cold = False  # also time each method's first step in a process of its own with empty compiler caches
json = ""  # file for the figures, their command, versions and device
# other tables
kernels = False  # every kernel against the definition, the bytes it must move, and SDPA
decode = False  # generation against the memory bandwidth and Hugging Face's generate
profile = False  # the device time of a step by kind of kernel
plan = False  # memory and time of a training run, from its config alone
# of --kernels
only = ""  # beginnings of the kernels' names, separated by commas; empty = all
sweep = False  # also time each kernel with the launch settings next to its own
# of --decode
prompt_tokens = 128  # length of the prompt
new_tokens = 0  # tokens to generate; 0 = 256 on CUDA, 16 elsewhere
# of --plan
world_size = 8  # GPUs
gpu = "H100"  # their name
mfu = 0.5  # fraction of their peak that is reached
zero1 = False  # optimizer state spread over the GPUs; not given: as the config file says
train_tokens = 0  # tokens of the run; 0 = what the config file trains on

TABLES = ("kernels", "decode", "profile", "plan")
SWITCHES = (*TABLES, "cold", "sweep", "zero1", "grad_checkpoint", "cuda_graph")  # may be written without a value
PLAIN = dict(connector="residual", depth="none", n_loop=1, n_prelude=0, n_coda=0)
METHODS = {"vanilla": PLAIN, "depth_attention": PLAIN | dict(depth="depth_attention"), "denseformer": PLAIN | dict(connector="denseformer"),
           "attnres": PLAIN | dict(connector="attnres"), "mhc": PLAIN | dict(connector="mhc"), "moda": PLAIN | dict(depth="moda"),
           "looped": PLAIN | dict(n_loop=2)}
CONFIG_PREFIX = {"depth_attention": "depth"}  # config/depth_410m.py; the other methods' files begin with their name
SHAPES = {"tiny": dict(n_layer=4, n_head=4, n_kv_head=2, n_embd=128, block_size=128, vocab_size=512),
          "124m": dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304)}  # GPT-2 small's
BATCH = {"tiny": 4, "124m": 32, "410m": 16, "3b": 8}
VOCAB = 50304  # of configs that take it from their data: GPT-2's, rounded up
GROUP = {"cuda": 5}  # steps in a turn; 2 elsewhere
MODEL_FIELDS = {field.name for field in dataclasses.fields(GPTConfig)}


# ----------------------------------------------------------------------------------------------------------------------
# what to measure

def read_config(path):
    """The options that a config file sets for train.py, as a dict. Raises ValueError."""
    options = configurator.options_of(configurator.ROOT / "train.py", model_fields=True)
    return configurator.read_config_file(str(path), {option.name: option for option in options})


def read_shape(c, device):
    """(the shape's name, its config file or None, its fields of GPTConfig, its sequences a batch). Raises ValueError."""
    name = c.shape or ("410m" if device.type == "cuda" or c.plan else "tiny")
    file, values = None, SHAPES.get(name)
    if values is None:
        file = Path(f"config/vanilla_{name}.py")
        file = file if (configurator.ROOT / file).exists() else Path(name)
        if not configurator.find(file).is_file():
            known = sorted({*SHAPES, *(p.stem.removeprefix("vanilla_") for p in (configurator.ROOT / "config").glob("vanilla_*.py"))})
            raise ValueError(f"--shape={name} is neither a config file nor one of {', '.join(known)}.")
        values = read_config(file)
    fields = {key: value for key, value in values.items() if key in MODEL_FIELDS}
    fields["vocab_size"] = fields.get("vocab_size") or VOCAB
    fields["block_size"] = c.block_size or fields.get("block_size") or 1024
    return name, file, fields, c.batch_size or BATCH.get(name) or values.get("batch_size") or 8


def list_methods(c, name, file, fields):
    """[(label, GPTConfig)] of --methods at a shape. A method's own config file of that shape, where there is one, gives its fields. Raises ValueError."""
    if not c.methods and c.plan and file:
        return [(file.stem, GPTConfig(**fields))]
    options = {option.name: option for option in configurator.read_options(configurator.ROOT / "model.py", "GPTConfig")}
    listed = []
    for label in (c.methods or "vanilla,depth_attention").split(","):
        method, *overrides = label.strip().split(":")
        if method not in METHODS:
            raise ValueError(f"--methods: {method!r} is not a method; the methods are {', '.join(METHODS)}.")
        own = configurator.ROOT / f"config/{CONFIG_PREFIX.get(method, method)}_{name}.py"
        values = fields | METHODS[method]
        if own.exists():
            values |= {key: value for key, value in read_config(own).items() if key in MODEL_FIELDS - {"vocab_size", "block_size"}}
        for override in overrides:
            field, equals, text = override.partition("=")
            if field not in options or not equals:
                near = difflib.get_close_matches(field, options, n=1, cutoff=0)[0]
                raise ValueError(f"--methods: {label!r} has {override!r}, which is not field=value with a field of GPTConfig; did you mean {near}=...?")
            values[field] = configurator.parse(options[field], text)
        listed.append((label.strip(), GPTConfig(**values)))
    return listed


# ----------------------------------------------------------------------------------------------------------------------
# models that are trained in turn

class Contender:
    """
    A row of the table: a model with its optimizer. `loss(x, y)` gives the mean loss; `needs` is the memory in bytes that it holds between two steps,
    were it alone; `flops` the FLOPs a token by MFU's convention.
    """

    def __init__(self, name, model, loss, flops, autocast):
        self.name, self.model, self.loss, self.flops, self.autocast = name, model, loss, flops, autocast
        self.optimizer, self.needs, self.first_step, self.peak = None, 0, math.nan, 0
        self.turns = []  # lists of milliseconds a step
        self.graphed = None  # `backward` as a CUDA graph

    def gradients(self, x, y):
        """(loss, norm of the gradient) of a batch; leaves the gradient, clipped, in the parameters."""
        loss = self.graphed(x, y, True) if self.graphed else self.backward(x, y)
        return loss, torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def backward(self, x, y):
        with self.autocast:
            loss = self.loss(x, y)
        loss.backward()
        return loss.detach()

    def as_graph(self, pool):
        """A contender with the same model and optimizer that replays its forward and backward pass; see graphs.GraphedGradients."""
        twin = copy.copy(self)
        twin.name, twin.turns, twin.graphed = f"{self.name}, graph", [], GraphedGradients(self.backward, self.model.parameters(), pool)
        return twin

    def step(self, x, y):
        loss, norm = self.gradients(x, y)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, norm

    @property
    def ms(self):
        return statistics.median(step for turn in self.turns for step in turn)


def build(name, config, autocast, device, first, grad_checkpoint=False):
    """A contender for a method. With `first`, it trains that contender's weights, where they have the same name and shape, and its optimizer's state."""
    before = memory(device)
    with torch.device(device):
        model = GPT(config)
    model.grad_checkpoint = grad_checkpoint
    shared = share_weights(model, first.model) if first else []
    contender = Contender(name, model, lambda x, y: model(x, y)[1], model.mfu_flops_per_token(config.block_size), autocast)
    contender.optimizer = model.configure_optimizers(0.1, 1e-4, (0.9, 0.95), device.type)
    contender.optimizer.state.update({p: first.optimizer.state[p] for p in shared})
    contender.needs = memory(device) - before + 12 * sum(p.numel() for p in shared)  # what is shared: weights and two moments in float32
    contender.adds = 8 * (sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in shared))  # moments that come with the first step
    return contender


def share_weights(model, first):
    """Puts the first model's parameters into the places of the model's own where names and shapes agree; returns them."""
    theirs, shared = dict(first.named_parameters()), []
    for name, own in list(model.named_parameters()):
        if name in theirs and theirs[name].shape == own.shape:
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, theirs[name])
            shared.append(theirs[name])
    return shared


def build_peer(config, autocast, device, compiled):
    """Hugging Face's Llama of the same shape (it has no norm of queries and keys), eager and, with `compiled`, as a whole through torch.compile: contenders over one model."""
    before = memory(device)
    with torch.device(device):
        llama = hf_llama(config)
    flops = 6 * (sum(p.numel() for p in llama.parameters()) - llama.model.embed_tokens.weight.numel()) + \
        12 * config.n_layer * config.n_head * config.head_dim * config.block_size
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda")
    peers = []
    for name, call in [("hf_llama compiled", torch.compile(llama))] * compiled + [("hf_llama eager", llama)]:
        peers.append(Contender(name, llama, lambda x, y, call=call: call(input_ids=x, labels=x, use_cache=False).loss, flops, autocast))
        peers[-1].optimizer, peers[-1].needs = optimizer, memory(device) - before
        peers[-1].adds = 8 * sum(p.numel() for p in llama.parameters())
    return peers


def hf_llama(config):
    """transformers' LlamaForCausalLM with the shape of a GPTConfig, randomly initialised. Raises ValueError without transformers."""
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("--peer=hf_llama needs the package transformers, which is not installed.")
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    # "sdpa" under another name, for which transformers makes no mask: under torch.compile it makes one, and with a mask SDPA has none of its fast kernels
    AttentionInterface.register("sdpa_causal", sdpa_attention_forward)
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=config.n_embd, intermediate_size=config.n_inner, num_hidden_layers=config.n_layer, num_attention_heads=config.n_head,
        num_key_value_heads=config.n_kv_head, head_dim=config.head_dim, vocab_size=config.vocab_size, max_position_embeddings=config.block_size,
        rms_norm_eps=config.norm_eps, rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        initializer_range=config.init_std, tie_word_embeddings=config.tie_embeddings, attn_implementation="sdpa_causal"))


# ----------------------------------------------------------------------------------------------------------------------
# correct before fast

LIMITS = {torch.bfloat16: 0.1, torch.float32: 0.01}  # of ||gradient - exact|| / ||exact||, whatever the definitions do; float32 matmuls use TF32 on CUDA
BATCHES = 8  # whose gradients are taken together: with one, the rounding of a parameter of a few numbers (mHC's read-out has 4) is a matter of luck


def reduced(config):
    """
    The same method with the same heads and widths, but few layers, a short context and a small vocabulary, so that float64 is affordable; with weights so
    large that every branch matters to the loss, and with a recency bias that leaves AttnRes' other sources a share of the same size as the stream's.
    """
    n_layer = min(config.n_layer, max(4, config.n_prelude + config.n_coda + 2))
    return dataclasses.replace(config, n_layer=n_layer, init_std=config.n_embd**-0.5, block_size=min(config.block_size, 192), vocab_size=min(config.vocab_size, 512),
                               depth_stride=min(config.depth_stride, n_layer // 2), attnres_block_size=min(config.attnres_block_size, 3), attnres_recency_bias_init=1.0)


def perturb(model):
    """
    Moves norms, biases and coefficients from their start, where parts of them have no effect. AttnRes' queries move by as much as gives scores of about 1
    at any width: larger ones make softmaxes so sharp that bfloat16 alone takes the gradient 5 % away at a width of 1024, and further the wider the model.
    """
    for name, p in model.named_parameters():
        if p.ndim < 2:
            p.data += (model.config.n_embd**-0.5 if name.endswith("pseudo_query") else 0.1) * torch.randn_like(p)


@contextlib.contextmanager
def only_definitions():
    """model.py without kernels.py."""
    before, definitions.use_kernels = definitions.use_kernels, False
    try:
        yield
    finally:
        definitions.use_kernels = before


def loss_and_gradients(model, x, y, autocast):
    """(loss, {parameter's name without the layer's number: its gradient over all layers, flat, in float64})."""
    model.zero_grad(set_to_none=True)
    with autocast:
        loss = model(x, y)[1]
    loss.backward()
    kinds = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            kinds.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(p.grad.double().flatten())
    return loss.item(), {kind: torch.cat(parts) for kind, parts in kinds.items()}


def check(name, config, autocast, dtype, device, compiled=False):
    """
    Raises ValueError unless loss and gradients of the path that is timed agree with the definitions in float64, on fresh random weights and tokens of the
    same method with fewer layers. They may be no further away than rounding explains: loss and gradient twice as far as the definitions in the same dtype
    (plus 0.1 %), the gradient of each kind of parameter three times as far (plus 1 %). All distances are over BATCHES batches. Returns the gradient's.
    """
    seed = torch.seed() % 2**31
    torch.manual_seed(seed)
    small = reduced(config)
    with torch.device(device):
        model = GPT(small)
        perturb(model)
        batches = torch.randint(small.vocab_size, (BATCHES, 2, 2, small.block_size))
    exact_model, timed = copy.deepcopy(model).double(), copy.deepcopy(model)
    if compiled:
        timed.compile_blocks()
    losses, squares = 0, {}  # sums over the batches of [own error, the definitions' error, exact value] squared: of the loss, and of each kind of parameter
    for x, y in batches:
        with only_definitions():
            rounded_loss, rounded = loss_and_gradients(model, x, y, autocast)
            exact_loss, exact = loss_and_gradients(exact_model, x, y, contextlib.nullcontext())
        loss, gradient = loss_and_gradients(timed, x, y, autocast)
        losses += torch.tensor([loss - exact_loss, rounded_loss - exact_loss, exact_loss], dtype=torch.float64).square()
        for kind, g in exact.items():
            norms = torch.stack([torch.linalg.vector_norm(v) for v in (gradient[kind] - g, rounded[kind] - g, g)]).cpu()
            squares[kind] = squares.get(kind, 0) + norms.square()

    def far(sums):
        """How far from the exact value, as a share of it: the path that is timed, and the definitions."""
        return (sums[:2] / sums[2].clamp_min(1e-60)).sqrt().tolist()
    found, slack = [], LIMITS[dtype] / 100
    own, others = far(losses)
    found += [] if own <= 2 * others + slack else [f"the loss is {100 * own:.2g} % away, the definitions' in the same dtype {100 * others:.2g} %"]
    total, others = far(sum(squares.values()))
    if not total <= min(2 * others + 1e-3, LIMITS[dtype]):
        found.append(f"the gradient is {100 * total:.2g} % away, the definitions' in the same dtype {100 * others:.2g} %")
    kinds = [(*far(sums), kind) for kind, sums in squares.items()]
    own, others, kind = max(kinds, key=lambda k: k[0] / (3 * k[1] + 0.01) if math.isfinite(k[0]) else math.inf)
    found += [] if own <= 3 * others + 0.01 else [f"that of {kind} is {100 * own:.2g} % away, the definitions' {100 * others:.2g} %"]
    if found:
        raise ValueError(f"{name} is wrong against float64 (seed {seed}): {'; '.join(found)}. It is not timed.")
    return total


def check_replay(eager, graph, x, y):
    """Raises ValueError unless what the graph replays leaves the gradients that its own eager twin leaves: the same kernels, so nearly the same bits."""
    found = []
    for backward in (eager.backward, lambda x, y: graph.graphed(x, y, True)):
        backward(x, y)
        found.append([p.grad.clone() for p in eager.model.parameters() if p.grad is not None])
        eager.optimizer.zero_grad(set_to_none=True)
    wanted, replayed = found
    norms = [torch.stack(torch._foreach_norm(gradients)).norm().item() for gradients in (torch._foreach_sub(replayed, wanted), wanted)]
    if not norms[0] <= 1e-4 * norms[1]:
        raise ValueError(f"{graph.name} leaves a gradient that is {100 * norms[0] / norms[1]:.2g} % away from the eager one. It is not timed.")


# ----------------------------------------------------------------------------------------------------------------------
# time

def memory(device):
    """Bytes in use on the device, 0 where that is not known."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if device.type == "mps":
        torch.mps.synchronize()


def stopwatch(device):
    """A function that marks now in the device's work, and one that gives the milliseconds between two marks once the device is done."""
    if device.type != "cuda":
        def mark():
            wait(device)
            return time.perf_counter()
        return mark, lambda a, b: 1000 * (b - a)

    def mark():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return mark, lambda a, b: a.elapsed_time(b)


def take_turn(contender, batches, n, device):
    """n timed steps after one that is not, which fills the device's queue. Notes each step's milliseconds and the peak of the memory."""
    mark, between = stopwatch(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        held = memory(device)
    contender.step(*batches[-1])
    marks = [mark()]
    for i in range(n):
        contender.step(*batches[i % len(batches)])
        marks.append(mark())
    wait(device)
    contender.turns.append([between(a, b) for a, b in zip(marks, marks[1:])])
    if device.type == "cuda":
        contender.peak = max(contender.peak, torch.cuda.max_memory_allocated(device) - held + contender.needs)


def first_step(contender, batches, device):
    """Makes the first step, compilation and all, and notes its seconds."""
    wait(device)
    start = time.perf_counter()
    loss, _ = contender.step(*batches[0])
    loss.item()
    contender.first_step = time.perf_counter() - start
    contender.needs += contender.adds if device.type == "cuda" else 0


def random_batches(n, batch_size, config, device):
    tokens = torch.randint(config.vocab_size, (n, batch_size, config.block_size + 1), device=device)
    return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]


def assemble(c, listed, batch_size, device, autocast):
    """Builds, warms up and checks one contender after another; returns those that can be timed, and what became of the others."""
    compiled = c.compile and (device.type == "cuda" or "compile" in c.given)
    if compiled:
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)  # several models share the code of a layer
        torch._dynamo.config.automatic_dynamic_shapes = False  # or the check's small model would turn the code that is timed into one for any shape
    contenders, failed = [], []
    batches = random_batches(4, batch_size, listed[0][1], device)
    makers = [(label, config, lambda label=label, config=config: [build(label, config, autocast, device, contenders[0] if contenders else None, c.grad_checkpoint)])
              for label, config in listed]
    if c.peer:
        makers.append(("hf_llama", None, lambda: build_peer(listed[0][1], autocast, device, compiled)))
    for label, config, make in makers:
        made = []
        try:
            made = make()
            if config and compiled:
                made[0].model.compile_blocks()
            if config and c.cuda_graph:
                against = reason_against(device, grad_checkpoint=c.grad_checkpoint)
                if against:
                    failed.append((f"{label}, graph", f"{label} is not recorded as a graph: {against}."))
                else:
                    made.append(made[0].as_graph(next((x.graphed.pool for x in contenders if x.graphed), None)))
            for contender in made:
                first_step(contender, batches, device)
                if contender.graphed:  # recorded here; the memory that it takes is counted, the time is not
                    take_turn(contender, batches, EAGER_STEPS, device)
                    contender.turns.clear()
                    check_replay(*made, *batches[0])
            if config:
                error = check(label, config, autocast, DTYPES[c.dtype], device, compiled)
                print(f"{label}: first step {made[0].first_step:.1f} s; gradient {100 * error:.2g} % from float64", flush=True)
            contenders += made
        except torch.OutOfMemoryError:
            failed.append((label, f"{label} does not fit into the device's memory at --batch_size={batch_size}."))
            for contender in contenders:  # what they share with it may hold gradients of the step that failed
                contender.optimizer.zero_grad(set_to_none=True)
        except ValueError as error:
            failed.append((label, str(error)))
        del made
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
    return contenders, failed, batches


# ----------------------------------------------------------------------------------------------------------------------
# the table of methods

def compare(c, device, autocast):
    """Trains all methods in turns; returns (title, rows, notes, errors)."""
    name, file, fields, batch = read_shape(c, device)
    listed = list_methods(c, name, file, fields)
    cold_seconds = {label: cold_start(c, label, batch) for label, _ in listed} if c.cold else {}
    contenders, failed, batches = assemble(c, listed, batch, device, autocast)
    steps = c.steps or (40 if device.type == "cuda" else 6)
    group = min(steps, GROUP.get(device.type, 2))
    for turn in range(-1 if device.type == "cuda" else 0, math.ceil(steps / group)):
        for contender in contenders if turn % 2 == 0 else reversed(contenders):
            try:
                take_turn(contender, batches, group, device)
            except torch.OutOfMemoryError:
                raise ValueError(f"{contender.name} does not fit beside the others at --batch_size={batch}; give a smaller one, or fewer --methods a run.") from None
            if turn < 0:  # not counted: a rested GPU is faster than one at its power limit
                contender.turns.clear()
    rows = [row(contender, contenders[0], batch * fields["block_size"], peak_flops(device_name(device), c.dtype)) for contender in contenders]
    for r in rows:
        r |= {"cold first step s": cold_seconds[r["method"]]} if r["method"] in cold_seconds else {}
    rows += [{"method": label, "tokens/s": None} for label, _ in failed]
    title = f"Training, shape {name}: {batch} x {fields['block_size']} tokens a step, {c.dtype}, {steps} steps each in turns of {group}"
    return title, rows, [], [text for _, text in failed]


def row(contender, first, tokens, peak):
    speed = 1000 * tokens / contender.ms
    ratios = [statistics.median(own) / statistics.median(base) - 1 for own, base in zip(contender.turns, first.turns)]
    low, high = (statistics.quantiles(ratios, n=4)[::2] if len(ratios) > 1 else ratios * 2)
    return {"method": contender.name, "parameters": sum(p.numel() for p in contender.model.parameters()), "tokens/s": speed,
            "MFU %": 100 * speed * contender.flops / peak if peak else None, "ms a step": contender.ms,
            "overhead %": 100 * statistics.median(ratios), "from %": 100 * low, "to %": 100 * high,
            "peak GB": contender.peak / 1e9 or None, "first step s": contender.first_step}


def cold_start(c, label, batch):
    """Seconds of a method's first step in a process of its own whose compiler caches are empty."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        passed = {"shape", "block_size", "device", "dtype", "compile", "grad_checkpoint"} & c.given
        argv = [f"--{name}={getattr(c, name)}" for name in passed] + [f"--methods={label}", f"--batch_size={batch}", "--steps=1", f"--json={figures}"]
        caches = {name: f"{folder}/{name}" for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        result = subprocess.run([sys.executable, __file__, *argv], capture_output=True, text=True, env=os.environ | caches)
        if result.returncode:
            raise ValueError(f"the cold start of {label} failed: {(result.stderr or result.stdout).strip().splitlines()[-1]}")
        return loads(figures.read_text())["rows"][0]["first step s"]


# ----------------------------------------------------------------------------------------------------------------------
# generation

def copy_bandwidth(device):
    """Bytes/s of a large copy on the device, counting bytes read and written: the ceiling of whatever is bound by memory."""
    source = torch.empty((2**30 if device.type == "cuda" else 2**26) // 4, device=device).normal_()
    target = torch.empty_like(source)
    mark, between = stopwatch(device)
    times = []
    for _ in range(12):
        start = mark()
        target.copy_(source)
        end = mark()
        wait(device)
        times.append(between(start, end))
    return 2 * source.nbytes / (statistics.median(times[2:]) / 1000)


def decoding(c, device, autocast):
    """Tokens/s of generate for each method, against the bytes that a token must read; returns (title, rows, notes, errors)."""
    name, file, fields, _ = read_shape(c, device)
    listed = list_methods(c, name, file, fields)
    n = c.new_tokens or (256 if device.type == "cuda" else 16)
    length = min(c.prompt_tokens, fields["block_size"] - n)
    if length < 1 or n < 2:
        raise ValueError(f"--new_tokens={n} must be at least 2 and leave room for a prompt in {fields['block_size']} tokens.")
    bandwidth, errors, runs = copy_bandwidth(device), [], []
    makers = [(label, config, own_generator, n) for label, config in listed]
    if importlib.util.find_spec("transformers"):
        makers.append(("hf_llama", listed[0][1], peer_generator, min(n, 64)))  # a tenth of the speed, and no longer turns for that
    for batch in sorted({1, c.batch_size or 1}):
        prompt = torch.randint(fields["vocab_size"], (batch, length), device=device)
        for label, config, make, tokens in makers:
            try:
                generate, bytes_read = make(label, config, prompt, length + tokens / 2, DTYPES[c.dtype], autocast)
            except ValueError as error:
                errors.append(str(error))
                continue
            runs.append((label, batch, tokens, generate, bytes_read, []))
    for _ in range(4):
        for _, _, tokens, generate, _, seconds in runs:
            seconds.append(generation_seconds(generate, tokens, device))
    rows, first = [], {}
    for label, batch, _, _, bytes_read, seconds in runs:
        seconds = statistics.median(seconds[1:])  # the first turn compiles and captures
        rows.append({"method": label, "batch": batch, "tokens/s": batch / seconds, "ms a token": 1000 * seconds, "floor ms": 1000 * bytes_read / bandwidth,
                     "of the bound %": 100 * bytes_read / bandwidth / seconds, "overhead %": 100 * (seconds / first.setdefault(batch, seconds) - 1)})
    title = f"Generation, shape {name}: {n} tokens behind a prompt of {length}, {c.dtype}; copies run at {bandwidth / 1e9:,.0f} GB/s"
    return title, rows, [], errors


def own_generator(label, config, prompt, length, dtype, autocast):
    """(function that generates k tokens as sample.py does, the bytes that a token must read). Raises ValueError if the method decodes wrongly."""
    check_decoding(label, config, autocast, prompt.device, len(prompt))
    with torch.device(prompt.device):
        model = GPT(config).eval()

    def generate(k):
        with autocast:
            model.generate(prompt, k, temperature=0)
    return generate, bytes_per_token(model, len(prompt), length, torch.finfo(dtype).bits // 8)


def peer_generator(label, config, prompt, length, dtype, _):
    """The same of Hugging Face's generate for a Llama of the shape."""
    with torch.device(prompt.device):
        llama = hf_llama(config).to(dtype).eval()
    options = dict(attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0)
    weights = sum(p.numel() for p in llama.parameters()) - (0 if config.tie_embeddings else llama.model.embed_tokens.weight.numel())
    cache = len(prompt) * length * 2 * config.n_layer * config.n_kv_head * config.head_dim
    return lambda k: llama.generate(prompt, max_new_tokens=k, min_new_tokens=k, **options), torch.finfo(dtype).bits // 8 * (weights + cache)


def generation_seconds(generate, n, device):
    """Seconds a token without those of the prompt: the time for n tokens less that for one, over n - 1."""
    seconds = []
    for k in (1, n):
        wait(device)
        start = time.perf_counter()
        generate(k)
        wait(device)
        seconds.append(time.perf_counter() - start)
    return (seconds[1] - seconds[0]) / (n - 1)


def bytes_per_token(model, batch, length, size):
    """The least that must be read for one more token of each of `batch` rows: every weight that is used, as often as it is used, and the cache; size: of a number."""
    c = model.config
    layers = sum(sum(p.numel() for p in model.layers[l].parameters()) for l in model.order)
    rest = sum(p.numel() for module in (model.connector, model.norm) for p in module.parameters()) + model.head_weight.numel()
    return size * (layers + rest + batch * length * 2 * len(model.order) * c.n_kv_head * c.head_dim)


def check_decoding(name, config, autocast, device, batch=2):
    """
    Raises ValueError unless each token that greedy generation gives, as it is timed, is the most likely one of the definitions in float64 without a cache,
    up to what rounding may turn: 1.5 times the largest error of the definitions in the dtype that is timed, for each of two logits; on a small model.
    """
    with torch.device(device):
        model = GPT(reduced(config)).eval()
        prompt = torch.randint(model.config.vocab_size, (batch, model.config.block_size // 2))
    with autocast:
        tokens = model.generate(prompt, min(24, model.config.block_size - prompt.shape[1]), temperature=0)
    with only_definitions(), torch.no_grad():
        with autocast:
            plain = model(tokens[:, :-1])[0][:, prompt.shape[1] - 1:].double()
        logits = model.double()(tokens[:, :-1])[0][:, prompt.shape[1] - 1:]
    behind = logits.amax(-1) - logits.gather(-1, tokens[:, prompt.shape[1]:, None]).squeeze(-1)
    if not behind.max() <= max(3 * (plain - logits).abs().max(), 1e-3 * logits.std()):
        raise ValueError(f"{name}: generation gives a token whose logit is {behind.max():.3g} below the highest (their spread is {logits.std():.3g}). It is not timed.")


# ----------------------------------------------------------------------------------------------------------------------
# kernels: time against the bytes that must move

@dataclasses.dataclass
class Case:
    """
    A kernel at a shape. `fused` and `definition` are functions of the tensors that `inputs(B, T)` makes. forward, backward: the elements a token that each
    pass has to read and write at the least (backward 0: not differentiated). What is timed is `timed`, or else `fused`, of shared(inputs), which
    gives the tensors of earlier layers as slots or states, in whose buffers their gradients add up. settings: its entries of kernels.SETTINGS.
    """
    name: str
    fused: Callable
    definition: Callable
    inputs: Callable
    forward: float
    backward: float
    settings: tuple = ()
    shared: Callable = list
    timed: Callable = None


def elementwise_cases(c, device, dtype):
    """The norms, SwiGLU, the cross entropy and mHC's connection of a GPTConfig's shape."""
    import kernels as fused
    C, I, V, n, eps = c.n_embd, c.n_inner, c.vocab_size, c.mhc_num_streams, c.norm_eps
    state = lambda B, T, n=C: torch.randn(B, T, n, device=device).to(dtype)
    weight = lambda: 1 + 0.1 * torch.randn(C, device=device)

    def logits(B, T):
        return [torch.randn(min(B * T, 8192), V, device=device).to(dtype), torch.randint(V, (min(B * T, 8192),), device=device)]

    def cross_entropy(x, targets):
        d = x.clone()
        return fused.cross_entropy_(d, targets), d

    # the biases of pre, post and res and their factors: one tensor, since a gradient that is a sum of numbers that nearly cancel has no accuracy of its own
    sizes = [n, n, n * n, 1, 1, 1]

    def learned(small):
        pre, post, res, *alphas = small.split(sizes)
        return pre, post, res.view(n, n), *(alpha.squeeze() for alpha in alphas)

    def hyper_inputs(B, T):
        normal = functools.partial(torch.randn, device=device)
        return [state(B, T, n * C).view(B, T, n, C), state(B, T), torch.rand(B, T, n + n * n, device=device), normal(n * (n + 2), n * C) / (n * C)**0.5,
                1 + 0.1 * normal(n * C), normal(sum(sizes)), weight()]

    def connect(x, u, maps, projection, scale, small, w):
        connector = definitions.MHC(dataclasses.replace(c, n_layer=1, n_prelude=0, n_coda=0))
        names = ("pre_logits", "post_logits", "residual_logits", "alpha_pre", "alpha_post", "alpha_res", "projection.weight", "norm.weight")
        values = dict(zip(names, (*learned(small), projection, scale), strict=True))
        maps_of = functools.partial(torch.func.functional_call, connector.sites[0], values)
        h, (x, maps) = connector.read((x, u, maps), maps_of, lambda h: definitions.rms_norm(h, w, eps))
        return x, h, maps

    def connect_fused(x, u, maps, projection, scale, small, w):
        return fused.hyper_connection(x, u, maps, projection, scale, learned(small), c.mhc_sinkhorn_iters, eps, w, eps)

    return [Case("rms_norm", lambda x, w: fused.rms_norm(x, w, eps), lambda x, w: definitions.rms_norm(x, w, eps),
                 lambda B, T: [state(B, T), weight()], 2 * C, 3 * C, ("rms_norm_forward", "rms_norm_backward")),
            Case("add_rms_norm", lambda x, u, w: fused.add_rms_norm(x, u, w, eps), lambda x, u, w: (x + u, definitions.rms_norm(x + u, w, eps)),
                 lambda B, T: [state(B, T), state(B, T), weight()], 4 * C, 4 * C),
            Case("swiglu", fused.swiglu, definitions.swiglu, lambda B, T: [state(B, T, 2 * I)], 3 * I, 5 * I, ("swiglu",)),
            Case("cross_entropy", cross_entropy, definitions.cross_entropy, logits, 2 * V, 0, ("cross_entropy",), timed=fused.cross_entropy_),
            *([Case("hyper_connection", connect_fused, connect, hyper_inputs, (3 * n + 2) * C, (7 * n + 6) * C,
                    ("mhc_write", "mhc_read", "mhc_dots_backward", "mhc_read_backward", "mhc_write_backward"))] if n <= fused.MOST_STREAMS else [])]


def depth_cases(c, device, dtype):
    """Whatever reads earlier layers, and the attention's inputs without it, at a GPTConfig's shape. Elements a token: q of the queries, kv of the keys."""
    import kernels as fused
    C, H, G, D, eps = c.n_embd, c.n_head, c.n_kv_head, c.head_dim, c.norm_eps
    q, kv = H * D, G * D
    weight = lambda n, spread=0.1: 1 + spread * torch.randn(n, device=device)
    tensors = lambda n, *shape: [torch.randn(*shape, device=device).to(dtype) for _ in range(n)]
    heads = lambda n, B, T, h: [x.transpose(1, 2) for x in tensors(n, B, T, h, D)]
    angles = torch.arange(c.block_size, device=device)[:, None] * c.rope_theta ** (-torch.arange(0, D, 2, device=device) / D)
    cos, sin = angles.cos(), angles.sin()

    def two(sources):
        n = len(sources) // 2
        return (sources, ()) if sources and isinstance(sources[0], fused.Slot) else (sources[:n], sources[n:])

    def slots(own):  # of keys and values behind `own` other inputs
        return lambda x: x[:own] + [fused.Slot(k.transpose(1, 2), v.transpose(1, 2)) for k, v in zip(*two(x[own:]))]

    def states(n):
        return lambda x: [fused.State(s) for s in x[:n - 1]] + x[n - 1:]

    def attention_inputs(qkv, q_weight, k_weight, *sources):
        T = qkv.shape[1]
        return fused.attention_inputs(qkv, q_weight, k_weight, cos[:T], sin[:T], H, G, eps, False, *two(sources))

    def defined_inputs(qkv, q_weight, k_weight, *sources):
        T = qkv.shape[1]
        a, b, v = (x.unflatten(-1, (-1, D)).transpose(1, 2) for x in qkv.split([q, kv, kv], dim=-1))
        a, b = (definitions.apply_rope(definitions.rms_norm(x, w, eps), cos[:T], sin[:T]) for x, w in ((a, q_weight), (b, k_weight)))
        return a, b, definitions.depth_mix(a, b, v, *two(sources)) if sources else v

    def defined_mix(*x):  # AttnRes' aggregator: the sources, the query and the bias of the last source
        scores = [(s * x[-2]).sum(-1) * torch.rsqrt(s.square().mean(-1) + eps) for s in x[:-2]]
        a = torch.softmax(torch.stack(scores[:-1] + [scores[-1] + x[-1]]), 0)
        return sum(a_i.unsqueeze(-1) * s for a_i, s in zip(a, x))

    cases = []
    for n in (0, 2, 8):
        cases.append(Case(f"attention_inputs, {n} sources", attention_inputs, defined_inputs,
                          lambda B, T, n=n: tensors(1, B, T, q + 2 * kv) + [weight(D), weight(D)] + heads(2 * n, B, T, G), 2 * (q + kv) + (n > 0) * (2 + 2 * n) * kv,
                          3 * (q + kv) + 2 * kv + (n > 0) * (2 + 6 * n) * kv,
                          ("heads_forward", "heads_backward_mix" if n else "heads_backward"), slots(3)))
    for n in (2, 8):
        cases.append(Case(f"depth_mix, {n} sources", lambda a, b, v, *sources: fused.depth_mix(a, b, v, *two(sources)),
                          lambda a, b, v, *sources: definitions.depth_mix(a, b, v, *two(sources)),
                          lambda B, T, n=n: heads(1, B, T, H) + heads(2 + 2 * n, B, T, G), q + (3 + 2 * n) * kv, 2 * q + (6 + 6 * n) * kv, shared=slots(3)))
    for n in (3, 6):
        cases.append(Case(f"attnres_mix, {n} sources", lambda *x: fused.attnres_mix(x[:-2], x[-2], eps, x[-1]), defined_mix,
                          lambda B, T, n=n: tensors(n, B, T, C) + [weight(C, 1.0) / C**0.5, torch.tensor(3.0, device=device)], (n + 1) * C, (3 * n + 1) * C,
                          ("attnres_forward", "attnres_backward"), states(n)))
    for n in (9, 33):
        cases.append(Case(f"average, {n} sources", lambda *x: fused.average([fused.average_source(s, x[-1])[1] for s in x[:-1]], 0),
                          lambda *x: sum(w * s for w, s in zip(x[-1], x)), lambda B, T, n=n: tensors(n, B, T, C) + [weight(n, 1.0)], (n + 1) * C, 3 * n * C, ("average",)))

    def averages(x, w):  # of one source each: its gradient is gathered from all of them in one pass
        x, source = fused.average_source(x, w)
        return x, *(fused.average([source], i) for i in range(len(w)))
    cases.append(Case("average, a source of 32", averages, lambda x, w: (x, *(w_i * x for w_i in w)), lambda B, T: tensors(1, B, T, C) + [weight(32, 1.0)],
                      2 * 32 * C, (32 + 3) * C, ("average_backward",)))
    return cases


def outputs_and_gradients(function, inputs, seeds):
    """The floating-point outputs of a function and their gradients for the floating-point inputs, given those of the outputs (made, if the list is empty)."""
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    outputs = function(*leaves)
    outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    seeds += [torch.randn_like(x) for x in outputs[len(seeds):]]
    pairs = [(x, s.to(x.dtype)) for x, s in zip(outputs, seeds) if x.requires_grad]
    wanted = [x for x in leaves if x.requires_grad]
    return outputs + (list(torch.autograd.grad([x for x, _ in pairs], wanted, [s for _, s in pairs])) if pairs else [])


def check_case(case, dtype):
    """
    Raises ValueError unless outputs and gradients of a kernel agree with its definition in float64 on fresh random inputs; returns the largest error. Sizes are
    multiples of 16, as those of the shapes are, so that Triton compiles what is timed; tests/test_kernels.py has the ragged ones.
    """
    inputs, seeds = case.inputs(2, 80), []
    run = outputs_and_gradients if case.backward else lambda function, inputs, seeds: list(function(*inputs))
    found = run(case.fused, inputs, seeds)
    exact = run(case.definition, [x.double() if x.is_floating_point() else x for x in inputs], seeds)
    error = max((torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b)).item() for a, b in zip(found, exact, strict=True))
    limit = {torch.bfloat16: 1e-2, torch.float32: 1e-4}[dtype]
    if not error <= limit:
        raise ValueError(f"{case.name} is wrong: {error:.2g} from float64 in the Euclidean norm, {limit:g} is the limit. It is not timed.")
    return error


def check_number(i, fields, device, dtype):
    """check_case of the i-th case of a shape, for a process of its own: the largest error, or the sentence that says what is wrong."""
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")
    try:
        return check_case(all_cases(GPTConfig(**fields), device, dtype)[i], dtype)
    except Exception as error:  # also of Triton's compiler: the other kernels are still to be timed
        return str(error) if isinstance(error, ValueError) else f"Case {i} of --kernels: {type(error).__name__}: {error}"


def check_all(cases, fields, device, dtype):
    """
    For each case its largest error or a sentence. On a GPU in many processes at once, because what takes the time is Triton's compiler; what they compile,
    this process finds in Triton's cache.
    """
    if device.type != "cuda":
        return [check_case(case, dtype) for case in cases]
    workers = max(1, min(len(cases), (os.cpu_count() or 2) - 1))
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(check_number, range(len(cases)), *map(itertools.repeat, (fields, device, dtype))))


def median_ms(run, device):
    """Median milliseconds of run() among several in a row, with whatever the host takes where that is longer."""
    mark, between = stopwatch(device)
    run()
    wait(device)
    start = mark()
    run()
    end = mark()
    wait(device)
    marks = [mark()]
    for _ in range(min(20, max(4, round(300 / max(between(start, end), 1e-3)))) if device.type == "cuda" else 2):
        run()
        marks.append(mark())
    wait(device)
    return statistics.median(between(*pair) for pair in list(zip(marks, marks[1:]))[1:])


def device_ms(calls, device, notes, name):
    """
    Milliseconds of one of the calls, which do the same on tensors of their own, together too large for the cache. They run as one CUDA graph: the host has no
    part in the time. Where they cannot be captured, as they are, with a note.
    """
    def run():
        for call in calls:
            call()
    if device.type == "cuda":
        run()  # compiles, and makes the buffers that live longer than a call
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                run()
            return median_ms(graph.replay, device) / len(calls)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            notes.append(f"{name} could not be captured in a CUDA graph ({str(error).splitlines()[0]}): its time includes the host's.")
    return median_ms(run, device) / len(calls)


def both_ms(function, sets, device, notes, name, differentiated=True):
    """Milliseconds on the device of a function's forward pass and of its backward pass (None if it has none), given several sets of its inputs."""
    is_leaf = lambda x: isinstance(x, torch.Tensor) and x.is_floating_point()
    wait(device)  # for the inputs, which come from another stream
    stream = torch.cuda.Stream() if device.type == "cuda" else None  # backward runs where forward ran, and the default stream cannot be captured
    with torch.cuda.stream(stream):
        with torch.no_grad():
            forward = device_ms([functools.partial(function, *inputs) for inputs in sets], device, notes, f"{name}, forward,")
        if not differentiated:
            return forward, None

        def backward(inputs):
            leaves = [x.detach().requires_grad_() if is_leaf(x) else x for x in inputs]
            outputs = function(*leaves)
            outputs = [x for x in (outputs if isinstance(outputs, (tuple, list)) else [outputs]) if x.requires_grad]
            seeds, wanted = [torch.randn_like(x) for x in outputs], [x for x in leaves if is_leaf(x)]
            return lambda: torch.autograd.grad(outputs, wanted, seeds, retain_graph=True)
        return forward, device_ms([backward(inputs) for inputs in sets], device, notes, f"{name}, backward,")


def input_sets(make, device):
    """As many sets of inputs as it takes to hold 512 MB, an H200's cache ten times over: 1 to 32 of them. Outside a GPU one."""
    sets = [make()]
    size = sum(x.nbytes for x in sets[0] if isinstance(x, torch.Tensor))
    if device.type == "cuda":
        sets += [make() for _ in range(min(31, 2**29 // max(size, 1)))]
    return sets


def kernel_row(case, B, T, dtype, bandwidth, device, notes=None):
    tokens, size = min(B * T, 8192) if case.name == "cross_entropy" else B * T, torch.finfo(dtype).bits // 8
    sets = [case.shared(inputs) for inputs in input_sets(lambda: case.inputs(B, T), device)]
    forward, backward = both_ms(case.timed or case.fused, sets, device, [] if notes is None else notes, case.name, case.backward > 0)
    floors = [1000 * tokens * size * elements / bandwidth for elements in (case.forward, case.backward)]
    return {"kernel": case.name, "tokens": tokens, "forward ms": forward, "floor": floors[0], "% of its speed": 100 * floors[0] / forward, "backward ms": backward,
            "its floor": floors[1] if backward else None, "% of that": 100 * floors[1] / backward if backward else None}


def attention_rows(c, B, T, bandwidth, device, dtype, notes):
    """
    Attention over the sequence as the model runs it, and MoDA's of B=1, 8 groups of 8 heads of 64 and 64 slots, each with cuDNN's SDPA without depth beside it.
    MoDA's floors are those of the depth slots' part, which is the time that the slots add: read, or read and their gradients written, besides q, o and their
    gradients. "eager" is both passes called from Python, host included.
    """
    import kernels as fused
    G, L, lengths = (8, 64, (65536, 16384, 4096)) if device.type == "cuda" else (1, 3, (16,))
    heads = lambda B, T, n, D: torch.randn(B, T, n, D, device=device).to(dtype).transpose(1, 2)

    def sdpa(q, k, v):
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def eager_ms(function, inputs):
        leaves = [x.detach().requires_grad_() for x in inputs]
        seed = torch.randn_like(inputs[0])
        return median_ms(lambda: torch.autograd.grad(function(*leaves), leaves, seed), device)

    def row(name, function, sets, plain):
        own, q = both_ms(function, sets, device, notes, name), sets[0][0]
        found = {"kernel": name, "tokens": q.shape[0] * q.shape[2], "forward ms": own[0], "backward ms": own[1], "SDPA forward": plain[0], "SDPA backward": plain[1],
                 "times SDPA": sum(own) / sum(plain)}
        if len(sets[0]) > 3:
            alone = both_ms(function, [inputs[:3] for inputs in sets], device, notes, name)
            slots, lse = sum(x.nbytes for x in sets[0][3:]), 4 * q.numel() / q.shape[-1]
            floors = [1000 * moved / bandwidth for moved in (slots + 3 * q.nbytes + 2 * lse, 2 * slots + 5 * q.nbytes + lse)]
            found |= {"floor": floors[0], "% of its speed": 100 * floors[0] / (own[0] - alone[0]), "its floor": floors[1], "% of that": 100 * floors[1] / (own[1] - alone[1])}
        return found

    def plain_ms(sets):
        return both_ms(sdpa, [inputs[:3] for inputs in sets], device, notes, "SDPA")

    sets = input_sets(lambda: [heads(B, T, n, c.head_dim) for n in (c.n_head, c.n_kv_head, c.n_kv_head)], device)
    yield row("attention", definitions.attention, sets, plain_ms(sets))
    q = heads(1, 16, 8, 64)
    backends = list(dict.fromkeys((fused._sequence_backend(q, q), "cudnn"))) if device.type == "cuda" else [""]
    for length in lengths:
        sets = input_sets(lambda length=length: [heads(1, length, n, 64) for n in (8 * G, *[G] * (2 + 2 * L))], device)
        plain = plain_ms(sets)
        for backend in backends:
            moda = lambda q, k, v, *slots, backend=backend: fused.moda_attention(q, k, v, slots[:L], slots[L:], backend)
            found = row(f"moda_attention, {L} slots, T={length}" + f", {backend}" * (backend != ""), moda, sets, plain)
            if length == min(lengths):
                found |= {"eager ms": eager_ms(moda, sets[0]), "SDPA eager": eager_ms(sdpa, sets[0][:3])}
            yield found
        del sets


def moda_case(L, device, dtype):
    import kernels as fused
    heads = lambda B, T, n: torch.randn(B, T, n, 64, device=device).to(dtype).transpose(1, 2)
    halves = lambda f: lambda q, k, v, *slots: f(q, k, v, slots[:L], slots[L:])
    G = 8 if device.type == "cuda" else 1  # as timed; Triton's interpreter takes its time
    return Case(f"moda_attention, {L} slots", halves(fused.moda_attention), halves(definitions.moda_attention),
                lambda B, T: [heads(B, T, n) for n in (8 * G, *[G] * (2 + 2 * L))], 0, 1)


def all_cases(config, device, dtype):
    return [moda_case(5, device, dtype), *elementwise_cases(config, device, dtype), *depth_cases(config, device, dtype)]


def best_settings(case, B, T, device):
    """Times a kernel with other launch settings; returns sentences with the best of each pass and the one it has."""
    import kernels as fused
    found = []
    for entry in case.settings:
        own, backward = fused.SETTINGS[entry], "backward" in entry
        sets = [case.shared(inputs) for inputs in input_sets(lambda: case.inputs(B, T), device)]
        times = {}
        for change in sorted({own[:i] + (value,) + own[i + 1:] for i, n in enumerate(own) for value in ((n, max(1, n // 2), 2 * n) if n else (n,))}, key=str):
            fused.SETTINGS[entry] = change
            try:
                pair = both_ms(case.timed or case.fused, sets, device, found, case.name, case.backward > 0)
                times[change] = pair[1] if backward else sum(x or 0 for x in pair) if case.settings == (entry,) else pair[0]
            except Exception as error:  # too many registers or threads: a setting that this GPU cannot run
                found.append(f"{entry} {change}: {type(error).__name__}")
        fused.SETTINGS[entry] = own
        best = min(times, key=times.get)
        found.append(f"{case.name}: {entry} = {own} takes {times[own]:.3f} ms; best of its neighbours is {best} with {times[best]:.3f} ms")
    return found


def say(row):
    """Prints a row as soon as it is known, and returns it."""
    print(", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items() if value is not None), flush=True)
    return row


def kernel_table(c, device, _):
    """Checks and times every kernel at a shape; returns (title, rows, notes, errors). Raises ValueError where kernels cannot run."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("--kernels needs a GPU (with TRITON_INTERPRET=1 in the environment it runs on a CPU, which checks the kernels and says nothing of their speed).")
    if importlib.util.find_spec("triton") is None:
        raise ValueError("--kernels needs Triton, which is not installed.")
    name, file, fields, B = read_shape(c, device)
    config, dtype = GPTConfig(**fields), DTYPES[c.dtype]
    B, T = (B, config.block_size) if device.type == "cuda" else (1, 16)
    wanted, every = tuple(name.strip() for name in c.only.split(",")), all_cases(config, device, dtype)  # of nothing given: (""), which everything begins with
    attends = any(word.startswith(wanted) for word in ("attention", "moda_attention"))
    cases = [case for case in every if case.name.startswith(wanted) or attends and case.name.startswith("moda_attention")]  # timed there, and so checked
    if not cases:
        raise ValueError(f"--only={c.only} begins the name of no kernel; there are {'; '.join(dict.fromkeys(case.name.split(',')[0] for case in every))}; attention.")
    bandwidth, rows, failed, notes = copy_bandwidth(device), [], [], []
    for case, error in zip(cases, check_all(cases, fields, device, dtype), strict=True):
        try:
            if isinstance(error, str):
                raise ValueError(error)
            if case.forward:
                rows.append(say(kernel_row(case, B, T, dtype, bandwidth, device, notes) | {"error": f"{error:.1e}"}))
            notes += best_settings(case, B, T, device) if c.sweep else []
        except (ValueError, RuntimeError) as error:  # the latter also for want of memory
            failed.append(f"{case.name}: {error}")
    try:
        rows += map(say, attention_rows(config, B, T, bandwidth, device, dtype, notes) if attends else [])
    except RuntimeError as error:
        failed.append(f"Attention and MoDA: {error}")
    title = f"Kernels, shape {name}: {B} x {T} tokens, {c.dtype}; copies run at {bandwidth / 1e9:,.0f} GB/s, which makes the floors (ms)"
    return title, rows, notes, failed


# ----------------------------------------------------------------------------------------------------------------------
# where the time goes

KINDS = (("attention", r"flash|fmha|sdpa|attention|moda"), ("matmul", r"gemm|nvjet|cutlass|wgmma|aten::(add)?b?mm\b|aten::mm"),
         ("optimizer and clipping", r"adam|multi_tensor|foreach|linalg_vector_norm"),
         ("our elementwise kernels", r"rms_norm|swiglu|heads_(for|back)ward|cross_entropy|attnres|average|mhc|depth"),
         ("compiled elementwise", r"^triton_"), ("copies and fills", r"memcpy|memset|copy|fill|aten::(zero_|to|contiguous|clone)"), ("the rest", ""))


def kind_of(kernel):
    return next(kind for kind, pattern in KINDS if re.search(pattern, kernel, re.IGNORECASE))


def device_work(contender, batch, n, device):
    """
    Makes n steps under torch.profiler: {kernel: [calls a step, ms a step]} and the ms a step in which the device ran nothing (None on CPUs, where
    the kernels are PyTorch's operators with the time that is their own).
    """
    from torch.profiler import ProfilerActivity, profile as record
    cuda = device.type == "cuda"
    with record(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as recorded:
        for _ in range(n):
            contender.step(*batch)
        wait(device)
    if not cuda:
        events = [(e.key, e.count, e.self_cpu_time_total / 1000) for e in recorded.key_averages() if e.self_cpu_time_total > 0]
        return {key: [count / n, ms / n] for key, count, ms in events}, None
    with tempfile.TemporaryDirectory() as folder:
        recorded.export_chrome_trace(f"{folder}/trace.json")
        trace = loads(Path(folder, "trace.json").read_text())["traceEvents"]
    spans = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in trace if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"))
    work, idle, end = {}, 0.0, spans[0][0]
    for start, stop, name in spans:
        calls = work.setdefault(name, [0, 0.0])
        calls[0], calls[1] = calls[0] + 1 / n, calls[1] + (stop - start) / 1000 / n
        idle, end = idle + max(0.0, start - end), max(end, stop)
    return work, idle / 1000 / n


def profiling(c, device, autocast):
    """The device time of a step of each method by kind of kernel, and its longest kernels; returns (title, rows, notes, errors)."""
    name, file, fields, batch = read_shape(c, device)
    contenders, failed, batches = assemble(c, list_methods(c, name, file, fields), batch, device, autocast)
    rows, n = [], 3
    for contender in contenders:
        contender.step(*batches[0])
        wait(device)
        work, idle = device_work(contender, batches[1], n, device)
        total = sum(ms for _, ms in work.values()) + (idle or 0)
        for kind, _ in KINDS:
            of_kind = [(ms, calls, kernel) for kernel, (calls, ms) in work.items() if kind_of(kernel) == kind]
            if of_kind:
                rows.append({"method": contender.name, "kernels": kind, "ms a step": sum(k[0] for k in of_kind), "share %": 100 * sum(k[0] for k in of_kind) / total,
                             "calls": sum(k[1] for k in of_kind)})
                rows += [{"method": "", "kernels": f"  {kernel[:90]}", "ms a step": ms, "share %": 100 * ms / total, "calls": calls}
                         for ms, calls, kernel in sorted(of_kind, reverse=True)[:6] if ms > 0.005 * total]
        if idle is not None:
            rows.append({"method": contender.name, "kernels": "gaps", "ms a step": idle, "share %": 100 * idle / total, "calls": None})
        rows.append({"method": contender.name, "kernels": "all", "ms a step": total, "share %": 100.0, "calls": sum(calls for calls, _ in work.values())})
    title = f"Device time, shape {name}: {batch} x {fields['block_size']} tokens a step, {c.dtype}, mean of {n} steps under the profiler"
    return title, rows, [], [text for _, text in failed]


# ----------------------------------------------------------------------------------------------------------------------
# before a run

def planning(c, device, _):
    """Memory at its peak by kind, and what follows from it, for each method; returns (title, rows, notes, errors). See plan.py."""
    name, file, fields, batch = read_shape(c, device)
    recipe = read_config(file) if file else {}
    zero1, grad_checkpoint = (getattr(c, option) if option in c.given else recipe.get(option, False) for option in ("zero1", "grad_checkpoint"))
    batch = c.batch_size or recipe.get("batch_size") or batch
    sequences = max(recipe.get("global_batch_size", 0), batch * c.world_size)
    run = dict(world_size=c.world_size, micro_steps=max(1, sequences // (batch * c.world_size)), zero1=zero1)
    peak = peak_flops(c.gpu, "bfloat16")
    tokens = c.train_tokens or recipe.get("max_iters", 0) * sequences * fields["block_size"]
    columns, notes = {}, []
    for label, config in list_methods(c, name, file, fields):
        model = plan_memory.skeleton(config)
        columns[label] = plan_memory.peak_memory(model, batch, grad_checkpoint=grad_checkpoint, **run)
        notes += [f"{label}: {text}" for text in plan_memory.sentences(model, batch, peak, c.mfu, tokens, grad_checkpoint, **run)]
    if not peak:
        notes.append(f"The peak of --gpu={c.gpu} is not known, so neither speed nor days are computed; known are {', '.join(plan_memory.PEAKS)}.")
    kinds = dict.fromkeys(kind for column in columns.values() for kind in column)
    rows = [{"memory": kind} | {f"{label} GB": column.get(kind, 0) / 1e9 for label, column in columns.items()} for kind in kinds]
    rows.append({"memory": "peak"} | {f"{label} GB": sum(column.values()) / 1e9 for label, column in columns.items()})
    title = (f"Plan of {name}: {c.world_size} x {c.gpu}, each {run['micro_steps']} micro-batches of {batch} x {fields['block_size']} tokens a step, bfloat16"
             f"{', optimizer state spread (zero1)' * zero1}{', layers recomputed (grad_checkpoint)' * grad_checkpoint}")
    return title, rows, notes, []


# ----------------------------------------------------------------------------------------------------------------------
# output

def provenance(argv, device):
    """What is needed to measure the same again: command, versions, device, revision."""
    packages = ("triton", "transformers", "flash-attn-4", "flash-attn")
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    git = ["git", "-C", configurator.ROOT, "describe", "--always", "--dirty"]
    revision = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    return {"command": " ".join(["python bench.py", *argv]), "device": device_name(device), "versions": versions, "revision": revision}


def table(rows):
    """The rows (dicts) as lines of text, a column for each key that any of them has."""
    columns = list(dict.fromkeys(key for r in rows for key in r))

    def text(value):
        if value is None or value is math.nan:
            return "n/a"
        if isinstance(value, float):
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
        return f"{value:,}" if isinstance(value, int) else str(value)
    cells = [columns] + [[text(r.get(column)) for column in columns] for r in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    left = [any(isinstance(r.get(column), str) for r in rows) for column in columns]
    return ["  ".join(f"{cell:<{w}}" if l else f"{cell:>{w}}" for cell, w, l in zip(line, widths, left)).rstrip() for line in cells]


def main(argv=None):
    argv = sys.argv[1:] if argv is None else list(argv)
    c = configurator.configure(__file__, [f"{a}=True" if a.removeprefix("--") in SWITCHES else a for a in argv], operands="[config/FILE.py]")
    with configurator.clean_errors():
        wanted = [name for name in TABLES if getattr(c, name)]
        if len(wanted) > 1 or len(c.operands) > 1:
            raise ValueError(f"one table and one config file a run, got {', '.join([f'--{name}' for name in wanted] + c.operands)}.")
        if c.peer not in ("", "hf_llama"):
            raise ValueError(f"--peer={c.peer} is not known; it is hf_llama or empty.")
        require = functools.partial(configurator.require, c)
        require("world_size", c.world_size >= 1, "must be at least 1")
        require("mfu", 0 < c.mfu <= 1, "must be above 0 and at most 1")
        for name in ("batch_size", "block_size", "steps", "new_tokens", "train_tokens"):
            require(name, getattr(c, name) >= 0, "must not be negative")
        require("prompt_tokens", c.prompt_tokens >= 1, "must be at least 1")
        require("only", not c.only or c.kernels, "chooses among the kernels and needs --kernels")
        configurator.require_writable(c, "json")
        c.shape = c.operands[0] if c.operands else c.shape
        device = configurator.find_device(c.device)
        c.dtype = c.dtype or ("bfloat16" if device.type == "cuda" else "float32")
        if c.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"--dtype={c.dtype} is not measured here; give bfloat16 or float32.")
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.set_float32_matmul_precision("high")  # as in train.py
        autocast = contextlib.nullcontext() if c.dtype == "float32" else torch.autocast(device.type, DTYPES[c.dtype])
        make = {"kernels": kernel_table, "decode": decoding, "profile": profiling, "plan": planning}[wanted[0]] if wanted else compare
        origin = provenance(argv, device)
        if not c.plan:
            origin["attention"] = definitions.attention_backend(device.type, DTYPES[c.dtype], GPTConfig(**read_shape(c, device)[2]).head_dim)
        title, rows, notes, errors = make(c, device, autocast)
        if c.json:
            Path(c.json).write_text(dumps(origin | {"title": title, "rows": rows, "notes": notes, "errors": errors}, indent=1) + "\n")
    told = [origin["device"], *(f"{k} {v}" for k, v in origin["versions"].items() if v), *([f"attention {origin['attention']}"] if "attention" in origin else [])]
    print("", ", ".join(told), title, *table(rows), *notes, sep="\n", flush=True)
    if errors:
        raise SystemExit("error: " + " ".join(errors))


if __name__ == "__main__":
    main()
