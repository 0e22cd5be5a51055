"""Tiny models for the tests: every size differs from every other, and every parameter is moved away from its initial value."""
import itertools

import torch

import model as definitions
from model import GPT, GPTConfig

SIZES = dict(n_layer=3, n_head=4, n_kv_head=2, n_embd=10, head_dim=6, n_inner=14, block_size=16, vocab_size=23, init_std=0.3,
             depth_stride=2, denseformer_dilation=2, attnres_block_size=3, mhc_num_streams=2, mhc_sinkhorn_iters=2, mhc_alpha_init=0.5)

# every pair of methods, looped and not, in both norm orders, and then the options that change the path a number takes
PAIRS = [dict(connector=connector, depth=depth, n_layer=n_layer, n_loop=n_loop, norm_order=order) for connector, depth, (n_layer, n_loop), order in
         itertools.product(definitions.CONNECTORS, definitions.DEPTHS, ((3, 1), (2, 3)), ("pre", "post"))]
OPTIONS = [
    dict(connector="attnres", attnres_sources="block_sums", attnres_block_size=1, n_loop=2),
    dict(connector="attnres", attnres_sources="block_sums", depth="depth_attention"),
    dict(connector="attnres", attnres_block_size=100, depth="moda"),
    dict(connector="denseformer", denseformer_dilation=1, denseformer_period=2, depth="depth_attention", n_loop=2),
    dict(connector="mhc", mhc_num_streams=1, depth="moda", norm_order="post"),
    dict(connector="mhc", mhc_num_streams=4, depth="depth_attention"),
    dict(depth="depth_attention", depth_recent_window=2, depth_stride=3, n_loop=3),
    dict(depth="depth_attention", n_layer=4, n_loop=2, n_prelude=1, n_coda=1, connector="denseformer"),
    dict(depth="moda", n_layer=4, n_loop=3, n_prelude=2, n_coda=1, connector="attnres"),
    dict(depth="moda", moda_ffn_kv=False, n_loop=2, qk_norm="full"),
    dict(depth="depth_attention", k_norm_after_rope=True, tie_embeddings=True, n_kv_head=4),
    dict(depth="moda", qk_norm="none", n_kv_head=1, head_dim=2),
]


def name(options):
    return "-".join(str(value) if isinstance(value, str) else f"{key}={value}" for key, value in options.items())


def config(**options):
    return GPTConfig(**SIZES | options)


def tiny(seed=0, dtype=torch.float64, **options):
    """A GPT whose vectors and scalars (norms, biases, coefficients, queries) are random as well, so that no term hides behind a 0 or a 1."""
    torch.manual_seed(seed)
    model = GPT(config(**options)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def tokens(model, batch=2, length=8, seed=1):
    return torch.randint(model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(found, expected, tolerance=1e-9):
    """Largest difference at most tolerance, and nothing that is not a number."""
    assert found.shape == expected.shape, f"{tuple(found.shape)} is not {tuple(expected.shape)}"
    difference = (found - expected).abs().max().item() if expected.numel() else 0.0
    assert difference <= tolerance, f"differs by {difference}, more than {tolerance}"


def gradients(model, idx, targets):
    """The loss and every gradient by name, of one backward pass."""
    model.zero_grad()
    loss = model(idx, targets)[1]
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}
