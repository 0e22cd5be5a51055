"""The model against numbers of the reference (tests/fixtures/README.md): logits, loss, gradients and greedy tokens of every method."""
import re
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import model as definitions
from hf import key_map
from model import GPT, GPTConfig

FIXTURES = Path(__file__).parent / "fixtures"
METHODS = ("vanilla_qknorm", "depth_", "attnres_", "denseformer_", "mhc_")
EXPECTED = {path.name: load_file(path / "expected.safetensors") for path in sorted(FIXTURES.iterdir()) if path.is_dir()}
ORDERS = ("pre_rope", "post_rope")  # of k_norm
MODELS = [(case, order) for case in EXPECTED for order in ORDERS if case.startswith(METHODS) and f"{order}.logits" in EXPECTED[case]]
# Gradients that are zero but for rounding: AttnRes' first aggregator has two equal sources, mHC's first streams are equal.
ZERO_GRADIENTS = ("layers.0.attnres_attn_aggregator.", "layers.0.attn_residual_connector.pre_logits", "layers.0.attn_residual_connector.alpha_pre")


def close(found, expected, absolute, relative=0.0):
    """Largest difference at most absolute + relative * max|expected|."""
    assert found.shape == expected.shape
    difference = (found - expected).abs().max().item() if expected.numel() else 0.0
    scale = expected.abs().max().item() if expected.numel() else 0.0
    assert difference <= absolute + relative * scale, f"{difference} > {absolute} + {relative} * {scale}"


@lru_cache
def pretrained(case, order):
    return GPT.from_pretrained(FIXTURES / case, k_norm_after_rope=order == "post_rope")


def test_every_case_is_here():
    assert len(MODELS) == 19 and {case for case, _ in MODELS} == {path.parent.name for path in FIXTURES.glob("*/model.safetensors")}


@pytest.mark.parametrize("case, order", MODELS)
def test_logits_loss_and_greedy_tokens(case, order):
    model, expected = pretrained(case, order), EXPECTED[case]
    ids = expected["input_ids"]
    with torch.no_grad():
        close(model(ids)[0], expected[f"{order}.logits"], 2e-4)
        close(model(ids[:, :-1], ids[:, 1:])[1], expected[f"{order}.loss"].squeeze(), 1e-5)
    for use_cache in (True, False):
        continued = model.generate(ids, expected[f"{order}.greedy_ids"].shape[1], temperature=0, use_cache=use_cache)
        assert continued[:, ids.shape[1]:].tolist() == expected[f"{order}.greedy_ids"].tolist()


@pytest.mark.parametrize("case, order", MODELS)
def test_gradients(case, order):
    model, expected = pretrained(case, order), EXPECTED[case]
    ids = expected["input_ids"]
    model(ids[:, :-1], ids[:, 1:])[1].backward()
    ours = dict(model.named_parameters())
    gradients = {key: ours[name].grad if rows is None else ours[name].grad[rows] for key, name, rows in key_map(model.config)}
    compared = set()
    for name, value in expected.items():
        if name.startswith((f"{order}.grad.", f"{order}.grad_norm.")):
            kind, key = name.split(".", 2)[1:]
            found = gradients[key] if kind == "grad" else gradients[key].norm().reshape(value.shape)
            close(found, value, 3e-5, 0.0 if key.removeprefix("model.").startswith(ZERO_GRADIENTS) else 1e-3)
            compared.add(key)
    if order == "post_rope":  # every kind of parameter is compared, except the MLP's gate in some cases
        kinds = {re.sub(r"\d+", "N", name) for key, name, _ in key_map(model.config) if key in compared}
        assert {re.sub(r"\d+", "N", name) for name in ours} - kinds <= {"layers.N.mlp.gate_up.weight"}
    assert compared


def test_the_two_norm_orders_differ():
    for case, order in MODELS:
        if order == "pre_rope":
            assert (EXPECTED[case]["pre_rope.logits"] - EXPECTED[case]["post_rope.logits"]).abs().max() > 1e-2


def test_depth_mix():
    case = EXPECTED["value_mix_unit"]
    mixed = definitions.depth_mix(case["q_heads"], case["self_k"], case["self_v"], case["cross_k"], case["cross_v"])
    close(mixed, case["mixed"], 1e-6)
    listed = definitions.depth_mix(case["q_heads"], case["self_k"], case["self_v"], list(case["cross_k"]), list(case["cross_v"]))
    assert torch.equal(mixed, listed)


def joint(q, k, v, depth_k, depth_v):
    return definitions.joint_attention(q, k, v, list(zip(depth_k, depth_v, strict=True)))


@pytest.mark.parametrize("operator", [definitions.moda_attention, joint])
@pytest.mark.parametrize("case", [case for case in EXPECTED if case.startswith("moda_op_")])
def test_moda_operator(case, operator):
    expected = EXPECTED[case]
    heads = {name: expected[name].transpose(1, 2).requires_grad_() for name in "qkv"}  # [B,T,H,d] -> [B,H,T,d]
    slots = {name: expected[name].permute(2, 0, 3, 1, 4).contiguous().requires_grad_() for name in ("kd", "vd")}  # [B,T,L,G,d] -> [L,B,G,T,d]
    o = operator(*heads.values(), *slots.values())
    close(o.transpose(1, 2), expected["o"], 2e-6)
    inputs = [*heads.values(), *(slots.values() if len(slots["kd"]) else ())]  # nothing looks at slots that are not there
    gradients = torch.autograd.grad(o, inputs, expected["do"].transpose(1, 2))
    for name, gradient in zip((*heads, *slots)[:len(inputs)], gradients, strict=True):
        back = gradient.transpose(1, 2) if name in heads else gradient.permute(1, 3, 0, 2, 4)
        close(back, expected["d" + name], 2e-6, 1e-6)


def moda_names(n_layer):
    """(the fixture's name, ours, rows of ours or None) of every parameter of the moda_model cases."""
    names = [("emb.weight", "embed.weight", None), ("nf.weight", "norm.weight", None)]
    for i in range(n_layer):
        theirs, ours = f"blocks.{i}.", f"layers.{i}."
        names += [(theirs + "q.weight", ours + "attn.qkv.weight", slice(0, 64)), (theirs + "kv.k.weight", ours + "attn.qkv.weight", slice(64, 96)),
                  (theirs + "kv.v.weight", ours + "attn.qkv.weight", slice(96, 128)), (theirs + "o.weight", ours + "attn.out.weight", None),
                  (theirs + "qn.weight", ours + "attn.q_norm.weight", None), (theirs + "kv.kn.weight", ours + "attn.k_norm.weight", None),
                  (theirs + "n1.weight", ours + "attn_norm.weight", None), (theirs + "n2.weight", ours + "mlp_norm.weight", None),
                  (theirs + "w1.weight", ours + "mlp.gate_up.weight", slice(0, 128)),
                  (theirs + "w3.weight", ours + "mlp.gate_up.weight", slice(128, 256)),
                  (theirs + "w2.weight", ours + "mlp.down.weight", None)]
        if i < n_layer - 1:  # nothing reads what the last layer's FFN would write
            names += [(theirs + "ffn_depth_kv.k.weight", ours + "ffn_kv.kv.weight", slice(0, 32)),
                      (theirs + "ffn_depth_kv.v.weight", ours + "ffn_kv.kv.weight", slice(32, 64)),
                      (theirs + "ffn_depth_kv.kn.weight", ours + "ffn_kv.k_norm.weight", None)]
    return names


@pytest.mark.parametrize("norm_order", ["pre", "post"])
def test_moda_model(norm_order):
    expected = EXPECTED[f"moda_model_{norm_order}norm"]
    model = GPT(GPTConfig(n_layer=3, n_head=4, n_kv_head=2, n_embd=64, n_inner=128, vocab_size=61, block_size=32, rope_theta=500000.0, norm_eps=1e-6,
                          qk_norm="full", norm_order=norm_order, tie_embeddings=True, depth="moda"))
    names, parameters = moda_names(3), dict(model.named_parameters())
    assert {ours for _, ours, _ in names} == parameters.keys()
    assert {theirs for theirs, _, _ in names} == {key.removeprefix("param.") for key in expected if key.startswith("param.")}
    with torch.no_grad():
        for theirs, ours, rows in names:
            parameters[ours][slice(None) if rows is None else rows] = expected["param." + theirs]
        close(model(expected["ids"])[0], expected["logits"], 2e-4)
    loss = model(expected["ids"][:, :-1], expected["ids"][:, 1:])[1]
    close(loss, expected["loss"].squeeze(), 1e-5)
    loss.backward()
    for theirs, ours, rows in names:
        close(parameters[ours].grad[slice(None) if rows is None else rows], expected["grad." + theirs], 3e-5, 1e-3)
