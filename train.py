"""
Pretraining of model.py on one process, on one machine or on many:

    python train.py config/quickstart.py                                     # a laptop's CPU, minutes
    torchrun --standalone --nproc_per_node=8 train.py config/depth_3b.py     # 8 GPUs of one machine
    torchrun --nnodes=4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train.py config/depth_3b.py --init_from=auto

Every option below can be set in a config file or as --name=value, and so can every field of GPTConfig; --help lists them all.
The run's folder holds log.jsonl, ckpt_last.pt and ckpt_best.pt (checkpoint.py says what is in them).

A step is one update of the weights, and `step` counts the updates made so far. Which tokens a step reads, its learning rate and
its result depend on the step alone: not on the number of processes, not on how often the run was stopped and continued.
"""
import contextlib
import dataclasses
import functools
import inspect
import math
import os
import time
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # CPU threads that wait sleep: spinning stalls a laptop that does anything else; read by torch

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import checkpoint
import configurator
import runlog
from data import dataset, shards
from graphs import GraphedGradients, reason_against
from model import GPT, GPTConfig, IGNORE
from plan import peak_flops
from ranks import Ranks, StopSignals, explained_errors

# ----------------------------------------------------------------------------------------------------------------------
# run
out_dir = "out"  # folder of the run, made if need be (relative to the working directory)
init_from = "scratch"  # scratch, resume (from ckpt_last.pt), auto (resume if there is one, else scratch), or a Hugging Face folder or Hub id
eval_only = False  # evaluate, print, write nothing
max_iters = 2000  # optimizer steps
eval_interval = 250  # steps between evaluations; each is followed by a checkpoint
eval_tokens = 1_000_000  # validation tokens of an evaluation, always the same ones; 0 = all
log_interval = 10  # steps between train lines in log.jsonl and on the console
save_interval = 0  # steps between checkpoints beyond those of the evaluations; 0 = none
keep_interval = 0  # steps between checkpoints that are also kept under their number; 0 = none
keep_count = 0  # how many numbered checkpoints to keep, the newest; 0 = all
sample_tokens = 0  # tokens of text printed when training ends; 0 = none
sample_start = ""  # beginning of that text; empty = end-of-text
# data
data_dir = "data/pystdlib"  # folder with train*.bin, val*.bin and meta.json (relative to the repository's root)
block_size = 1024  # tokens in a sequence
vocab_size = 0  # rows of the embedding; 0 = what meta.json says
batch_size = 8  # sequences a micro-step and process
global_batch_size = 0  # sequences a step; accumulation follows from it; 0 = batch_size on every process, no accumulation
# optimizer
learning_rate = 6e-4  # peak learning rate
min_lr = 6e-5  # learning rate at the end of the decay
warmup_iters = 100  # steps of linear warm-up
lr_decay_iters = 0  # steps after which min_lr is reached, along a cosine; 0 = max_iters
weight_decay = 0.1  # AdamW's decay, on everything but norms
beta1 = 0.9  # AdamW's decay rate of the first moment
beta2 = 0.95  # AdamW's decay rate of the second moment
grad_clip = 1.0  # largest norm of the gradient; 0 = no clipping
# machine
device = ""  # cpu, cuda, cuda:1, mps; empty = the best there is
dtype = ""  # float32, bfloat16, float16 of the matmuls (parameters stay float32); empty = bfloat16 on GPUs that have it, float32 elsewhere
compile = True  # torch.compile the MLPs where no Triton kernels run; on CPUs, where it takes minutes and a C++ compiler, only if it is given
cuda_graph = False  # replay each micro-step as one CUDA graph: small models train faster, to the same numbers; on one GPU, else it stays off
seed = 1337  # of the weights and of the order of the data
grad_checkpoint = False  # recompute each layer in the backward pass: less memory, about a third more time
zero1 = False  # spread the optimizer's state over the processes (ZeRO stage 1)
grad_bf16 = False  # send gradients between processes as bfloat16: half the traffic, less exact
dist_timeout = 30  # minutes that a process waits for the others before it gives up
# Weights & Biases
wandb_log = False  # log to wandb as well
wandb_project = "nanodepth"  # wandb's project
wandb_run_name = ""  # wandb's name of the run; empty = the name of out_dir
# ----------------------------------------------------------------------------------------------------------------------

MODEL_FIELDS = tuple(field.name for field in dataclasses.fields(GPTConfig))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


# ----------------------------------------------------------------------------------------------------------------------
# what must be right: pure functions

def lr_at(step, c):
    """
    Learning rate of the update that follows `step` updates: linear warm-up that reaches learning_rate at warmup_iters, then a cosine
    that reaches min_lr at the last step of the decay. A warm-up as long as the run is only a warm-up.
    """
    last = (c.lr_decay_iters or c.max_iters) - 1
    if step < c.warmup_iters:
        return c.learning_rate * (step + 1) / (c.warmup_iters + 1)
    if step >= last:
        return c.min_lr
    high = 0.5 * (1 + math.cos(math.pi * (step - c.warmup_iters) / (last - c.warmup_iters)))
    return high * c.learning_rate + (1 - high) * c.min_lr


def accumulation_steps(global_batch_size, batch_size, world_size):
    """Micro-steps a step. Raises ValueError, naming the nearest sizes that work, if the global batch is not a whole number of them."""
    once = batch_size * world_size
    if global_batch_size % once:
        below = global_batch_size // once * once
        fitting = [n for n in range(1, batch_size + 1) if global_batch_size % (n * world_size) == 0]
        raise ValueError(f"--global_batch_size={global_batch_size} is not a multiple of --batch_size={batch_size} times {world_size} "
                         f"process{'es' * (world_size > 1)} = {once}. The nearest that are: {' and '.join(str(n) for n in (below, below + once) if n)}"
                         f"{f'; or keep it and set --batch_size={fitting[-1]}' if fitting else ''}.")
    return global_batch_size // once


def validate(c):
    """Raises ValueError for options that cannot work, naming option, value and rule."""
    require = functools.partial(configurator.require, c)
    for name in ("eval_interval", "log_interval", "block_size", "batch_size", "dist_timeout"):
        require(name, getattr(c, name) >= 1, "must be at least 1")
    for name in ("max_iters", "eval_tokens", "save_interval", "keep_interval", "keep_count", "sample_tokens", "vocab_size", "global_batch_size",
                 "learning_rate", "min_lr", "warmup_iters", "lr_decay_iters", "weight_decay", "grad_clip"):
        require(name, getattr(c, name) >= 0, "must not be negative")
    for name in ("beta1", "beta2"):
        require(name, 0 <= getattr(c, name) < 1, "must be at least 0 and below 1")
    require("out_dir", c.out_dir.strip(), "must name a folder for the run")
    require("seed", -2**63 <= c.seed < 2**63, "must fit into 64 bits")
    require("dtype", c.dtype in ("", *DTYPES), f"must be one of {', '.join(DTYPES)} or empty")
    require("min_lr", c.min_lr <= c.learning_rate, f"must not be above --learning_rate={c.learning_rate}")


def adopt(c, saved):
    """
    Options of a resumed run: what was not given now is as it was. Returns sentences about what is different from before.
    Raises ValueError if the model would be another one.
    """
    derived = {name for name in ("vocab_size", "global_batch_size") if not getattr(c, name)}
    given = c.given & saved.keys() - derived - {"out_dir", "init_from", "eval_only"}
    for name in saved.keys() & vars(c).keys() - given - {"out_dir", "init_from", "eval_only"}:
        setattr(c, name, saved[name])
    model = dataclasses.asdict(GPTConfig(**{name: getattr(c, name) for name in MODEL_FIELDS}))
    before = dataclasses.asdict(checkpoint.model_config({"config": saved}))
    other = [f"{name} is {before[name]!r} in the checkpoint, {model[name]!r} now" for name in MODEL_FIELDS if before[name] != model[name]]
    if other:
        raise ValueError(f"{c.out_dir} holds another model: {'; '.join(other)}. Leave these options away to continue it, "
                         "or start in another --out_dir.")
    changed = [name for name in sorted(given.difference(MODEL_FIELDS)) if getattr(c, name) != saved[name]]
    return [f"{name} {saved[name]!r} -> {getattr(c, name)!r}" for name in changed]


# ----------------------------------------------------------------------------------------------------------------------
# model, optimizer

def find_checkpoint(c):
    """What --init_from=auto means here: 'resume' or 'scratch'."""
    return "resume" if (Path(c.out_dir) / "ckpt_last.pt").exists() else "scratch"


def build_model(c, ranks, resumed):
    """The GPT on this rank's device, from the checkpoint, a Hugging Face folder or the seed; c's model fields are filled in with what it has."""
    torch.manual_seed(c.seed)
    if resumed or c.init_from == "scratch":
        config = GPTConfig(**{name: getattr(c, name) for name in MODEL_FIELDS})
        try:
            with ranks.device if ranks.device.type == "cuda" else contextlib.nullcontext():  # drawn there: a CPU takes a minute for 3B random numbers
                model = GPT(config)
        except (RuntimeError, TypeError) as error:  # the allocator's, on a GPU an OutOfMemoryError; TypeError is for sizes beyond 64 bits
            sizes = ", ".join(f"--{name}={getattr(config, name)}" for name in ("vocab_size", "n_layer", "n_embd", "n_inner", "block_size"))
            raise ValueError(f"there is no memory for a model of {sizes}; make it smaller. PyTorch says: {str(error).splitlines()[0]}") from error
    else:
        given = {name: getattr(c, name) for name in {"block_size", *c.given} & set(MODEL_FIELDS)}
        model = GPT.from_pretrained(c.init_from, **given)
        if model.config.vocab_size < c.vocab_size:
            raise ValueError(f"{c.init_from} has a vocabulary of {model.config.vocab_size}, but the data's is {c.vocab_size}: "
                             "prepare the data with the model's own tokenizer.")
    if resumed:
        checkpoint.load_weights(model, resumed["model"], f"{c.out_dir}/ckpt_last.pt")
    vars(c).update(dataclasses.asdict(model.config))
    model.grad_checkpoint = c.grad_checkpoint
    return model.to(ranks.device).train()


def build_optimizer(model, c, ranks, resumed):
    """AdamW, on every rank the whole of it or, with --zero1, each rank its share."""
    optimizer = model.configure_optimizers(c.weight_decay, c.learning_rate, (c.beta1, c.beta2), ranks.device.type)
    sharded = c.zero1 and ranks.world_size > 1
    if c.zero1 and not sharded:
        ranks.print("--zero1 stays off: there is one process.")
    if sharded:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # here, since importing it takes seconds
        groups = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in optimizer.param_groups]
        same = {name: optimizer.defaults[name] for name in ("lr", "betas", "eps", "fused")}
        optimizer = ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.AdamW, **same)
    if resumed:
        optimizer.load_state_dict(resumed["optimizer"])
    if resumed and sharded and optimizer.defaults["fused"]:  # its load leaves AdamW's step counts on the CPU, where the fused kernel cannot use them
        for state in optimizer.optim.state.values():
            state["step"] = state["step"].to(ranks.device)
    return optimizer


def set_precision(c, ranks):
    """(autocast context for the forward pass, GradScaler). Raises ValueError for a dtype that the device cannot train in."""
    kind = ranks.device.type
    if kind == "cuda":
        torch.set_float32_matmul_precision("high")  # what stays float32 may use TF32
        has_bf16 = torch.cuda.get_device_capability(ranks.device) >= (8, 0)
        c.dtype = c.dtype or ("bfloat16" if has_bf16 else "float16")
        if c.dtype == "bfloat16" and not has_bf16:
            raise ValueError(f"--dtype=bfloat16: {torch.cuda.get_device_name(ranks.device)} does not have it; use --dtype=float16 or float32.")
    c.dtype = c.dtype or "float32"
    if c.grad_bf16 and kind != "cuda":
        raise ValueError(f"--grad_bf16=True compresses what GPUs send each other, but this runs on {kind}; leave it away.")
    if c.dtype == "float16" and kind != "cuda":
        raise ValueError(f"--dtype=float16 trains on NVIDIA GPUs only, this is {kind}; use --dtype=float32 or bfloat16.")
    autocast = contextlib.nullcontext() if c.dtype == "float32" else torch.autocast(kind, DTYPES[c.dtype])
    return autocast, torch.amp.GradScaler(kind, enabled=c.dtype == "float16")


def wrap(model, c, ranks):
    """The model as the loop calls it: MLPs compiled where no kernels run, and gradients averaged over the ranks by DDP."""
    if c.compile and (ranks.device.type == "cuda" or "compile" in c.given):
        model.compile_blocks()
    if ranks.world_size == 1:
        return model
    # The only buffers are RoPE's tables, the same everywhere. Newer versions of PyTorch have another name for not sending them round.
    unsynced = "forward_sync_buffers" if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters else "broadcast_buffers"
    gpu = [ranks.device.index] if ranks.device.type == "cuda" else None
    ddp = DistributedDataParallel(model, device_ids=gpu, gradient_as_bucket_view=True, **{unsynced: False})
    if c.grad_bf16:
        ddp.register_comm_hook(None, bf16_compress_hook)
    return ddp


# ----------------------------------------------------------------------------------------------------------------------
# the parts of the loop

def micro_step_gradients(model, micro_steps, autocast, scaler, x, y):
    """Forward and backward of one micro-step; returns its share of the step's mean loss."""
    with autocast:
        loss = model(x, y)[1] / micro_steps
    scaler.scale(loss).backward()
    return loss.detach()


def graph_gradients(model, c, ranks, micro_steps, autocast, scaler):
    """`micro_step_gradients` as CUDA graphs, or None without --cuda_graph or where it cannot be, which is said."""
    against = reason_against(ranks.device, ranks.world_size, c.dtype, c.grad_checkpoint) if c.cuda_graph else ""
    if against:
        ranks.print(f"--cuda_graph stays off: {against}.")
    if against or not c.cuda_graph:
        return None
    return GraphedGradients(functools.partial(micro_step_gradients, model, micro_steps, autocast, scaler), model.parameters())


def accumulate_gradients(model, batches, step, micro_steps, autocast, scaler, graphed=None):
    """
    Forward and backward over the micro-steps of a step; the ranks' gradients are averaged in the last one only. Returns this rank's mean loss.
    Every micro-batch has the same number of targets, so the mean over micro-steps and ranks is the mean over the step's tokens.
    """
    total = 0
    for micro_step in range(micro_steps):
        x, y = batches.next_batch(step, micro_step)
        last = micro_step == micro_steps - 1
        with contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
            loss = graphed(x, y, micro_step == 0) if graphed else micro_step_gradients(model, micro_steps, autocast, scaler, x, y)
        total = total + loss
    return total


@torch.no_grad()
def evaluate(model, split, c, ranks, autocast, stop):
    """
    Mean loss in nats a token over the fixed windows of the validation split: the sum of losses over the sum of targets of all ranks, so that it
    does not depend on batch size or ranks. Training's data and random numbers stay as they are. None if a stop signal came in between.
    """
    windows = shards.eval_windows(split, c.block_size, c.eval_tokens)
    loss_and_count = torch.zeros(2, dtype=torch.float64)
    model.eval()
    for first in range(0, len(windows), c.batch_size * ranks.world_size):
        if stopping := ranks.any(stop.caught):
            break
        mine = windows[first + ranks.rank * c.batch_size:][:c.batch_size]
        if len(mine):
            x, y = split.windows(mine, c.block_size)
            missing = (0, 0, 0, c.batch_size - len(mine))  # rows that fill the batch up, so that all have the same shape; they do not count
            x, y = torch.nn.functional.pad(x, missing), torch.nn.functional.pad(y, missing, value=IGNORE)
            with autocast:
                loss = model(x.to(ranks.device), y.to(ranks.device))[1]
            loss_and_count += torch.tensor([loss.item(), 1.0]).double() * len(mine) * c.block_size
    model.train()
    loss, count = ranks.sum(loss_and_count).tolist()
    return None if stopping else loss / count


def save(c, ranks, model, optimizer, scaler, step, best_val_loss, data, best):
    """
    Writes ckpt_last.pt, and if it is time ckpt_best.pt and a numbered one. Called by all ranks. Raises CheckpointError, also for weights
    that are not finite: these are never saved.
    """
    optimizer_state = ranks.optimizer_state(optimizer)

    def write():
        bad = [name for name, p in model.named_parameters() if not p.isfinite().all()]
        if bad:
            raise checkpoint.CheckpointError(f"step {step}: {bad[0]} is not finite any more ({len(bad)} parameters are not); nothing was saved, "
                                             f"{last_good(c)}.")
        rng = {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state(ranks.device) if ranks.device.type == "cuda" else None}
        state = {"model": model.state_dict(), "optimizer": optimizer_state, "scaler": scaler.state_dict(), "step": step,
                 "best_val_loss": best_val_loss, "config": c.as_dict(), "rng": rng, "data": data}
        folder = Path(c.out_dir)
        # The best one first: if the run dies in between, the last one is older and the evaluation that found the best is made again.
        checkpoint.save(folder / ("ckpt_best.pt" if best else "ckpt_last.pt"), state)
        if best:
            checkpoint.copy(folder / "ckpt_best.pt", folder / "ckpt_last.pt")
        if c.keep_interval and step and step % c.keep_interval == 0:
            checkpoint.keep(folder, step, c.keep_count)

    ranks.on_main(write)


def last_good(c):
    path = Path(c.out_dir) / "ckpt_last.pt"
    return f"{path} is from before" if path.exists() else "there is no checkpoint yet"


def check_finite(step, loss, grad_norm, c, scaler):
    """Ends the run, before the update and before anything is saved, if a loss or a gradient is not finite. All ranks see the same numbers."""
    overflow = scaler.is_enabled() and scaler.get_scale() > 1  # float16: the scaler skips such an update and lowers its scale
    if math.isfinite(loss) and (math.isfinite(grad_norm) or overflow):
        return
    raise SystemExit(f"error: step {step}: the {'gradient' if math.isfinite(loss) else 'loss'} is not finite (loss {loss}, gradient norm "
                     f"{grad_norm}). The run stops before its weights are harmed; {last_good(c)}. Lower --learning_rate={c.learning_rate}, "
                     f"lengthen --warmup_iters={c.warmup_iters}, or look at the data of this step.")


# ----------------------------------------------------------------------------------------------------------------------

def main(argv=None):
    c = configurator.configure(__file__, argv, model_fields=True)
    with configurator.clean_errors():
        validate(c)
        ranks = Ranks(c)
    try:
        train(c, ranks)
    finally:
        checkpoint.unlock()
        ranks.close()


def train(c, ranks):
    # Set-up: whatever can be wrong is found here, before anything is written.
    with configurator.clean_errors():
        if c.init_from == "auto":
            c.init_from = ranks.on_main(find_checkpoint, c)
        resumed = checkpoint.load(Path(c.out_dir) / "ckpt_last.pt") if c.init_from == "resume" else None
        changes = adopt(c, resumed["config"]) if resumed else []
        validate(c)
        if resumed and resumed["step"] > c.max_iters and not c.eval_only:
            raise ValueError(f"{c.out_dir} has made {resumed['step']} steps already, more than --max_iters={c.max_iters}; give that many or more to continue it.")
        c.global_batch_size = c.global_batch_size or c.batch_size * ranks.world_size
        micro_steps = accumulation_steps(c.global_batch_size, c.batch_size, ranks.world_size)
        folder = configurator.find(c.data_dir)
        ranks.on_main(dataset.prepare, folder)
        train_split, val_split, data = dataset.open_checked(folder, c.block_size, c.vocab_size, ranks.world_size)
        c.vocab_size = data["vocab_size"]
        autocast, scaler = set_precision(c, ranks)
        model = build_model(c, ranks, resumed)
        optimizer = build_optimizer(model, c, ranks, resumed)
    step, best_val_loss = 0, math.inf
    if resumed:
        step, best_val_loss = resumed["step"], resumed["best_val_loss"]
        scaler.load_state_dict(resumed["scaler"])
        torch.set_rng_state(resumed["rng"]["torch"])
        if ranks.device.type == "cuda" and resumed["rng"]["cuda"] is not None:
            torch.cuda.set_rng_state(resumed["rng"]["cuda"], ranks.device)
    header = runlog.describe(c, model, ranks)
    tokens_per_step = c.global_batch_size * c.block_size
    peak, flops = peak_flops(header["device"], c.dtype), model.mfu_flops_per_token(c.block_size)
    bytes_per_token = (data["bytes"] or {}).get("val", 0) / val_split.n_tokens
    ranks.print(f"{header['n_params']:,} parameters on {ranks.world_size} x {header['device']} in {c.dtype}; {train_split.n_tokens:,} training tokens.")
    ranks.print(f"A step is {c.global_batch_size} sequences of {c.block_size} = {tokens_per_step:,} tokens: {micro_steps} "
                f"micro-step{'s' * (micro_steps > 1)} of {c.batch_size} on {ranks.world_size} process{'es' * (ranks.world_size > 1)}. "
                f"Warm-up ends at step {c.warmup_iters}, the run at step {c.max_iters}.")
    if resumed:
        ranks.print(f"Resuming after step {step}." + (f" OTHER SETTINGS than before: {'; '.join(changes)}." if changes else ""))
    resumed = resumed is not None  # lets go of the file
    wrapped = wrap(model, c, ranks)
    graphed = graph_gradients(wrapped, c, ranks, micro_steps, autocast, scaler)

    def eval_line(val_loss):
        return {"step": step, "val_loss": val_loss, **({"val_bpb": val_loss / math.log(2) / bytes_per_token} if bytes_per_token else {})}

    def sentence(line):
        return f"step {step}: " + ", ".join(f"{name} {value:.6f}" for name, value in line.items() if name != "step")

    if c.eval_only:
        with StopSignals() as stop, explained_errors(c, ranks):
            val_loss = evaluate(model, val_split, c, ranks, autocast, stop)
        if val_loss is not None:
            ranks.print(sentence(eval_line(val_loss)))
        return

    with configurator.clean_errors():
        ranks.on_main(checkpoint.start_log, c.out_dir, header, step if resumed else None)
    to_wandb = runlog.open_wandb(c, header) if ranks.main else None

    def log(line):
        if ranks.main:
            checkpoint.log(c.out_dir, line)
            to_wandb(line)

    saved, stopping, timed_from, tokens_logged, total = step if resumed else None, False, None, step * tokens_per_step, 0.0
    prefetcher = shards.Prefetcher(train_split, micro_steps, ranks.device, rank=ranks.rank, world_size=ranks.world_size, batch_size=c.batch_size,
                                   global_batch_size=c.global_batch_size, block_size=c.block_size, seed=c.seed, vocab_size=c.vocab_size)
    with StopSignals() as stop, prefetcher as batches, explained_errors(c, ranks):
        busy, clock = 0.0, time.perf_counter()
        while True:
            # Evaluate and save.
            best = False
            due = step == c.max_iters or step % c.eval_interval == 0
            if due and not stopping:
                val_loss = evaluate(model, val_split, c, ranks, autocast, stop)
                stopping = val_loss is None
                if not stopping:
                    check_finite(step, val_loss, 0.0, c, scaler)
                    best, best_val_loss = 0 < step and val_loss < best_val_loss, min(val_loss, best_val_loss)
                    log(eval_line(val_loss))
                    ranks.print(sentence(eval_line(val_loss)))
            periodic = step > 0 and (due or any(n and step % n == 0 for n in (c.save_interval, c.keep_interval)))
            if (periodic or stopping or step == c.max_iters) and (saved != step or best):
                with configurator.clean_errors():
                    save(c, ranks, model, optimizer, scaler, step, best_val_loss, data, best)
                saved = step
            if step == c.max_iters or stopping:
                break

            # One update.
            clock = time.perf_counter() if due or periodic else clock
            lr = lr_at(step, c)
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss = accumulate_gradients(wrapped, batches, step, micro_steps, autocast, scaler, graphed)
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), c.grad_clip or math.inf)
            loss, stopping = (ranks.sum(torch.stack([loss, torch.full_like(loss, bool(stop.caught))])) / ranks.world_size).tolist()
            grad_norm = norm.item()
            check_finite(step + 1, loss, grad_norm, c, scaler)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            step += 1

            # Report.
            clock, began = time.perf_counter(), clock
            busy, total = busy + clock - began, total + clock - began
            if not timed_from:  # the first step of a process compiles and warms up: what the run reports is counted without it
                timed_from, total, batches.waited = (step, clock), 0.0, 0.0
            if step % c.log_interval == 0 or step == c.max_iters:
                tokens = step * tokens_per_step
                speed = (tokens - tokens_logged) / busy
                mfu = speed * flops / (peak * ranks.world_size) if peak else None
                log({"step": step, "train_loss": loss, "lr": lr, "grad_norm": grad_norm, "tokens": tokens, "tokens_per_s": speed, "mfu": mfu})
                left = (clock - timed_from[1]) / max(1, step - timed_from[0]) * (c.max_iters - step)
                ranks.print(f"step {step}/{c.max_iters}: loss {loss:.4f}, lr {lr:.2e}, norm {grad_norm:.2f}, {speed:,.0f} tokens/s, "
                            f"{f'{100 * mfu:.1f} % MFU, ' if mfu else ''}{timedelta(seconds=round(left))} left")
                busy, tokens_logged = 0.0, tokens

    if total:
        memory = f" The most GPU memory in use was {torch.cuda.max_memory_allocated(ranks.device) / 1e9:.2f} GB." if ranks.device.type == "cuda" else ""
        ranks.print(f"Waiting for data took {100 * batches.waited / total:.2f} % of the steps' time.{memory}")
    if stopping:
        ranks.print(f"Stopped by {stop.caught or 'a signal to another process'} after step {step}, saved; --init_from=resume continues.")
    elif c.sample_tokens and ranks.main and data["tokenizer"]:
        runlog.print_sample(c, ranks, model, data)


if __name__ == "__main__":
    main()
