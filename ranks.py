"""
What the processes of a run do together, and how they end: Ranks (what they tell each other), StopSignals (SIGTERM, SIGINT, SIGUSR1) and
explained_errors (failures that a user can do something about).
"""
import contextlib
import os
import re
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import configurator


class Ranks:
    """
    This process among those that torchrun started: rank, world_size, device, main (whether it is rank 0), and what they do together.
    c: the options device and dist_timeout. A process on its own needs no process group.
    """

    def __init__(self, c):
        self.rank, self.world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.main = self.rank == 0
        self.device = configurator.find_device(c.device, int(os.environ["LOCAL_RANK"]) if self.world_size > 1 else None)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.world_size > 1:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(minutes=c.dist_timeout), device_id=self.device if backend == "nccl" else None)
            # For waits that may be long, such as for a data set being prepared or a checkpoint being written: NCCL's timeout must not end them.
            self.patient = dist.new_group(backend="gloo", timeout=timedelta(hours=12))

    def sum(self, tensor):
        """The tensor, summed over all ranks."""
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self.patient if tensor.device.type == "cpu" else None)
        return tensor

    def any(self, flag):
        """Whether the flag is set on any rank; the same answer everywhere."""
        return bool(self.sum(torch.tensor(float(bool(flag)))))

    def on_main(self, function, *args):
        """Calls the function on rank 0 while the others wait, and gives all of them its result, or its ValueError or OSError."""
        result = [None, None]
        if self.main:
            try:
                result[0] = function(*args)
            except (ValueError, OSError) as error:
                result[1] = error
        if self.world_size > 1:
            result[1] = result[1] and ValueError(str(result[1]))  # a plain one, which every rank can unpickle
            dist.broadcast_object_list(result, src=0, group=self.patient)
        if result[1]:
            raise result[1]
        return result[0]

    def optimizer_state(self, optimizer):
        """
        The optimizer's state_dict(). One that is spread over the ranks (ZeroRedundancyOptimizer) is gathered on rank 0, tensor by tensor into its
        main memory, and of no use on the others. Its own way of gathering pickles all of it and copies that byte by byte: minutes a gigabyte.
        """
        if not hasattr(optimizer, "consolidate_state_dict"):
            return optimizer.state_dict()
        params, groups, state = [], [], {}
        for group in optimizer.param_groups:
            groups.append({**group, "params": list(range(len(params), len(params) + len(group["params"])))})
            params += group["params"]
        mine = [optimizer.optim.state.get(p) for p in params]
        owners = self.sum(torch.tensor([(self.rank + 1) * bool(part) for part in mine])) - 1
        for i, (p, part, owner) in enumerate(zip(params, mine, owners.tolist(), strict=True)):
            if owner < 0 or self.rank not in (owner, 0):  # -1: no update yet
                continue
            for name in ("step", "exp_avg", "exp_avg_sq"):
                x = part[name].to(p.device) if part else p.new_empty(()) if name == "step" else torch.empty_like(p)
                if not self.main:
                    dist.send(x, 0)
                    continue
                if owner:
                    dist.recv(x, owner)
                state.setdefault(i, {})[name] = x.cpu()
        return {"state": state, "param_groups": groups}

    def print(self, *args):
        if self.main:
            print(*args, flush=True)

    def close(self):
        if self.world_size > 1:
            dist.destroy_process_group()


class StopSignals:
    """
    Notes a signal instead of dying of it, so that the loop can finish its step and save. `caught` is the signal's name or ''.
    SIGUSR1 is for job schedulers: torchrun answers SIGTERM by killing its processes half a minute later, SIGUSR1 it can be told to ignore.
    """
    NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __enter__(self):
        self.caught = ""
        self.before = {number: signal.signal(number, self.note) for number in self.NUMBERS}
        return self

    def note(self, number, frame):
        if not self.caught:
            print(f"{signal.Signals(number).name}: finishing the step, then saving.", file=sys.stderr, flush=True)
        self.caught = signal.Signals(number).name

    def __exit__(self, *exception):
        for number, handler in self.before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def explained_errors(c, ranks):
    """Ends the run with a sentence for the failures of the training loop that a user can do something about."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise SystemExit(f"error: rank {ranks.rank} is out of GPU memory at --batch_size={c.batch_size}. Halve it (with --global_batch_size given, "
                         "the results stay the same), or add --grad_checkpoint=True or --zero1=True"
                         f"{', or set --cuda_graph=False' * c.cuda_graph}. "
                         f"PyTorch says: {str(error).splitlines()[0]}") from error
    except Exception as error:
        text = " ".join([line.strip() for line in str(error).splitlines() if line.strip()][:2]) or type(error).__name__
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise SystemExit(f"error: torch.compile failed; --compile=False trains without it. It says: {type(error).__name__}: {text}") from error
        lost = isinstance(error, dist.DistError) or isinstance(error, RuntimeError) and re.search("gloo|Connection|NCCL", str(error))
        if ranks.world_size > 1 and lost:
            print(f"error: rank {ranks.rank} has lost another process and stops. Start again with --init_from=auto to continue from "
                  f"{c.out_dir}/ckpt_last.pt. PyTorch says: {text}", file=sys.stderr, flush=True)
            os._exit(1)  # an orderly exit would wait for the lost one
        raise
