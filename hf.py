"""Hugging Face folders: import, export and a look inside.

    python hf.py inspect FOLDER_OR_ID [--data_dir=DIR]     method, shape, parameters, key norm order and why
    python hf.py export OUT_DIR FOLDER                     a run of train.py as config.json, safetensors and tokenizer.json

Read and written are Qwen3, Llama, and the folders of the Depth-Attention reference (arXiv 2606.05014), which say `model_type:
llama` and choose a method with fields of their own. `key_map` is the one table of names; import, export and the tests go
through it. A folder has to hold exactly the tensors of this model, by name and shape, and no field of config.json may ask for another
computation: an error names the keys or the field otherwise. Fields that are neither read nor listed in ONLY or SCORES are ignored.
"""
import argparse
import dataclasses
import json
import math
import os
import re
import shutil
import sys
from collections import namedtuple
from functools import cached_property

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import checkpoint
from configurator import clean_errors, find, find_device
from data.shards import DataError, check_ids, eval_windows, open_split
from data.tokenizer import ByteTokenizer, BPETokenizer, JSONTokenizer, json_tokenizer_from_file, need, tokenizer_from_meta
from model import GPT, GPTConfig

# The reference's spellings of its baselines, and of depth attention in the older of its two fields.
BASELINES = {"attnres": "attnres", "block_attnres": "attnres", "block-attnres": "attnres", "attention_residual": "attnres",
             "attention-residual": "attnres", "denseformer": "denseformer", "densetransformer": "denseformer", "mhc": "mhc"}
DEPTH_NAMES = ("depth_attention", "depth_softmax")
# Any of these in config.json makes a `llama` folder one of the reference's, where an absent use_qk_norm means true.
REFERENCE_FIELDS = ("use_depth_attention", "baseline_mode", "residual_baseline", "recurrent_model", "scale_embeds", "cross_layer_pattern",
                    "cross_layer_mode", "depth_attention_stride", "depth_softmax_stride", "depth_attention_recent_window",
                    "depth_recent_window", "use_qk_norm")
# Fields that change what a Llama or Qwen3 computes, with the values that mean "as here".
ONLY = {"hidden_act": ("silu", "swish"), "attention_bias": (False, None), "mlp_bias": (False, None), "attention_dropout": (0, None),
        "scale_embeds": (False, None), "no_residual": (False, None), "partial_rotary_factor": (1, None), "quantization_config": (None,),
        # of Granite, Cohere, Gemma, MiniCPM and OLMo, which are Llama's layers and tensors with other factors and limits
        "residual_multiplier": (1, None), "embedding_multiplier": (1, None), "logits_scaling": (1, None), "logit_scale": (1, None),
        "scale_emb": (1, None), "scale_depth": (None,), "dim_model_base": (None,), "final_logit_softcapping": (None,),
        "attn_logit_softcapping": (None,), "clip_qkv": (None,)}
# Fields that set the factor of the attention scores, as functions of head_dim that give the value of 1/sqrt(head_dim).
SCORES = {"attention_multiplier": lambda head_dim: head_dim**-0.5, "query_pre_attn_scalar": lambda head_dim: head_dim}
# Kept by the reference and by old Llama folders, but never used (a norm that forward skips) or derived (rotary frequencies).
DROPPED = re.compile(r"lm_head_layernorm\.weight|.*rotary_emb\.inv_freq")


# ---------------------------------------------------------------------------------------------------------------------
# The table of names

def key_map(config):
    """The names of every parameter that has a Hugging Face name, as a list of (their key, our key, rows).

    Their tensor is our tensor, or those of its rows (a slice of the first dimension) where ours holds several fused. The rows of
    one tensor are listed in ascending order and cover it. For a depth without DenseFormer coefficients the reference stores an
    empty tensor; its rows are an empty slice.
    """
    q, kv, inner = config.n_head * config.head_dim, config.n_kv_head * config.head_dim, config.n_inner
    names = [("model.embed_tokens.weight", "embed.weight", None)]
    for i in range(config.n_layer):
        theirs, ours = f"model.layers.{i}.", f"layers.{i}."
        names += [(theirs + "input_layernorm.weight", ours + "attn_norm.weight", None),
                  (theirs + "self_attn.q_proj.weight", ours + "attn.qkv.weight", slice(0, q)),
                  (theirs + "self_attn.k_proj.weight", ours + "attn.qkv.weight", slice(q, q + kv)),
                  (theirs + "self_attn.v_proj.weight", ours + "attn.qkv.weight", slice(q + kv, q + 2 * kv)),
                  (theirs + "self_attn.o_proj.weight", ours + "attn.out.weight", None),
                  (theirs + "post_attention_layernorm.weight", ours + "mlp_norm.weight", None),
                  (theirs + "mlp.gate_proj.weight", ours + "mlp.gate_up.weight", slice(0, inner)),
                  (theirs + "mlp.up_proj.weight", ours + "mlp.gate_up.weight", slice(inner, 2 * inner)),
                  (theirs + "mlp.down_proj.weight", ours + "mlp.down.weight", None)]
        if config.qk_norm != "none":
            names += [(theirs + f"self_attn.{x}_norm.weight", ours + f"attn.{x}_norm.weight", None) for x in "qk"]
    names += connector_names(config)
    names.append(("model.norm.weight", "norm.weight", None))
    if not config.tie_embeddings:
        names.append(("lm_head.weight", "lm_head.weight", None))
    return names


def connector_names(config):
    """The part of key_map that belongs to the connector."""
    names = []
    if config.connector == "attnres":
        parts = [(i, part) for i in range(config.n_layer) for part in ("attn", "mlp")]  # in the order of our sites
        prefixes = [(f"model.layers.{i}.attnres_{part}_aggregator.", f"connector.sites.{s}.") for s, (i, part) in enumerate(parts)]
        for theirs, ours in prefixes + [("model.attnres_final_aggregator.", "connector.final.")]:
            names += [(theirs + x, ours + x, None) for x in ("pseudo_query", "norm.weight", "recency_bias")]
    elif config.connector == "mhc":
        renamed = {"mhc_input_norm.weight": "norm.weight", "mhc_dynamic_projection.weight": "projection.weight"}
        own = ("pre_logits", "post_logits", "residual_logits", "alpha_pre", "alpha_post", "alpha_res", *renamed)
        for s, (i, part) in enumerate((i, part) for i in range(config.n_layer) for part in ("attn", "mlp")):
            names += [(f"model.layers.{i}.{part}_residual_connector.{x}", f"connector.sites.{s}.{renamed.get(x, x)}", None) for x in own]
        names.append(("model.residual_stream_projector.reduce_logits", "connector.reduce_logits", None))
    elif config.connector == "denseformer":
        start = 0
        for t in range(1, config.n_layer + 1):
            end = start + (t // config.denseformer_dilation + 1 if t % config.denseformer_period == 0 else 0)
            names.append((f"model.densetransformer_dwa.alphas.{t - 1}", "connector.alpha", slice(start, end)))
            start = end
    return names


# ---------------------------------------------------------------------------------------------------------------------
# config.json -> GPTConfig

Reading = namedtuple("Reading", "fields method order_reason")


def read_config(hf, keys, depth=None):
    """What a config.json says, as Reading(GPTConfig's keyword arguments, the method's name, why k_norm stands where it does).

    hf: the parsed config.json; keys: the names of the folder's tensors, which tell whether q and k are normed; depth: the caller's
    own choice of GPTConfig.depth, which settles a contradiction in `hf`. Raises ValueError that names the field and its value
    for what this model does not have.
    """
    refuse_unsupported(hf)
    kind = hf["model_type"]
    fields = shape_fields(hf, kind)
    refuse_other_scores(hf, fields["head_dim"])
    normed = has_qk_norm(hf, kind, keys)
    fields["qk_norm"] = "head" if normed else "none"
    if baseline := selected_baseline(hf):  # the reference then switches depth attention off, whatever its fields say
        method = baseline
        fields.update(baseline_fields(hf, baseline))
    elif wants_depth_attention(hf, depth):
        method = "depth_attention"
        fields.update(depth="depth_attention", depth_stride=max(1, first_int(hf, ("depth_attention_stride", "depth_softmax_stride"), 1)),
                      depth_recent_window=max(0, first_int(hf, ("depth_attention_recent_window", "depth_recent_window"), 0)))
    else:
        method = "qwen3" if kind == "qwen3" else "vanilla_qknorm" if normed else "llama"
    fields["k_norm_after_rope"], reason = norm_order(hf, method, normed)
    return Reading(fields, method, reason)


def refuse_unsupported(hf):
    """Raises ValueError for fields that ask for what this model does not have."""
    if hf.get("model_type") not in ("llama", "qwen3"):
        raise ValueError(f"config.json has model_type {hf.get('model_type')!r}; expected 'qwen3' or 'llama' (the Depth-Attention reference "
                         "says llama too)")
    for field, fine in ONLY.items():
        if field in hf and hf[field] not in fine:
            raise ValueError(f"config.json has {field} {hf[field]!r}; this model supports only {fine[0]!r}")
    for field in ("rope_scaling", "rope_parameters"):
        rope = hf.get(field) or {}
        if not isinstance(rope, dict):
            raise ValueError(f"config.json has {field} {rope!r}; expected an object with fields")
        if rope.get("rope_type", rope.get("type", "default")) != "default" or rope.get("partial_rotary_factor", 1) != 1:
            raise ValueError(f"config.json has {field} {hf[field]!r}; this model rotates whole heads by plain positions, without scaling")
    kinds = hf.get("layer_types") or []
    if not isinstance(kinds, list):
        raise ValueError(f"config.json has layer_types {kinds!r}; expected a list with the kind of each layer")
    if other := sorted(set(map(str, kinds)) - {"full_attention"}):
        raise ValueError(f"config.json has layer_types {', '.join(other)}; this model supports only full_attention")
    used = hf.get("sliding_window") is not None and hf.get("use_sliding_window", True)
    if used and number(hf, "max_window_layers", 0) < number(hf, "num_hidden_layers", 0):  # layers below max_window_layers see everything
        raise ValueError(f"config.json has sliding_window {hf['sliding_window']!r} in use; this model attends to its whole context")


def refuse_other_scores(hf, head_dim):
    """Raises ValueError for a factor of the attention scores that is not 1/sqrt(head_dim)."""
    for field, ours in SCORES.items():
        if hf.get(field) is not None and head_dim > 0 and not math.isclose(number(hf, field, 0.0), ours(head_dim), rel_tol=1e-6):
            raise ValueError(f"config.json has {field} {hf[field]!r}; this model scales the scores of its heads of {head_dim} by 1/sqrt({head_dim}) "
                             f"only, which is {ours(head_dim):.6g} there")


def shape_fields(hf, kind):
    """The fields that all methods share. For an absent optional field, the default of transformers for that model type."""
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    if absent := [x for x in required if type(hf.get(x)) is not int]:
        raise ValueError(f"config.json has no whole number for {', '.join(absent)}")
    if small := [x for x in required if hf[x] < 1]:
        raise ValueError(f"config.json has {small[0]} {hf[small[0]]!r}; it must be at least 1")
    width, heads, qwen = hf["hidden_size"], hf["num_attention_heads"], kind == "qwen3"
    thetas = {number(x, "rope_theta", 10000.0) for x in (hf, hf.get("rope_parameters") or {}) if "rope_theta" in x}
    if len(thetas) > 1:
        raise ValueError(f"config.json has rope_theta {hf['rope_theta']!r} and another one in rope_parameters {hf['rope_parameters']!r}")
    return dict(
        n_layer=hf["num_hidden_layers"], n_head=heads, n_kv_head=number(hf, "num_key_value_heads", heads), n_embd=width,
        head_dim=number(hf, "head_dim", 128 if qwen else width // heads), n_inner=hf["intermediate_size"],
        block_size=number(hf, "max_position_embeddings", 32768 if qwen else 2048), vocab_size=hf["vocab_size"],
        rope_theta=thetas.pop() if thetas else 10000.0, norm_eps=number(hf, "rms_norm_eps", 1e-6),
        init_std=number(hf, "initializer_range", 0.02), tie_embeddings=bool(hf.get("tie_word_embeddings", False)))


def number(hf, name, default):
    """A field as a number of the default's type; the default if it is absent or null."""
    value = hf.get(name)
    if value is None:
        return default
    try:
        return type(default)(value)
    except (TypeError, ValueError, OverflowError):  # the last for Infinity, which Python's JSON knows
        raise ValueError(f"config.json has {name} {value!r}; expected a number") from None


def has_qk_norm(hf, kind, keys):
    """Whether the tensors include query and key norms; ValueError where the config says otherwise."""
    found = any(key.endswith((".q_norm.weight", ".k_norm.weight")) for key in keys)
    marks = [x for x in REFERENCE_FIELDS if x in hf] + [x for x in keys if x == "lm_head_layernorm.weight"]
    if kind == "qwen3":
        wanted, why = True, "model_type 'qwen3'"
    elif hf.get("use_qk_norm") is not None:
        wanted, why = bool(hf["use_qk_norm"]), f"use_qk_norm {hf['use_qk_norm']!r}"
    elif marks:
        wanted, why = True, f"no use_qk_norm, which beside the reference's {marks[0]} means true"
    else:  # a stock Llama has neither the field nor the tensors; a reference folder may lack every field and have the tensors
        return found
    if wanted != found:
        raise ValueError(f"config.json has {why}, but the weights have {'' if found else 'no '}query and key norms "
                         "(self_attn.q_norm.weight, self_attn.k_norm.weight)")
    return found


def selected_baseline(hf):
    """The connector that baseline_mode, or its older name residual_baseline, selects; None without one."""
    chosen = {}
    for field in ("baseline_mode", "residual_baseline"):
        value = str(hf.get(field) or "none").strip().lower()
        if value not in ("none", "null", ""):
            if value not in BASELINES:
                raise ValueError(f"config.json has {field} {hf[field]!r}; expected one of {', '.join(BASELINES)}")
            chosen[field] = BASELINES[value]
    if len(set(chosen.values())) > 1:
        raise ValueError(f"config.json has baseline_mode {hf['baseline_mode']!r} and residual_baseline {hf['residual_baseline']!r}; "
                         "expected the same or one of them")
    return next(iter(chosen.values()), None)


def baseline_fields(hf, baseline):
    """A connector's options, with the reference's fallbacks: an unreadable number counts as absent, one below 1 as 1."""
    def positive(default, *names):
        value = next((hf[x] for x in names if hf.get(x) not in (None, "")), default)
        try:
            return max(1, int(value))
        except (TypeError, ValueError, OverflowError):
            return default
    if baseline == "attnres":
        return dict(connector="attnres", attnres_sources="snapshots", attnres_block_size=positive(12, "attnres_block_size"),
                    attnres_recency_bias_init=number(hf, "attnres_recency_bias_init", 3.0))
    if baseline == "denseformer":
        return dict(connector="denseformer",
                    denseformer_dilation=positive(1, "denseformer_dwa_dilation", "densetransformer_dwa_dilation"),
                    denseformer_period=positive(1, "denseformer_dwa_period", "densetransformer_dwa_period"))
    return dict(connector="mhc", mhc_num_streams=positive(4, "residual_baseline_num_streams", "mhc_num_streams"),
                mhc_sinkhorn_iters=positive(20, "mhc_sinkhorn_iters"), mhc_alpha_init=number(hf, "mhc_alpha_init", 0.01))


def wants_depth_attention(hf, depth):
    """Whether the folder mixes values across depth: use_depth_attention, or one of the two fields that used to say so."""
    pattern = hf.get("cross_layer_pattern")
    said = [x for x in ("cross_layer_pattern", "cross_layer_mode") if hf.get(x) in DEPTH_NAMES]
    said = ["use_depth_attention"] * bool(hf.get("use_depth_attention")) + said
    if depth is not None:
        return depth == "depth_attention" and bool(said)
    if not said and pattern not in (None, "", "none"):
        raise ValueError(f"config.json has cross_layer_pattern {pattern!r}; this model supports only {' and '.join(DEPTH_NAMES)}")
    if said and hf.get("recurrent_model") is False:
        raise ValueError(f"config.json has {said[0]} {hf[said[0]]!r} and recurrent_model False, with which early versions of the reference "
                         "mix nothing and later ones do; say which with depth='none' or depth='depth_attention'")
    return bool(said)


def first_int(hf, names, default):
    """The first of these fields that is there. The reference fails at a null, so it is refused."""
    name = next((x for x in names if x in hf), None)
    try:
        return default if name is None else int(hf[name])
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"config.json has {name} {hf[name]!r}; expected a whole number") from None


def norm_order(hf, method, normed):
    """(k_norm_after_rope, why). The tensors cannot tell: they are the same for both orders."""
    if not normed:
        return False, "there are no query and key norms"
    if hf.get("k_norm_after_rope") is not None:
        return bool(hf["k_norm_after_rope"]), "config.json records it as k_norm_after_rope"
    if method == "qwen3":
        return False, "Qwen3 norms keys before it rotates them"
    if method in ("depth_attention", "vanilla_qknorm"):
        return True, "the reference trains this method with its sdpa attention class, which rotates keys before it norms them"
    return False, "the reference's recipe trains this baseline with its FlashAttention class, which norms keys before it rotates them"


# ---------------------------------------------------------------------------------------------------------------------
# Import

class Folder:
    """A Hugging Face checkpoint in a local folder or on the Hub.

    Attributes: name; config, its config.json; where, a dict from each tensor's name to the safetensors file that holds it. Files of
    a Hub repository are downloaded into huggingface_hub's cache when they are first needed. Raises ValueError for a folder that
    does not exist or cannot be read, and for a repository that cannot be reached.
    """
    def __init__(self, path_or_repo_id):
        self.name = os.fspath(path_or_repo_id)
        self.files = set(os.listdir(self.name)) if os.path.isdir(self.name) else None  # None: on the Hub
        if self.files is None and not re.fullmatch(r"\w[\w.-]*/[\w.-]+", self.name):
            raise ValueError(f"there is no folder {self.name!r}; expected one with a config.json, or the id of a Hugging Face "
                             "repository (owner/name)")
        path = self.find("config.json")
        if path is None:
            run = any(name.startswith("ckpt_") for name in self.files or ())
            raise ValueError(f"{self.name} has no config.json" + ("; it is a run of train.py, which hf.py export turns into one" if run else ""))
        self.config = read_json(path)

    @cached_property
    def where(self):
        where = {}
        for shard in self.shards():
            with open_shard(shard) as file:
                where.update((key, shard) for key in file.keys())
        return where

    def find(self, name):
        """The path of one of the files, downloaded if need be; None if there is no such file."""
        if self.files is not None:
            return os.path.join(self.name, name) if name in self.files else None
        try:
            from huggingface_hub import hf_hub_download
            from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
        except ImportError:
            raise ValueError(f"there is no folder {self.name!r}, and the Hub needs huggingface_hub: pip install huggingface_hub") from None
        try:
            return hf_hub_download(self.name, name)
        except Exception as error:  # the client's own errors, its HTTP library's and OSErrors; a user needs one sentence
            if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
                return None
            cause = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise ValueError(f"there is no folder {self.name!r}, and it could not be fetched from the Hugging Face Hub ({cause}); check the "
                             "name and the network, or give a local folder") from None

    def shards(self):
        """The paths of the safetensors files."""
        index = self.find("model.safetensors.index.json")
        weight_map = read_json(index).get("weight_map") if index else {"": "model.safetensors"}
        names = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
        if not names:
            raise ValueError(f"{index} has no weight_map that names the files; fetch it again")
        paths = [self.find(name) for name in names]
        if None in paths:
            pickled = any(name.endswith(".bin") for name in self.files or ())
            raise ValueError(f"{self.name} has no {names[paths.index(None)]}"
                             + ("; its .bin files are pickles, which are not read: save it as safetensors" if pickled else ""))
        return paths

    def tensor(self, key):
        """One tensor. Its file is opened for it alone, since the pages of a mapping count as the process's memory until it is closed."""
        with open_shard(self.where[key]) as file:
            return file.get_tensor(key)

    def stored(self, key):
        """(shape as a list, dtype as safetensors names it: F32, BF16, I64) of a tensor, whose numbers stay on disk."""
        with open_shard(self.where[key]) as file:
            part = file.get_slice(key)
            return part.get_shape(), part.get_dtype()


def read_json(path):
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); fetch it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}; expected an object with fields")
    return value


def open_shard(path):
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}); fetch it again") from None


def load(path_or_repo_id, dtype="float32", device="cpu", **overrides):
    """A GPT with the weights of a Hugging Face folder, in eval mode.

    path_or_repo_id: a local folder, or owner/name on the Hub; dtype: of the parameters, as a torch.dtype or its name, 'auto' = as
    stored; device: where they go; overrides: fields of GPTConfig, in particular k_norm_after_rope (see norm_order).
    Tensors are read one at a time into the model's parameters, so the memory needed is the model's and one tensor's.
    Raises ValueError that names the fields, keys or shapes that do not fit.
    """
    folder = Folder(path_or_repo_id)
    config = folder_config(folder, **overrides)
    model = skeleton(config)
    check_tensors(folder, model)
    model = allocated(model, torch_dtype(folder, dtype), device)
    state = model.state_dict()
    for key, ours, rows in key_map(config):
        (state[ours] if rows is None else state[ours][rows]).copy_(folder.tensor(key))
    repeated = config.tie_embeddings and "lm_head.weight" in folder.where  # some writers store the tied matrix twice
    if repeated and not torch.equal(folder.tensor("lm_head.weight"), folder.tensor("model.embed_tokens.weight")):
        raise ValueError(f"{folder.name}: config.json has tie_word_embeddings true, but lm_head.weight differs from model.embed_tokens.weight")
    return model.eval()


def open_model(c, device, **overrides):
    """
    (GPT in eval mode, tokenizer or None, the run's checkpoint or {}) for the options init_from, out_dir and which. `overrides` replace fields of a
    Hugging Face folder's GPTConfig. Raises ValueError.
    """
    if c.init_from:
        path = Folder(c.init_from).find("tokenizer.json")
        return load(c.init_from, device=device, **overrides), path and json_tokenizer_from_file(path), {}
    if overrides:
        raise ValueError(f"--{next(iter(overrides))} is fixed in the run's checkpoint; it can be given with --init_from only.")
    model, saved = checkpoint.load_run(c.out_dir, c.which, device)
    meta = saved["data"].get("tokenizer")
    return model, tokenizer_from_meta(meta) if meta else None, saved


def folder_config(folder, **overrides):
    """The GPTConfig of a folder, with some fields replaced."""
    known = [field.name for field in dataclasses.fields(GPTConfig)]
    if unknown := [name for name in overrides if name not in known]:
        raise ValueError(f"{unknown[0]!r} is not a field of GPTConfig; expected one of {', '.join(known)}")
    try:
        refuse_unsupported(folder.config)  # before its tensors are looked at, which may mean to download them
        return GPTConfig(**{**read_config(folder.config, folder.where, overrides.get("depth")).fields, **overrides})
    except ValueError as error:
        raise ValueError(f"{folder.name}: {error}") from None


def check_tensors(folder, model):
    """Raises ValueError unless the folder has every tensor that the model (a skeleton will do) needs, in its shape, and no other."""
    config, names = model.config, key_map(model.config)
    if nameless := sorted(model.state_dict().keys() - {ours for _, ours, _ in names}):
        raise ValueError(f"{folder.name}: no Hugging Face folder holds {nameless[0]}, which the overrides ask for")
    wanted = {key for key, _, _ in names}
    found = {key for key in folder.where if not DROPPED.fullmatch(key)} - ({"lm_head.weight"} if config.tie_embeddings else set())
    for what, keys in (("lacks", wanted - found), ("has the unexpected", found - wanted)):
        if keys:
            more = f" and {len(keys) - 8} more" if len(keys) > 8 else ""
            raise ValueError(f"{folder.name} {what} tensors {', '.join(sorted(keys)[:8])}{more} for the model that its config.json describes")
    state = model.state_dict()
    for key, ours, rows in names:
        (shape, dtype), expected = folder.stored(key), list((state[ours] if rows is None else state[ours][rows]).shape)
        if shape != expected or not dtype.startswith(("F", "BF")):
            raise ValueError(f"{folder.name}: {key} is {dtype} of shape {shape}; its config.json asks for floating-point numbers of shape {expected}")


def torch_dtype(folder, name):
    """The torch.dtype of that name; for 'auto' the one in which the folder stores its embedding."""
    if name == "auto":
        return folder.tensor("model.embed_tokens.weight").dtype
    dtype = name if isinstance(name, torch.dtype) else getattr(torch, str(name), None)
    if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype is {name!r}; expected auto, float32, bfloat16, float16 or float64")
    return dtype


def skeleton(config):
    """A GPT without memory for its parameters; to initialise a large one takes longer than to read it."""
    with torch.device("meta"):
        return GPT(config)


def allocated(model, dtype, device):
    """A skeleton with memory for its parameters, not initialised."""
    config, model = model.config, model.to(dtype).to_empty(device=device)
    # The rotary tables are derived, and stay float32: they are those of the smallest model with the same heads and context.
    donor = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=1, n_inner=1, vocab_size=1, head_dim=config.head_dim, block_size=config.block_size,
                          rope_theta=config.rope_theta))
    for name, table in donor.named_buffers():
        setattr(model, name, table.to(device))
    return model


# ---------------------------------------------------------------------------------------------------------------------
# Export

def export(model_or_checkpoint, folder, tokenizer=None, dtype=None, max_shard_bytes=4 * 2**30):
    """Write a model as a Hugging Face folder: config.json, model.safetensors (several above max_shard_bytes), tokenizer.json.

    model_or_checkpoint: a GPT, or a checkpoint as checkpoint.load returns it; tokenizer: one of data/tokenizer.py, by default the
    checkpoint's; dtype: of the tensors, None = as they are, so that load gives back the same bits.
    A vanilla model becomes a Qwen3 or a Llama, which transformers runs; the others have the reference's fields and keys.
    Returns the sentences that a user should read. Raises ValueError for a model that has no Hugging Face form.
    """
    if isinstance(model_or_checkpoint, GPT):
        config, state = model_or_checkpoint.config, model_or_checkpoint.state_dict()
    else:
        config, state = checkpoint.model_config(model_or_checkpoint), model_or_checkpoint["model"]
        meta = model_or_checkpoint["data"].get("tokenizer")
        tokenizer = tokenizer or (tokenizer_from_meta(meta) if meta else None)
    state, form, names = checkpoint.strip_prefixes(state), hf_form(config), key_map(config)
    if nameless := sorted(state.keys() - {ours for _, ours, _ in names}):
        raise ValueError(f"a model with the parameter {nameless[0]} has no Hugging Face form")
    os.makedirs(folder, exist_ok=True)
    if os.listdir(folder):
        raise ValueError(f"{folder} is not empty; export into a new folder")
    main_dtype, eot = dtype or state["embed.weight"].dtype, tokenizer.eot if tokenizer else None
    write_json(folder, "config.json", {**config_to_hf(config, form), "torch_dtype": str(main_dtype).removeprefix("torch."),
                                       "pad_token_id": None, "bos_token_id": eot, "eos_token_id": eot})
    tensors = {key: state[ours] if rows is None else state[ours][rows] for key, ours, rows in names}
    if form == "reference":  # its class has this norm, which nothing trains or uses
        tensors["lm_head_layernorm.weight"] = torch.ones(config.n_embd, dtype=state["norm.weight"].dtype)
    write_shards(tensors, dtype, folder, max_shard_bytes)
    return norm_order_note(config, form) + write_tokenizer(tokenizer, config, folder)


def hf_form(config):
    """'qwen3', 'llama' or 'reference': the form that computes what this model does. ValueError if there is none."""
    for field, has_none in (("depth", config.depth == "moda"), ("n_loop", config.n_loop > 1), ("norm_order", config.norm_order != "pre"),
                            ("qk_norm", config.qk_norm == "full"), ("connector", config.connector not in ("residual", *BASELINES)),
                            ("attnres_sources", config.connector == "attnres" and config.attnres_sources != "snapshots")):
        if has_none:
            raise ValueError(f"a model with {field}={getattr(config, field)} has no Hugging Face form")
    if config.connector != "residual" and config.depth != "none":
        raise ValueError(f"a model with both connector={config.connector} and depth={config.depth} has no Hugging Face form")
    if config.connector != "residual" or config.depth != "none":
        return "reference"
    if config.qk_norm == "none":
        return "llama"
    return "reference" if config.k_norm_after_rope else "qwen3"


def config_to_hf(config, form):
    """The config.json of a model in that form: what read_config reads, except for dtype and special ids."""
    hf = dict(architectures=["Qwen3ForCausalLM" if form == "qwen3" else "LlamaForCausalLM"], model_type="qwen3" if form == "qwen3" else "llama",
              vocab_size=config.vocab_size, hidden_size=config.n_embd, head_dim=config.head_dim, intermediate_size=config.n_inner,
              num_hidden_layers=config.n_layer, num_attention_heads=config.n_head, num_key_value_heads=config.n_kv_head, hidden_act="silu",
              max_position_embeddings=config.block_size, rope_theta=config.rope_theta, rms_norm_eps=config.norm_eps,
              initializer_range=config.init_std, tie_word_embeddings=config.tie_embeddings, attention_bias=False, attention_dropout=0.0,
              use_cache=True)
    if form != "qwen3":
        hf.update(mlp_bias=False, pretraining_tp=1)
    if form == "reference":
        hf.update(use_qk_norm=config.qk_norm == "head", scale_embeds=False)
        if config.qk_norm == "head":
            hf.update(k_norm_after_rope=config.k_norm_after_rope)  # a field of ours: the reference's classes differ in this, its files do not
        if config.connector == "residual":  # early versions of the reference want recurrent_model as well
            deep = config.depth == "depth_attention"
            hf.update(use_depth_attention=deep, recurrent_model=deep)
            if deep:
                hf.update(depth_attention_stride=config.depth_stride, depth_attention_recent_window=config.depth_recent_window)
        else:
            hf.update(baseline_mode=config.connector)
        if config.connector == "attnres":
            hf.update(attnres_block_size=config.attnres_block_size, attnres_recency_bias_init=config.attnres_recency_bias_init)
        if config.connector == "denseformer":
            hf.update(denseformer_dwa_dilation=config.denseformer_dilation, denseformer_dwa_period=config.denseformer_period)
        if config.connector == "mhc":
            hf.update(residual_baseline_num_streams=config.mhc_num_streams, mhc_sinkhorn_iters=config.mhc_sinkhorn_iters,
                      mhc_alpha_init=config.mhc_alpha_init)
    return hf


def norm_order_note(config, form):
    """What to say about the attention class that the reference has to be run with, as a list of sentences."""
    if form != "reference" or config.qk_norm != "head" or (config.k_norm_after_rope and config.connector == "residual"):
        return []
    if config.k_norm_after_rope:
        return ["this model norms keys after RoPE: run it in the reference with attn_implementation='sdpa', not 'flash_attention_2'"]
    if config.connector != "residual":
        return ["this model norms keys before RoPE: run it in the reference with attn_implementation='flash_attention_2', since its "
                "default, sdpa, norms them after"]
    return ["this model norms keys before RoPE, which the reference cannot do with depth attention: its own code computes another function "
            "from this folder (train with k_norm_after_rope=True to avoid that); the import here reads the order from config.json"]


def write_json(folder, name, value):
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")


def write_shards(tensors, dtype, folder, max_shard_bytes):
    """Write the tensors (dict from name to tensor, converted to dtype if one is given) to as few files as hold max_shard_bytes each."""
    shards, size, total = [[]], 0, 0
    for key, tensor in tensors.items():
        n_bytes = tensor.numel() * (dtype or tensor.dtype).itemsize
        if shards[-1] and size + n_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(key)
        size, total = size + n_bytes, total + n_bytes
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)] if len(shards) > 1 else ["model.safetensors"]
    for name, keys in zip(names, shards, strict=True):
        part = {key: tensors[key].detach().to("cpu", dtype or tensors[key].dtype).contiguous() for key in keys}
        save_file(part, os.path.join(folder, name), metadata={"format": "pt"})
        shutil.copymode(os.path.join(folder, "config.json"), os.path.join(folder, name))  # save_file's own mode hides it from others
    if len(shards) > 1:
        where = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
        write_json(folder, "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})


def write_tokenizer(tokenizer, config, folder):
    """Write tokenizer.json, where the tokenizer can have one, for transformers.AutoTokenizer. Returns sentences for the user."""
    if tokenizer is None:
        return ["no tokenizer.json was written: the model comes without a tokenizer"]
    try:
        text, name = tokenizer_json(tokenizer)
    except DataError as error:
        return [f"no tokenizer.json was written: {error}"]
    with open(os.path.join(folder, "tokenizer.json"), "w", encoding="utf-8") as file:
        file.write(text)
    write_json(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": name,
                                                 "model_max_length": config.block_size, "clean_up_tokenization_spaces": False})
    return []


def tokenizer_json(tokenizer):
    """(content of a tokenizer.json that gives the same ids, name of its end of text or None). DataError for kinds without one."""
    if isinstance(tokenizer, JSONTokenizer):
        return tokenizer.text, None if tokenizer.eot is None else tokenizer.tokenizer.id_to_token(tokenizer.eot)
    if isinstance(tokenizer, ByteTokenizer):
        pattern, tokens, special = None, [bytes([i]) for i in range(256)], {"<|endoftext|>": tokenizer.eot}
    elif isinstance(tokenizer, BPETokenizer):
        pattern, tokens, special = tokenizer.pattern, tokenizer.tokens, tokenizer.special
    else:
        raise DataError(f"a tokenizer of kind {tokenizer.to_meta()['kind']} has no such form")
    hf = need("tokenizers", "A tokenizer.json file")
    ranks = {token: i for i, token in enumerate(tokens) if token is not None}
    # tiktoken merges any two neighbours whose union is a token, lowest id first; listing every split of every token says the same
    splits = [(token[:i], token[i:]) for token in ranks for i in range(1, len(token))]
    merges = [(byte_name(left), byte_name(right)) for left, right in splits if left in ranks and right in ranks]
    vocab = {byte_name(token): i for token, i in ranks.items()}
    # special ids are in the vocabulary too, or they would be numbered anew
    made = hf.Tokenizer(hf.models.BPE(vocab={**vocab, **special}, merges=merges, ignore_merges=True))
    split = [hf.pre_tokenizers.Split(hf.Regex(pattern), behavior="isolated")] if pattern else []
    made.pre_tokenizer = hf.pre_tokenizers.Sequence(split + [hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder = hf.decoders.ByteLevel()
    made.add_special_tokens(list(special))
    return made.to_str(), next((name for name, i in special.items() if i == tokenizer.eot), None)


# The alphabet of byte-level tokenizer.json files: printable Latin-1 characters stand for themselves, the other bytes for U+0100 and up.
BYTE_NAMES = {i: chr(i) for i in (*range(33, 127), *range(161, 173), *range(174, 256))}
BYTE_NAMES.update({i: chr(256 + n) for n, i in enumerate(i for i in range(256) if i not in BYTE_NAMES)})


def byte_name(token):
    return "".join(BYTE_NAMES[i] for i in token)


# ---------------------------------------------------------------------------------------------------------------------
# Command line

def inspect(path_or_repo_id, data_dir=None, eval_tokens=65536, device="", dtype="float32"):
    """Prints what a folder holds; with data_dir (token shards) also its loss there under both orders of key norm and RoPE."""
    folder = Folder(path_or_repo_id)
    config = folder_config(folder)
    model = skeleton(config)
    check_tensors(folder, model)
    reading = read_config(folder.config, folder.where)
    options = {"depth_attention": ("depth_stride", "depth_recent_window"), "attnres": ("attnres_block_size",),
               "denseformer": ("denseformer_dilation", "denseformer_period"), "mhc": ("mhc_num_streams", "mhc_sinkhorn_iters")}
    options = ", ".join(f"{name}={getattr(config, name)}" for name in options.get(reading.method, ()))
    order = "none" if config.qk_norm == "none" else "after RoPE" if config.k_norm_after_rope else "before RoPE"
    files = sorted(set(folder.where.values()))
    print(folder.name)
    print(f"method      {reading.method}{f' ({options})' if options else ''}")
    print(f"shape       {config.n_layer} layers of width {config.n_embd}, {config.n_head} query and {config.n_kv_head} key/value heads of "
          f"{config.head_dim}, SwiGLU {config.n_inner}, vocabulary {config.vocab_size}{' (tied)' if config.tie_embeddings else ''}, "
          f"context {config.block_size}")
    print(f"parameters  {model.num_params():,}, stored as {folder.stored(next(iter(folder.where)))[1]} in {len(files)} file{'s' * (len(files) > 1)} "
          f"of {sum(map(os.path.getsize, files)):,} bytes")
    print(f"key norm    {order}: {reading.order_reason}")
    if data_dir:
        losses, n_tokens = both_losses(folder.name, find(data_dir), eval_tokens, find_device(device), dtype)
        print(f"loss        {losses[True]:.4f} with key norm after RoPE, {losses[False]:.4f} before, in nats per token over "
              f"{n_tokens:,} tokens of {data_dir}; the lower is likely what it was trained with")


def both_losses(name, data_dir, eval_tokens, device, dtype):
    """({k_norm_after_rope: mean loss in nats per token}, number of tokens) over fixed windows of the val shards."""
    model = load(name, dtype, device)
    split, block = open_split(data_dir, "val"), min(model.config.block_size, 1024)
    indices = eval_windows(split, block, eval_tokens)
    total = {True: 0.0, False: 0.0}
    for start in range(0, len(indices), 4):
        x, y = split.windows(indices[start:start + 4], block)
        check_ids(x, model.config.vocab_size, data_dir, f"{name}'s config.json")
        check_ids(y, model.config.vocab_size, data_dir, f"{name}'s config.json")
        for after in total:
            for layer in model.layers:
                layer.attn.k_norm_after_rope = after
            with torch.no_grad():
                total[after] += model(x.to(device), y.to(device))[1].item() * len(x)
    return {after: value / len(indices) for after, value in total.items()}, len(indices) * block


def main(argv):
    parser = argparse.ArgumentParser(prog="hf.py", description="Hugging Face folders: look at one, or write a run as one.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    look = commands.add_parser("inspect", help="method, shape, parameters, key norm order and why", allow_abbrev=False)
    look.add_argument("folder", metavar="FOLDER_OR_ID", help="a folder with config.json and safetensors, or owner/name on the Hub")
    look.add_argument("--data_dir", help="folder of token shards: also report the loss there under both orders of key norm and RoPE")
    look.add_argument("--eval_tokens", type=int, default=65536, help="how many tokens of its val shards that takes (%(default)s)")
    look.add_argument("--device", default="", help="cpu, cuda, ...; by default the best there is")
    look.add_argument("--dtype", default="float32", help="of the parameters while the loss is computed (%(default)s)")
    write = commands.add_parser("export", help="write a run as a Hugging Face folder", allow_abbrev=False)
    write.add_argument("out_dir", metavar="OUT_DIR", help="a run of train.py, or one of its .pt files")
    write.add_argument("folder", metavar="FOLDER", help="the folder to write; new or empty")
    write.add_argument("--which", choices=("best", "last"), default="best",
                       help="which checkpoint of the run (%(default)s; last where there is no best)")
    write.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the tensors written; by default as they are")
    args = parser.parse_args(argv)
    with clean_errors():
        if args.command == "inspect":
            return inspect(args.folder, args.data_dir, args.eval_tokens, args.device, args.dtype)
        path = args.out_dir
        if not path.endswith(".pt"):
            best = os.path.join(path, "ckpt_best.pt")
            path = best if args.which == "best" and os.path.exists(best) else os.path.join(path, "ckpt_last.pt")
        for note in export(checkpoint.load(path), args.folder, dtype=getattr(torch, args.dtype) if args.dtype else None):
            print(f"note: {note}", file=sys.stderr)
        print(f"{path} is now the Hugging Face folder {args.folder}")


if __name__ == "__main__":
    main(sys.argv[1:])
