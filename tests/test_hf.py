"""Hugging Face folders: import of Qwen3, Llama and the reference's folders, export and back bit for bit, refusals, the command line."""
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import checkpoint
import hf
import model as model_file
from data.shards import write_shard
from data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, JSONTokenizer, train_bpe
from model import GPT, GPTConfig

ROOT = Path(__file__).parents[1]
FIXTURES = Path(__file__).parent / "fixtures"
REFERENCE_CASES = sorted(path.parent.name for path in FIXTURES.glob("*/model.safetensors"))
SHAPE = dict(n_layer=3, n_head=4, n_kv_head=2, n_embd=24, head_dim=8, n_inner=40, block_size=32, vocab_size=96)


def randomised(config, seed=0):
    """A model in which no parameter is at its special initial value (1 for norms, 0 for queries): mistakes in mapping show."""
    torch.manual_seed(seed)
    model = GPT(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def logits(model, ids):
    with torch.no_grad():
        return model(ids)[0]


def tensors_of(folder):
    return {key: tensor for path in Path(folder).glob("model*.safetensors") for key, tensor in load_file(path).items()}


def edited(tmp_path, case="vanilla_qknorm", config=(), tensors=(), drop=()):
    """A copy of a fixture's folder with some config fields and tensors replaced (None removes a field) or dropped."""
    values = {**json.loads((FIXTURES / case / "config.json").read_text()), **dict(config)}
    (tmp_path / "config.json").write_text(json.dumps(values))
    kept = {**load_file(FIXTURES / case / "model.safetensors"), **dict(tensors)}
    save_file({key: value for key, value in kept.items() if key not in drop}, tmp_path / "model.safetensors")
    return tmp_path


def refusal(action, *arguments, **options):
    """The sentence with which a ValueError refuses something."""
    with pytest.raises(ValueError) as caught:
        action(*arguments, **options)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# transformers as the judge

def theirs(kind, **options):
    """A tiny random Qwen3 or Llama of transformers, its norms randomised too."""
    transformers = pytest.importorskip("transformers", reason="transformers, a development dependency, is not installed")
    shape = dict(vocab_size=96, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                 max_position_embeddings=32, **options)
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**shape)
    made = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return made


@pytest.mark.parametrize("kind", ["Qwen3", "Llama"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["50KB", "1GB"])
def test_import_agrees_with_transformers(kind, tied, shard, tmp_path):
    made = theirs(kind, tie_word_embeddings=tied)
    made.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "50KB")
    ours = GPT.from_pretrained(tmp_path)
    assert ours.config.qk_norm == ("head" if kind == "Qwen3" else "none") and ours.config.tie_embeddings == tied
    ids = torch.randint(96, (2, 20))
    with torch.no_grad():
        assert (logits(ours, ids) - made(ids).logits).abs().max() < 1e-4
    assert ours.num_params() == made.num_parameters()


def test_rope_theta_of_either_config_layout(tmp_path):
    made = theirs("Qwen3", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    made.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    ids = torch.randint(96, (2, 20))
    for change in ({}, {"rope_parameters": None, "rope_theta": 5e5}):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        ours = GPT.from_pretrained(tmp_path)
        with torch.no_grad():
            assert ours.config.rope_theta == 5e5 and (logits(ours, ids) - made(ids).logits).abs().max() < 1e-4


@pytest.mark.parametrize("qk_norm, kind", [("head", "Qwen3ForCausalLM"), ("none", "LlamaForCausalLM")])
def test_exported_vanilla_runs_in_transformers(qk_norm, kind, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers, a development dependency, is not installed")
    ours = randomised(GPTConfig(**SHAPE, qk_norm=qk_norm, rope_theta=20000.0, norm_eps=1e-4))
    hf.export(ours, tmp_path / "new", max_shard_bytes=20000)
    made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval()
    assert type(made).__name__ == kind and made.dtype == torch.float32
    ids = torch.randint(96, (2, 16))
    with torch.no_grad():
        assert (logits(ours, ids) - made(ids).logits).abs().max() < 1e-4
        generated = made.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert torch.equal(generated, ours.generate(ids, 12, temperature=0))


# ---------------------------------------------------------------------------------------------------------------------
# Export and back

ROUND_TRIPS = [dict(), dict(tie_embeddings=True), dict(qk_norm="none"), dict(k_norm_after_rope=True)]
ROUND_TRIPS += [dict(connector="denseformer", denseformer_dilation=2, denseformer_period=2), dict(connector="attnres", attnres_block_size=3),
                dict(connector="mhc", mhc_num_streams=3, mhc_sinkhorn_iters=7, mhc_alpha_init=0.1), dict(connector="mhc", k_norm_after_rope=True),
                dict(connector="denseformer", qk_norm="none"), dict(connector="attnres", attnres_recency_bias_init=1.5, tie_embeddings=True)]
ROUND_TRIPS += [dict(depth="depth_attention", depth_stride=2, depth_recent_window=1), dict(depth="depth_attention", k_norm_after_rope=True),
                dict(depth="depth_attention", qk_norm="none", tie_embeddings=True)]


@pytest.mark.parametrize("options", ROUND_TRIPS, ids=lambda options: " ".join(f"{k}={v}" for k, v in options.items()) or "qwen3")
def test_import_of_export_is_the_same_model(options, tmp_path):
    model = randomised(GPTConfig(**SHAPE, **options))
    hf.export(model, tmp_path / "one")
    hf.export(model, tmp_path / "many", max_shard_bytes=10000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    for name in ("one", "many"):
        again = GPT.from_pretrained(tmp_path / name)
        assert again.config == model.config
        assert again.state_dict().keys() == model.state_dict().keys()
        assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
        ids = torch.randint(96, (2, 20))
        assert torch.equal(logits(model, ids), logits(again, ids))


@pytest.mark.parametrize("case", REFERENCE_CASES)
def test_export_of_import_is_the_same_folder(case, tmp_path):
    hf.export(hf.load(FIXTURES / case), tmp_path / "new")
    before, after = tensors_of(FIXTURES / case), tensors_of(tmp_path / "new")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before if key != "lm_head_layernorm.weight")  # unused, so not kept
    config, new = (json.loads((folder / "config.json").read_text()) for folder in (FIXTURES / case, tmp_path / "new"))
    shared = config.keys() & new.keys() - {"bos_token_id", "eos_token_id", "pad_token_id"}
    assert {key: config[key] for key in shared} == {key: new[key] for key in shared} and len(shared) > 15
    assert hf.read_config(new, after).fields == hf.read_config(config, before).fields


@pytest.mark.parametrize("connector", ["residual", "denseformer", "attnres", "mhc"])
@pytest.mark.parametrize("tied", [False, True])
def test_key_map_covers_every_parameter_once(connector, tied):
    config = GPTConfig(**SHAPE, connector=connector, denseformer_period=2, tie_embeddings=tied)
    names = hf.key_map(config)
    assert len({key for key, _, _ in names}) == len(names)
    covered = {}
    for _, ours, rows in names:
        start, end = covered.get(ours, (0, 0))
        assert rows is None and ours not in covered or rows is not None and rows.start == end
        covered[ours] = (0, None) if rows is None else (start, rows.stop)
    state = GPT(config).state_dict()
    assert covered.keys() == state.keys()
    assert all(end is None or end == len(state[ours]) for ours, (_, end) in covered.items())


def test_dtypes(tmp_path):
    model = randomised(GPTConfig(**SHAPE)).bfloat16()
    hf.export(model, tmp_path / "bf16")
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    stored, wide = hf.load(tmp_path / "bf16", dtype="auto"), hf.load(tmp_path / "bf16")
    for name, value in model.state_dict().items():
        assert torch.equal(stored.state_dict()[name], value) and torch.equal(wide.state_dict()[name], value.float())
    fresh = GPT(stored.config)  # the rotary tables are float32 whatever the parameters are
    assert torch.equal(stored.cos, fresh.cos) and torch.equal(stored.sin, fresh.sin) and torch.equal(wide.cos, fresh.cos)
    assert stored.generate(torch.tensor([[1, 2]]), 3, temperature=0).shape == (1, 5)
    hf.export(wide, tmp_path / "f16", dtype=torch.float16)
    assert tensors_of(tmp_path / "f16")["lm_head.weight"].dtype == torch.float16
    assert "int7" in refusal(hf.load, tmp_path / "bf16", dtype="int7")


class Toy(model_file.Residual):
    """A connector with a parameter that no Hugging Face folder has."""
    def __init__(self, config):
        super().__init__(config)
        self.gain = torch.nn.Parameter(torch.ones(()))


NO_FORM = [dict(depth="moda"), dict(n_loop=2), dict(norm_order="post"), dict(qk_norm="full"), dict(connector="toy"),
           dict(connector="attnres", attnres_sources="block_sums"), dict(connector="mhc", depth="depth_attention")]


@pytest.mark.parametrize("options", NO_FORM, ids=lambda options: " ".join(map(str, options.values())))
def test_what_has_no_hugging_face_form(options, tmp_path, monkeypatch):
    monkeypatch.setitem(model_file.CONNECTORS, "toy", Toy)
    sentence = refusal(hf.export, GPT(GPTConfig(**SHAPE, **options)), tmp_path / "new")
    assert all(f"{name}={value}" in sentence for name, value in list(options.items())[-1:]) and "no Hugging Face form" in sentence
    assert not (tmp_path / "new").exists()


def test_a_parameter_without_a_name_is_not_lost(tmp_path, monkeypatch):
    monkeypatch.setitem(model_file.CONNECTORS, "residual", Toy)
    assert "connector.gain" in refusal(hf.export, GPT(GPTConfig(**SHAPE)), tmp_path / "new")


def test_export_into_a_folder_in_use(tmp_path):
    (tmp_path / "precious").write_text("")
    assert "not empty" in refusal(hf.export, GPT(GPTConfig(**SHAPE)), tmp_path)


NOTES = [(dict(depth="depth_attention"), "cannot do with depth attention"), (dict(connector="mhc"), "flash_attention_2'"),
         (dict(connector="mhc", k_norm_after_rope=True), "'sdpa'"), (dict(connector="mhc", qk_norm="none"), None),
         (dict(depth="depth_attention", k_norm_after_rope=True), None), (dict(k_norm_after_rope=True), None)]


@pytest.mark.parametrize("options, said", NOTES, ids=[" ".join(map(str, options.values())) for options, _ in NOTES])
def test_export_says_how_the_reference_must_be_run(options, said, tmp_path):
    notes = hf.export(GPT(GPTConfig(**SHAPE, **options)), tmp_path / "new", tokenizer=ByteTokenizer())
    assert notes == [] if said is None else len(notes) == 1 and said in notes[0]


# ---------------------------------------------------------------------------------------------------------------------
# config.json of the reference: fallbacks and precedence

BASE = dict(model_type="llama", vocab_size=96, hidden_size=24, intermediate_size=40, num_hidden_layers=6, num_attention_heads=4)
NORMED = ["model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.k_norm.weight"]
MEANINGS = [
    (dict(use_depth_attention=True), dict(depth="depth_attention", depth_stride=1, depth_recent_window=0, k_norm_after_rope=True)),
    (dict(use_depth_attention=True, depth_softmax_stride=3, depth_recent_window=2), dict(depth_stride=3, depth_recent_window=2)),
    (dict(use_depth_attention=True, depth_attention_stride=2, depth_softmax_stride=3), dict(depth_stride=2)),
    (dict(use_depth_attention=True, depth_attention_recent_window=1, depth_recent_window=2), dict(depth_recent_window=1)),
    (dict(use_depth_attention=True, depth_attention_stride=0), dict(depth_stride=1)),
    (dict(use_depth_attention=True, recurrent_model=True, use_qk_norm=True), dict(depth="depth_attention")),
    (dict(cross_layer_pattern="depth_softmax", recurrent_model=True), dict(depth="depth_attention", depth_stride=1)),
    (dict(cross_layer_mode="depth_attention"), dict(depth="depth_attention")),
    (dict(use_depth_attention=False, depth_attention_stride=3), dict(qk_norm="head", k_norm_after_rope=True)),
    (dict(baseline_mode="attnres"), dict(connector="attnres", attnres_block_size=12, attnres_recency_bias_init=3.0, k_norm_after_rope=False)),
    (dict(baseline_mode=" Block-AttnRes ", attnres_block_size=0), dict(connector="attnres", attnres_block_size=1, attnres_sources="snapshots")),
    (dict(baseline_mode="attention_residual", attnres_block_size="many"), dict(attnres_block_size=12)),
    (dict(baseline_mode="attnres", attnres_block_size=None, attnres_recency_bias_init=1), dict(attnres_block_size=12, attnres_recency_bias_init=1)),
    (dict(residual_baseline="denseformer"), dict(connector="denseformer", denseformer_dilation=1, denseformer_period=1)),
    (dict(baseline_mode="densetransformer", densetransformer_dwa_dilation=4, densetransformer_dwa_period=5),
     dict(denseformer_dilation=4, denseformer_period=5)),
    (dict(baseline_mode="denseformer", denseformer_dwa_dilation=2, densetransformer_dwa_dilation=4), dict(denseformer_dilation=2)),
    (dict(baseline_mode="denseformer", residual_baseline="densetransformer"), dict(connector="denseformer")),
    (dict(baseline_mode="none", residual_baseline="mhc"), dict(connector="mhc", mhc_num_streams=4, mhc_sinkhorn_iters=20, mhc_alpha_init=0.01)),
    (dict(baseline_mode="mhc", mhc_num_streams=2), dict(mhc_num_streams=2)),
    (dict(baseline_mode="mhc", mhc_num_streams=2, residual_baseline_num_streams=3, mhc_sinkhorn_iters=0),
     dict(mhc_num_streams=3, mhc_sinkhorn_iters=1)),
    (dict(baseline_mode="mhc", use_depth_attention=True, recurrent_model=True, cross_layer_pattern="dense"),
     dict(connector="mhc", k_norm_after_rope=False)),
    (dict(baseline_mode="mhc", k_norm_after_rope=True), dict(connector="mhc", k_norm_after_rope=True)),
]


@pytest.mark.parametrize("fields, meaning", MEANINGS, ids=lambda x: "")
def test_reference_fields(fields, meaning):
    found = hf.read_config({**BASE, **fields}, NORMED).fields
    assert {name: found.get(name) for name in meaning} == meaning
    if "connector" in meaning:
        assert "depth" not in found
    GPTConfig(**found)


def test_absent_fields_mean_what_they_mean_in_transformers():
    llama = hf.read_config(BASE, []).fields
    assert llama == dict(n_layer=6, n_head=4, n_kv_head=4, n_embd=24, head_dim=6, n_inner=40, block_size=2048, vocab_size=96, rope_theta=10000.0,
                         norm_eps=1e-6, init_std=0.02, tie_embeddings=False, qk_norm="none", k_norm_after_rope=False)
    qwen3 = hf.read_config({**BASE, "model_type": "qwen3"}, NORMED).fields
    assert qwen3 == {**llama, "head_dim": 128, "block_size": 32768, "qk_norm": "head"}


def test_the_methods_names():
    names = {hf.read_config({**BASE, **fields}, keys).method for fields, keys in
             [({}, []), ({}, NORMED), ({"model_type": "qwen3"}, NORMED), ({"use_depth_attention": True}, NORMED), ({"baseline_mode": "mhc"}, NORMED)]}
    assert names == {"llama", "vanilla_qknorm", "qwen3", "depth_attention", "mhc"}


def test_a_contradiction_is_settled_by_the_caller():
    fields = {**BASE, "use_depth_attention": True, "recurrent_model": False, "depth_attention_stride": 2}
    assert "recurrent_model" in refusal(hf.read_config, fields, NORMED)
    assert hf.read_config(fields, NORMED, depth="depth_attention").fields["depth_stride"] == 2
    assert "depth" not in hf.read_config(fields, NORMED, depth="none").fields


# ---------------------------------------------------------------------------------------------------------------------
# Refusals

WRONG_FIELDS = [("model_type", "mistral"), ("hidden_act", "gelu"), ("attention_bias", True), ("mlp_bias", True), ("scale_embeds", True),
                ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}), ("rope_scaling", {"type": "linear", "factor": 2.0}),
                ("rope_parameters", {"rope_type": "yarn", "rope_theta": 10000.0}), ("partial_rotary_factor", 0.5), ("sliding_window", 64),
                ("layer_types", ["sliding_attention"] * 4), ("rope_parameters", {"rope_type": "default", "rope_theta": 5.0}), ("hidden_size", None),
                ("num_hidden_layers", "four"), ("baseline_mode", "hyper"), ("use_qk_norm", False), ("cross_layer_pattern", "dense"),
                ("attention_dropout", 0.1), ("no_residual", True), ("quantization_config", {"bits": 4}), ("rms_norm_eps", "small"),
                ("rope_scaling", "linear"), ("num_attention_heads", 0), ("layer_types", 3), ("num_key_value_heads", float("inf")),
                ("final_logit_softcapping", 30.0), ("attn_logit_softcapping", 50.0), ("residual_multiplier", 0.22), ("embedding_multiplier", 12.0),
                ("logit_scale", 0.0625), ("logits_scaling", 8.0), ("attention_multiplier", 1.0), ("query_pre_attn_scalar", 224)]


@pytest.mark.parametrize("field, value", WRONG_FIELDS)
def test_unsupported_fields_are_named(field, value, tmp_path):
    sentence = refusal(GPT.from_pretrained, edited(tmp_path, config={field: value}))
    assert field in sentence and str(tmp_path) in sentence
    assert value is None or str(value).strip("[]'")[:12] in sentence or value == "four"


def test_harmless_spellings_are_accepted(tmp_path):
    rope = {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000}}
    window = {"sliding_window": 64, "use_sliding_window": False, "layer_types": ["full_attention"] * 4}
    head_dim = hf.load(FIXTURES / "vanilla_qknorm").config.head_dim
    factors = {"residual_multiplier": 1.0, "logit_scale": 1, "final_logit_softcapping": None, "attention_multiplier": head_dim**-0.5, "query_pre_attn_scalar": head_dim}
    GPT.from_pretrained(edited(tmp_path, config={**rope, **window, **factors, "hidden_act": "swish", "mlp_bias": None}))


def test_other_contradictions(tmp_path):
    assert "max_window_layers 'x'" in refusal(hf.load, edited(tmp_path, config={"sliding_window": 64, "max_window_layers": "x"}))
    assert "depth_attention_stride None" in refusal(hf.load, edited(tmp_path, "depth_mha_stride2", config={"depth_attention_stride": None}))
    assert "residual_baseline 'mhc'" in refusal(hf.load, edited(tmp_path, "attnres_block2", config={"residual_baseline": "mhc"}))
    # without norms: an absent use_qk_norm means true in the reference's folders, and Qwen3 always has them
    bare = edited(tmp_path, "depth_noqknorm_half")
    config = json.loads((bare / "config.json").read_text())
    del config["use_qk_norm"]
    (bare / "config.json").write_text(json.dumps(config))
    assert "no use_qk_norm" in refusal(hf.load, bare)
    assert "model_type 'qwen3'" in refusal(hf.load, edited(tmp_path, "depth_noqknorm_half", config={"model_type": "qwen3"}))


def test_tensors_that_do_not_fit_are_named(tmp_path):
    norm, down = "model.layers.1.input_layernorm.weight", "model.layers.2.mlp.down_proj.weight"
    sentence = refusal(hf.load, edited(tmp_path, drop=(norm, down)))
    assert "lacks" in sentence and norm in sentence and down in sentence
    assert "model.extra" in refusal(hf.load, edited(tmp_path, tensors={"model.extra": torch.ones(2)}))
    for look in (hf.load, hf.inspect):
        sentence = refusal(look, edited(tmp_path, tensors={norm: torch.ones(31)}))
        assert norm in sentence and "[31]" in sentence and "[32]" in sentence
        assert f"{norm} is I8" in refusal(look, edited(tmp_path, tensors={norm: torch.ones(32, dtype=torch.int8)}))
    many = refusal(hf.load, edited(tmp_path, config={"num_hidden_layers": 2}))  # two layers of 11 tensors too many, of which 8 are named
    assert "unexpected" in many and "and 14 more" in many


def test_tensors_that_are_dropped_or_may_be_absent(tmp_path):
    ids = torch.randint(128, (1, 9))
    expected = logits(hf.load(FIXTURES / "vanilla_qknorm"), ids)
    assert torch.equal(expected, logits(hf.load(edited(tmp_path, drop=("lm_head_layernorm.weight",))), ids))
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "model.rotary_emb.inv_freq": torch.ones(4)}
    assert torch.equal(expected, logits(hf.load(edited(tmp_path, tensors=frequencies)), ids))


def test_a_tied_head_may_be_stored_twice_but_not_differ(tmp_path):
    embedding = load_file(FIXTURES / "vanilla_qknorm" / "model.safetensors")["model.embed_tokens.weight"]
    tied = {"tie_word_embeddings": True}
    assert "tie_word_embeddings" in refusal(hf.load, edited(tmp_path, config=tied))
    twice = hf.load(edited(tmp_path, config=tied, tensors={"lm_head.weight": embedding.clone()}))
    once = hf.load(edited(tmp_path, config=tied, drop=("lm_head.weight",)))
    assert torch.equal(logits(once, torch.arange(9)[None]), logits(twice, torch.arange(9)[None])) and once.lm_head is None


def test_overrides(tmp_path):
    case = FIXTURES / "vanilla_qknorm"
    assert GPT.from_pretrained(case, block_size=8, n_loop=2).config.n_loop == 2
    assert GPT.from_pretrained(case, depth="depth_attention").config.depth_stride == 2  # the model's own default, half of its 4 layers
    assert "'n_layers'" in refusal(hf.load, case, n_layers=3)
    assert "connector.sites.0" not in (sentence := refusal(hf.load, case, connector="mhc")) and "attn_residual_connector" in sentence
    assert "ffn_kv" in refusal(hf.load, case, depth="moda")


def test_files_that_are_missing_or_damaged(tmp_path):
    assert "no config.json" in refusal(hf.load, tmp_path)
    (tmp_path / "ckpt_last.pt").write_text("")
    assert "hf.py export" in refusal(hf.load, tmp_path)
    (tmp_path / "config.json").write_text("{oops")
    assert "config.json is not valid JSON" in refusal(hf.load, tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    assert "config.json holds a JSON list" in refusal(hf.load, tmp_path)
    edited(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:len(whole) // 2])
    assert "model.safetensors is not a whole" in refusal(hf.load, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "has no model.safetensors" in refusal(hf.load, tmp_path)
    (tmp_path / "pytorch_model.bin").write_text("")
    assert "pickles" in refusal(hf.load, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00002-of-00002.safetensors"}}))
    assert "model-00002-of-00002.safetensors" in refusal(hf.load, tmp_path)
    for index in ("{}", '{"weight_map": [1]}'):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        assert "no weight_map" in refusal(hf.load, tmp_path)


def test_hub_ids(tmp_path, monkeypatch):
    assert "no folder '/nowhere/at/all'" in refusal(hf.load, "/nowhere/at/all")
    hub = pytest.importorskip("huggingface_hub")

    asked = []

    def download(repo_id, name):
        asked.append(name)
        if repo_id == "some/one":
            raise ConnectionError("no route\nto host")
        if not (edited(tmp_path) / name).exists():
            raise hub.errors.EntryNotFoundError(f"no {name}")
        return str(tmp_path / name)
    monkeypatch.setattr(hub, "hf_hub_download", download)
    sentence = refusal(hf.load, "some/one")
    assert "some/one" in sentence and "(no route)" in sentence and "network" in sentence
    assert hf.load("some/other").config.n_layer == 4
    asked.clear()
    original = json.loads((tmp_path / "config.json").read_text())
    monkeypatch.setattr(hf, "read_json", lambda path: {**original, "model_type": "gpt2"})
    assert "gpt2" in refusal(hf.load, "some/other") and asked == ["config.json"]  # nothing large is fetched in vain


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers

@pytest.fixture(scope="module")
def bpe():
    return train_bpe([Path(hf.__file__).read_text()] * 2, 600)


HARD = ["", "<|endoftext|> is text", "🙂" * 3, "def f(x):\n\treturn  x + 1\n\n", "naïve café — 日本語 ١٢٣ 12345",
        "e\u0301 \u00a0\u2003\u0085\r\n  \x00\x7f"]


@pytest.mark.parametrize("kind", ["bpe", "bytes", "json"])
def test_tokenizer_json_gives_the_same_ids(kind, bpe, tmp_path):
    pytest.importorskip("tokenizers", reason="tokenizers, an optional package, is not installed")
    tokenizer = {"bpe": lambda: bpe, "bytes": ByteTokenizer, "json": lambda: JSONTokenizer(hf.tokenizer_json(bpe)[0])}[kind]()
    assert hf.export(GPT(GPTConfig(**{**SHAPE, "vocab_size": 640})), tmp_path / "new", tokenizer=tokenizer) == []
    written = JSONTokenizer((tmp_path / "new" / "tokenizer.json").read_text(encoding="utf-8"))
    assert (written.n_vocab, written.eot) == (tokenizer.n_vocab, tokenizer.eot)
    for text in [*HARD, Path(hf.__file__).read_text(), "".join(map(chr, range(0x2000)))]:
        assert written.encode(text) == tokenizer.encode(text)
        assert written.decode(tokenizer.encode(text)) == text
    assert json.loads((tmp_path / "new" / "config.json").read_text())["eos_token_id"] == tokenizer.eot


def test_special_ids_keep_their_numbers():
    pytest.importorskip("tokenizers", reason="tokenizers, an optional package, is not installed")
    # as in some of tiktoken's encodings: an unused id between the tokens and the special ones, which are not in order
    tokenizer = BPETokenizer(r"\S+|\s+", [bytes([i]) for i in range(256)] + [b"ab", None], {"<|pad|>": 260, "<|endoftext|>": 259})
    text, name = hf.tokenizer_json(tokenizer)
    written = JSONTokenizer(text)
    assert name == "<|endoftext|>" and written.eot == 259 and written.tokenizer.token_to_id("<|pad|>") == 260
    assert written.encode("abba ab") == tokenizer.encode("abba ab") == [256, 98, 97, 32, 256]


def test_auto_tokenizer_reads_it(bpe, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers, a development dependency, is not installed")
    hf.export(GPT(GPTConfig(**{**SHAPE, "vocab_size": 640})), tmp_path / "new", tokenizer=bpe)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    assert theirs(HARD[4])["input_ids"] == bpe.encode(HARD[4]) and theirs.eos_token_id == bpe.eot


def test_no_tokenizer_is_said(tmp_path):
    model = GPT(GPTConfig(**SHAPE))
    assert "without a tokenizer" in hf.export(model, tmp_path / "none")[0]
    assert "kind char" in hf.export(model, tmp_path / "char", tokenizer=CharTokenizer("ab"))[0]
    assert not list(tmp_path.glob("*/tokenizer*"))


# ---------------------------------------------------------------------------------------------------------------------
# Command line

@pytest.fixture
def run(tmp_path):
    """A run's folder with a best and a last checkpoint, as train.py leaves them."""
    for name, seed in (("last", 0), ("best", 1)):
        model = randomised(GPTConfig(**{**SHAPE, "vocab_size": 257}, depth="depth_attention", k_norm_after_rope=True), seed)
        state = {key: {} for key in checkpoint.KEYS}
        state.update(model=model.state_dict(), step=3, best_val_loss=2.0, config={**dataclasses.asdict(model.config), "learning_rate": 1.0},
                     data={"tokenizer": ByteTokenizer().to_meta()})
        checkpoint.save(tmp_path / "run" / f"ckpt_{name}.pt", state)
    return tmp_path / "run"


def test_export_and_inspect(run, tmp_path, capsys):
    for arguments, seed in (([], 1), (["--which=last"], 0), (["--dtype=bfloat16"], 1)):
        folder = tmp_path / f"new{seed}{len(arguments)}"
        hf.main(["export", str(run), str(folder), *arguments])
        assert str(folder) in capsys.readouterr().out
        again = hf.load(folder)
        expected = randomised(again.config, seed).state_dict()
        if "--dtype=bfloat16" in arguments:
            expected = {name: value.bfloat16().float() for name, value in expected.items()}
        assert all(torch.equal(value, again.state_dict()[name]) for name, value in expected.items())
        assert (folder / "tokenizer.json").exists()
    (tmp_path / "data").mkdir()
    torch.manual_seed(0)
    write_shard(tmp_path / "data" / "val_000000.bin", torch.randint(257, (200,)).numpy())
    hf.main(["inspect", str(tmp_path / "new10"), f"--data_dir={tmp_path / 'data'}", "--eval_tokens=96", "--device=cpu"])
    out = capsys.readouterr().out
    assert "depth_attention (depth_stride=1, depth_recent_window=0)" in out and "after RoPE: config.json records it" in out
    assert f"{hf.load(tmp_path / 'new10').num_params():,}" in out and "stored as F32 in 1 file" in out
    # the loss by hand, with each order of the norm
    split = hf.open_split(tmp_path / "data", "val")
    x, y = split.windows(hf.eval_windows(split, 32, 96), 32)
    with torch.no_grad():
        after, before = (hf.load(tmp_path / "new10", k_norm_after_rope=order)(x, y)[1].item() for order in (True, False))
    assert f"{after:.4f} with key norm after RoPE, {before:.4f} before, in nats per token over 96 tokens" in out and abs(after - before) > 1e-3


def test_mistakes_end_in_one_sentence(run, tmp_path):
    for arguments, said in ((["inspect", str(tmp_path / "no" / "such" / "folder")], "there is no folder"), (["inspect", str(run)], "hf.py export"),
                            (["export", str(tmp_path), str(tmp_path / "x")], "no checkpoint"), (["export", str(run), str(tmp_path)], "not empty")):
        with pytest.raises(SystemExit) as caught:
            hf.main(arguments)
        assert said in str(caught.value.code) and "\n" not in str(caught.value.code)
    with pytest.raises(SystemExit) as caught:
        hf.main(["inspect", str(FIXTURES / "vanilla_qknorm"), f"--data_dir={tmp_path / 'empty'}"])
    assert "val*.bin" in str(caught.value.code)


def test_help(capsys):
    with pytest.raises(SystemExit) as caught:
        hf.main(["--help"])
    shown = capsys.readouterr().out
    assert caught.value.code == 0 and "inspect" in shown and "export" in shown


def test_a_hub_id_offline_as_a_command():
    command = [sys.executable, str(ROOT / "hf.py"), "inspect", "some-one/no-such-model"]
    wrong = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert wrong.returncode == 1 and "Traceback" not in wrong.stderr and "some-one/no-such-model" in wrong.stderr.splitlines()[-1]
