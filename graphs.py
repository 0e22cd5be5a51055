"""
A micro-step of training, forward and backward, recorded as a CUDA graph and replayed.

Python starts the kernels of a layer one by one, 50 to 90 microseconds each. Where the GPU needs less than that, as in models up to a few hundred
million parameters, it waits for Python; a graph starts all of them at once. Clipping, the optimizer and whatever else a step does stay as they are.
"""
import gc

import torch

EAGER_STEPS = 3  # the first steps of a process: they compile the kernels and choose the matmuls, which no recording survives


def reason_against(device, world_size=1, dtype="bfloat16", grad_checkpoint=False):
    """Why micro-steps cannot be recorded with these options, as half a sentence, or '' if they can."""
    reasons = ((device.type != "cuda", f"the device is {device.type}"), (world_size > 1, f"{world_size} processes exchange gradients in the backward pass"),
               (grad_checkpoint, "grad_checkpoint saves the state of the random numbers, which the CPU reads"), (dtype == "float16", "dtype=float16 scales the loss"))
    return next((text for applies, text in reasons if applies), "")


class GraphedGradients:
    """
    gradients(x, y), which runs forward and backward for a micro-batch and returns its loss, detached, as a function that replays recordings of it:

        loss = graphed(x, y, first)        first: whether this is the first micro-step of a step; .grad is None then, or out of date

    leaves in each parameter's .grad what gradients(x, y) would have left, bit for bit, and returns a loss that holds until the next call. x and y have
    the same shape in every call. The gradients lie in the same memory in every step: setting .grad to None in between is free. A step's first micro-step
    writes them and has a recording of its own, the others add to them, so that there is nothing to zero and no gradient of zeros to add to.

    Recorded kernels read and write the addresses that they were recorded with: x and y are copied to such, the weights have to be updated in place.
    What is recorded allocates from a pool of its own, which nothing else can use but other recordings: `pool`, one whose graphs are still there.
    """

    def __init__(self, gradients, parameters, pool=None):
        self.gradients, self.parameters, self.pool = gradients, [p for p in parameters if p.requires_grad], pool
        self.steps, self.recorded = 0, {}  # first -> (replay, loss)

    def __call__(self, x, y, first):
        self.steps += first
        if first:
            for p in self.parameters:
                p.grad = None
        if self.steps <= EAGER_STEPS:
            return self.gradients(x, y)
        if not self.recorded:
            self.x, self.y = x.clone(), y.clone()
        if first not in self.recorded:
            self.recorded[first] = self.record()
            self.grads = [p.grad for p in self.parameters]
        self.x.copy_(x)
        self.y.copy_(y)
        for p, grad in zip(self.parameters, self.grads):
            p.grad = grad
        replay, loss = self.recorded[first]
        replay()
        return loss

    def record(self):
        """
        (function that replays, the loss that it writes). Nothing runs while it is recorded. Autograd graphs of earlier calls must be gone: their
        nodes that add to .grad would be used again, on their own stream, and so would their bfloat16 weights (kernels._cast), now out of date.
        Ends the program with a sentence if it cannot be recorded, since what a failed recording leaves of the stream and the allocator is not known.
        """
        gc.collect()
        self.pool, graph = self.pool or torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):  # the prefetcher's thread may go on pinning memory
                loss = self.gradients(self.x, self.y)
        except RuntimeError as error:
            for cause in (error, error.__context__):  # ending the recording may itself fail, and hide what ended it
                if isinstance(cause, torch.OutOfMemoryError):
                    raise cause from None
            raise SystemExit("error: the micro-step could not be recorded as a CUDA graph; --cuda_graph=False does without one. "
                             f"PyTorch says: {(str(error).strip() or type(error).__name__).splitlines()[0]}") from error
        return graph.replay, loss
