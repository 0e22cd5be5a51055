"""
Compiles decode.py's launch for an H200 without a GPU: python tests/compile_decode.py HEAD_DIM DTYPE METHOD. Ends with an error unless whatever one warp
stores alone lies in that warp as a whole, which is Triton's choice of a layout and not the program's.
"""
import os
import re
import sys
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class NoGPU:
    """As much of Triton's driver as compiling needs."""
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device=None: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_active_torch_device = staticmethod(lambda: torch.device("cpu"))
    set_current_device = staticmethod(lambda device: None)
    is_active = staticmethod(lambda: True)


driver.set_active(NoGPU())
import decode  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402

head_dim, dtype, depth = int(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3]
config = GPTConfig(n_layer=2, n_head=4, n_kv_head=2, n_embd=256, head_dim=head_dim, n_inner=512, block_size=256, vocab_size=512, depth=depth, depth_stride=1)
model = GPT(config).to(dtype)
weights = {name: p.detach() for name, p in model.named_parameters()}
launch, compiled = decode._token_kernel.run, []
decode._token_kernel.run = lambda *args, **options: compiled.append(launch(*args, **options | {"warmup": True}))
token = decode.Token(model, weights, torch.zeros(config.n_layer, 2, 1, config.n_kv_head, 256, head_dim, dtype=dtype), programs=132)
token(torch.zeros(1, dtype=torch.int64), 3)

text = compiled[0].asm["ttgir"]
layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<.*>)$", text, re.M))
alone = [re.search(r": tensor<(\d+)xi64, (#\w+|#ttg\.slice<.*?>)>,", line).groups() for line in text.splitlines() if "inline_asm" in line and "id, 32, on" in line]
for numbers, layout in alone:
    layout = layouts.get(layout, layout)
    whole = re.search(r"warp = \[((\[0\](, )?)*)\]", layout) or re.search(r"sizePerThread = \[1\], threadsPerWarp = \[32\]", layout) and int(numbers) <= 32
    if not whole:
        sys.exit(f"{numbers} numbers that one warp stores do not all lie in it: {layout}")
print(f"{len(alone)} stores by one warp")
