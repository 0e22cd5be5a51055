"""Evaluation: the loss of shards, and what lm-eval is told about a model, against one text at a time and against Hugging Face's own adapter."""
import functools
import json
import math
import sys

import pytest
import torch

import checkpoint
import eval as evaluation
from data.shards import TokenSplit, open_split, write_json, write_shard
from data.tokenizer import ByteTokenizer, CharTokenizer, train_bpe
from model import GPT, GPTConfig

MODELS = [dict(), dict(depth="depth_attention", n_kv_head=2), dict(depth="moda", connector="mhc", mhc_sinkhorn_iters=2, n_loop=2), dict(connector="attnres")]
BYTES = ByteTokenizer()
TEXT = "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. The five boxing wizards jump quickly. "


def make_model(block_size=48, **fields):
    """A small model whose random predictions are far from uniform."""
    torch.manual_seed(3)
    return GPT(GPTConfig(**dict(n_layer=2, n_head=4, n_embd=32, block_size=block_size, vocab_size=257, init_std=0.3) | fields)).eval()


def make_harness(model, batch_size=4):
    return evaluation.Harness(model, BYTES, batch_size)


def make_shards(folder, meta=True, n_bytes=None):
    """900 tokens of text in two val shards."""
    ids = BYTES.encode(TEXT * 9)[:900]
    folder.mkdir()
    write_shard(folder / "val_0.bin", ids[:400])
    write_shard(folder / "val_1.bin", ids[400:])
    if meta:
        write_json(folder / "meta.json", {"vocab_size": 257, "tokenizer": {"kind": "bytes"}, "bytes": {"val": n_bytes or 900}})
    return folder


def make_run(folder, model, tokenizer=BYTES, data_dir=""):
    """A checkpoint as train.py leaves it."""
    config = {**vars(model.config), "data_dir": str(data_dir)}
    data = {"vocab_size": model.config.vocab_size, "tokenizer": tokenizer.to_meta(), "bytes": None}
    checkpoint.save(folder / "ckpt_last.pt", {"model": model.state_dict(), "optimizer": {}, "scaler": {}, "step": 7, "best_val_loss": 1.0,
                                              "config": config, "rng": {}, "data": data})
    return folder


def requests(*args):
    """Requests in the only form that the harness reads: objects with `args`."""
    return [type("Request", (), {"args": arg})() for arg in args]


# ----------------------------------------------------------------------------------------------------------------------
# shards

def test_loss_is_the_mean_over_all_tokens_whatever_the_batch_size(tmp_path):
    model, split = make_model(), open_split(make_shards(tmp_path / "data"), "val")
    x, y = split.windows(range(split.n_windows(32)), 32)
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(model.double()(x)[0].flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
    model.float()
    windows = losses.mean(1)
    for batch_size in (1, 2, 5, 64):  # 27 windows: divisible by 1 alone
        result = evaluation.evaluate(model, split, 32, 0, batch_size, bytes_per_token=0.8)
        assert result["windows"] == 27 and result["tokens"] == 27 * 32
        assert result["loss"] == pytest.approx(losses.mean().item(), rel=1e-6)
        assert result["loss_stderr"] == pytest.approx(windows.std().item() / math.sqrt(27), rel=1e-4)
        assert result["perplexity"] == pytest.approx(math.exp(losses.mean()), rel=1e-5)
        assert result["perplexity_stderr"] == pytest.approx(result["perplexity"] * result["loss_stderr"], rel=1e-6)
        assert result["bits_per_byte"] == pytest.approx(losses.mean().item() / math.log(2) / 0.8, rel=1e-6)


def test_loss_is_that_of_training_and_eval_tokens_choose_its_windows(tmp_path):
    model, split = make_model(depth="depth_attention"), open_split(make_shards(tmp_path / "data"), "val")
    x, y = split.windows([0, 13], 32)
    with torch.no_grad():
        assert evaluation.evaluate(model, split, 32, 64)["loss"] == pytest.approx(model(x, y)[1].item(), rel=1e-6)
    one = evaluation.evaluate(model, split, 32, 32)
    assert one["windows"] == 1 and one["loss_stderr"] is None and "bits_per_byte" not in one


def test_standard_error_covers_the_spread_of_samples(tmp_path):
    """The reported error against the spread of the losses of many disjoint parts of one data set."""
    ids = torch.randint(0, 257, (40 * 330,), generator=torch.Generator().manual_seed(5)).tolist()
    model, results = make_model(block_size=16), []
    for part in range(40):
        write_shard(tmp_path / f"val_{part}.bin", ids[330 * part:330 * (part + 1)])
        results.append(evaluation.evaluate(model, TokenSplit([tmp_path / f"val_{part}.bin"]), 16, batch_size=64))
    spread = torch.tensor([r["loss"] for r in results]).std().item()
    claimed = sum(r["loss_stderr"] for r in results) / len(results)
    assert 0.7 < spread / claimed < 1.4


def test_bits_per_byte_counts_the_bytes_of_the_text(tmp_path, capsys):
    """Umlauts are two bytes each, and cut in halves by the tokens; the number comes from meta.json, where prepare counted the text."""
    run = make_run(tmp_path / "run", make_model(), data_dir=make_shards(tmp_path / "data", n_bytes=750))
    evaluation.main([f"--out_dir={run}", "--device=cpu", f"--save={tmp_path / 'result.json'}"])
    saved = json.loads((tmp_path / "result.json").read_text())
    shards = saved["shards"]
    assert saved["step"] == 7 and shards["tokens"] == (399 // 48 + 499 // 48) * 48
    assert shards["bits_per_byte"] == pytest.approx(shards["loss"] / math.log(2) * 900 / 750)
    out = capsys.readouterr().out
    assert f"loss           {shards['loss']:.4f} ± {shards['loss_stderr']:.4f} nats a token" in out
    assert f"bits per byte  {shards['bits_per_byte']:.4f} ± " in out


# ----------------------------------------------------------------------------------------------------------------------
# what lm-eval asks for, without lm-eval

def one_at_a_time(model, context, continuation):
    """Log-probability and greediness of a continuation, from one unpadded forward pass."""
    ids = torch.tensor([(context + continuation)[-model.config.block_size - 1:]])
    with torch.no_grad():
        logp = torch.log_softmax(model(ids[:, :-1])[0][0, -len(continuation):], -1)
    target = ids[0, -len(continuation):]
    return logp.gather(1, target[:, None]).sum().item(), bool((logp.argmax(-1) == target).all())


@pytest.mark.parametrize("fields", MODELS)
def test_loglikelihoods_do_not_depend_on_what_shares_the_batch(fields):
    model, ids = make_model(**fields), BYTES.encode(TEXT)
    greedy = model.generate(torch.tensor([ids[:9]]), 3, temperature=0)[0, 9:].tolist()
    pairs = [(ids[:5], ids[5:9]), (ids[:30], ids[30:31]), (ids[:30], ids[31:32]), (ids[:9], greedy), (ids[:60], ids[60:70]),
             (ids[:1], ids[1:49]), (ids[:7], ids[7:8])]
    wanted = [one_at_a_time(model, *pair) for pair in pairs]
    assert [greedy for _, greedy in wanted] == [False, False, False, True, False, False, False]
    for batch_size in (1, 3, 16):
        found = make_harness(model, batch_size)._loglikelihood_tokens([(None, *pair) for pair in pairs], disable_tqdm=True)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
        torch.testing.assert_close([logp for logp, _ in found], [logp for logp, _ in wanted], rtol=1e-5, atol=1e-4)


def test_requests_that_differ_in_their_last_token_share_a_forward_pass():
    model, calls = make_model(), []
    model.register_forward_pre_hook(lambda module, args: calls.append(tuple(args[0].shape)))
    make_harness(model, 8)._loglikelihood_tokens([(None, [1, 2, 3], [choice]) for choice in (10, 20, 30, 40)] + [(None, [1, 2], [3, 10])], disable_tqdm=True)
    assert calls == [(1, 3)]


def test_empty_contexts_and_empty_or_too_long_continuations():
    model = make_model()
    harness = make_harness(model)
    after_end_of_text = one_at_a_time(model, [256], [5, 6])
    assert harness._loglikelihood_tokens([(None, [], [5, 6])], disable_tqdm=True)[0] == pytest.approx(after_end_of_text)
    harness.codec = CharTokenizer("abc")
    with pytest.raises(ValueError, match="no end-of-text token to put before it"):
        harness._loglikelihood_tokens([(None, [], [1, 2])], disable_tqdm=True)
    assert harness._loglikelihood_tokens([(None, [1, 2], [])], disable_tqdm=True) == [(0.0, True)]
    with pytest.raises(ValueError, match="a continuation of 49 tokens does not fit into the model's context of 48"):
        harness._loglikelihood_tokens([(None, [1], [2] * 49)], disable_tqdm=True)


@pytest.mark.parametrize("fields", MODELS)
def test_generation_in_a_batch_of_several_lengths_is_that_of_each_prompt_alone(fields):
    model, codec = make_model(**fields, block_size=20), BYTES
    prompts = [TEXT[:n] for n in (6, 1, 4, 4, 11)] + [TEXT]  # the last one is cut on the left, so that 7 new tokens fit
    wanted = []
    for prompt in prompts:
        ids = codec.encode(prompt)[-13:]
        wanted.append(codec.decode(model.generate(torch.tensor([ids]), 7, temperature=0, stop_token=codec.eot)[0, len(ids):].tolist()).split("<|endoftext|>")[0])
    for batch_size in (4, 6):
        assert make_harness(model, batch_size).generate_until(requests(*((p, {"until": [], "max_gen_toks": 7}) for p in prompts)), True) == wanted
    assert len(set(wanted)) > 3


def test_generation_ends_at_stop_strings_and_at_the_end_of_text():
    harness = make_harness(make_model())
    text = "abcdef"
    assert harness.finish(list(b"abcdef"), ["x"]) == (text, False)
    assert harness.finish(list(b"abcdef"), ["de", "f", ""]) == ("abc", True)
    assert harness.finish(list(b"ab") + [256] + list(b"cd"), []) == ("ab", True)
    steps = []
    harness.model.register_forward_pre_hook(lambda module, args: steps.append(1))
    whole = harness.generate_until(requests(("Viktor", {"until": [], "max_gen_toks": 20})), True)[0]
    assert len(steps) == 20 and len(whole) > 8
    stop = whole[5]
    steps.clear()
    cut = harness.generate_until(requests(("Viktor", {"until": stop, "max_gen_toks": 20})), True)[0]
    assert cut == whole[:whole.index(stop)] and len(steps) < 20


def test_sampling_wishes():
    harness = make_harness(make_model())
    assert harness.read_wishes({"until": "x", "max_gen_toks": 9}) == (["x"], 9, {"temperature": 0.0, "top_k": None, "top_p": None})
    assert harness.read_wishes({"max_new_tokens": 9, "temperature": 0.7, "top_p": 0.9})[2] == {"temperature": 0.7, "top_k": None, "top_p": 0.9}
    assert harness.read_wishes({"max_gen_toks": 9, "temperature": 0.7, "do_sample": False, "num_beams": 1})[2]["temperature"] == 0.0
    with pytest.raises(ValueError, match="256 new tokens; with the model's context of 48 it can be 1 to 47"):
        harness.read_wishes({})
    for wish in ({"num_beams": 4}, {"repetition_penalty": 1.2}):
        with pytest.raises(ValueError, match=f"{next(iter(wish))}, which this model does not have"):
            harness.read_wishes({"max_gen_toks": 9, **wish})
    asked = ("a", {"max_gen_toks": 20, "temperature": 2.0, "do_sample": True})
    torch.manual_seed(1)
    assert len(set(harness.generate_until(requests(*[asked] * 6), True))) > 1


# ----------------------------------------------------------------------------------------------------------------------
# the command line

def fails(*argv):
    """The sentence with which the script ends."""
    with pytest.raises(SystemExit) as caught:
        evaluation.main([*argv, "--device=cpu"])
    return str(caught.value)


def test_mistakes_end_in_a_sentence(tmp_path, monkeypatch):
    run, data = make_run(tmp_path / "run", make_model()), make_shards(tmp_path / "data")
    out_dir = f"--out_dir={run}"
    assert "no checkpoint" in fails(f"--out_dir={tmp_path / 'nowhere'}")
    assert "nothing to evaluate: give --data_dir" in fails(out_dir)
    assert "--which=new must be best or last" in fails(out_dir, "--which=new")
    assert "--batch_size=0 must be at least 1" in fails(out_dir, "--batch_size=0")
    assert f"there is no folder {tmp_path / 'no'}" in fails(out_dir, f"--data_dir={data}", f"--save={tmp_path / 'no/x.json'}")
    assert "cannot be written" in fails(out_dir, f"--data_dir={data}", f"--save={tmp_path}")
    assert "a context of 64 tokens is longer than block_size=48" in fails(out_dir, f"--data_dir={data}", "--block_size=64")
    assert "--k_norm_after_rope is fixed in the run's checkpoint" in fails(out_dir, f"--data_dir={data}", "--k_norm_after_rope=True")
    assert "expected token shards named train*.bin" in fails(out_dir, f"--data_dir={data}", "--split=train")
    other = make_run(tmp_path / "other", make_model(), CharTokenizer("abc"), data)
    assert "was made with another tokenizer than the model was trained with" in fails(f"--out_dir={other}")
    small = make_run(tmp_path / "small", make_model(vocab_size=64), data_dir=data)
    assert "expected ids below vocab_size=64 as the model says" in fails(f"--out_dir={small}")
    assert "the tokenizer has 257 ids, the model 64" in fails(f"--out_dir={small}", "--tasks=any")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert fails(out_dir, "--tasks=any").endswith("run: pip install lm-eval")


def test_shards_without_bytes_and_a_hugging_face_folder(tmp_path, capsys):
    hf = pytest.importorskip("hf")
    hf.export(make_model(), tmp_path / "hf", BYTES)
    data = make_shards(tmp_path / "data", meta=False)
    evaluation.main([f"--init_from={tmp_path / 'hf'}", f"--data_dir={data}", "--device=cpu", "--block_size=32", f"--save={tmp_path / 'result.json'}"])
    result = json.loads((tmp_path / "result.json").read_text())["shards"]
    assert result["loss"] == evaluation.evaluate(make_model(), open_split(data, "val"), 32)["loss"]
    assert "bits per byte  unknown" in capsys.readouterr().out
    evaluation.main([f"--init_from={tmp_path / 'hf'}", f"--data_dir={data}", "--device=cpu", "--block_size=32", f"--save={tmp_path / 'result.json'}",
                     "--k_norm_after_rope=True"])
    other = json.loads((tmp_path / "result.json").read_text())["shards"]["loss"]
    assert other == evaluation.evaluate(make_model(k_norm_after_rope=True), open_split(data, "val"), 32)["loss"] != result["loss"]


def test_an_exported_run_is_evaluated_on_its_own_data(tmp_path):
    hf = pytest.importorskip("hf")
    bpe, data = train_bpe([TEXT * 3], 300), make_shards(tmp_path / "data")
    write_json(data / "meta.json", {"vocab_size": bpe.n_vocab, "tokenizer": bpe.to_meta()})
    hf.export(make_model(vocab_size=bpe.n_vocab), tmp_path / "hf", bpe)  # with a tokenizer.json, another kind of the same tokenizer
    evaluation.main([f"--init_from={tmp_path / 'hf'}", f"--data_dir={data}", "--device=cpu", "--block_size=32"])
    other = train_bpe([TEXT[::-1] * 3], 300)
    write_json(data / "meta.json", {"vocab_size": bpe.n_vocab, "tokenizer": other.to_meta()})
    assert other.n_vocab == bpe.n_vocab and "another tokenizer" in fails(f"--init_from={tmp_path / 'hf'}", f"--data_dir={data}", "--block_size=32")


# ----------------------------------------------------------------------------------------------------------------------
# lm-eval itself, on local tasks

WORDS = TEXT.split()


def make_tasks(folder):
    """One task of each kind that lm-eval asks a model for, over JSON files in the folder."""
    folder.mkdir()
    questions = [{"question": f"After {a} {b} comes", "choices": [c, a, "wizards", "a"], "answer": i % 4}
                 for i, (a, b, c) in enumerate(zip(WORDS, WORDS[1:], WORDS[2:]))]
    texts = [{"text": (TEXT * 3)[start:start + 37 * (start % 5 + 1)]} for start in range(7)]  # up to four windows of the model

    def task(name, docs, metrics, **fields):
        (folder / f"{name}.json").write_text(json.dumps(docs))
        aggregations = {"word_perplexity": "weighted_perplexity", "byte_perplexity": "weighted_perplexity", "bits_per_byte": "bits_per_byte"}
        (folder / f"{name}.yaml").write_text(json.dumps({  # JSON is YAML
            "task": name, "dataset_path": "json", "test_split": "test",
            "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.json")}, "cache_dir": str(folder / "cache")},
            "metric_list": [{"metric": m, "aggregation": aggregations.get(m, "mean"), "higher_is_better": m not in aggregations} for m in metrics], **fields}))

    task("choice", questions, ("acc", "acc_norm"), output_type="multiple_choice", doc_to_text="{{question}}", doc_to_choice="{{choices}}",
         doc_to_target="answer")
    task("rolling", texts, ("word_perplexity", "byte_perplexity", "bits_per_byte"), output_type="loglikelihood_rolling", doc_to_text="",
         doc_to_target="{{text}}")
    task("generation", questions, ("exact_match",), output_type="generate_until", doc_to_text="{{question}}", doc_to_target="{{choices[answer]}}",
         generation_kwargs={"until": ["e", "\n\n"], "max_gen_toks": 12, "do_sample": False})
    return folder


def test_tasks_through_lm_eval(tmp_path, monkeypatch, capsys):
    """The command line end to end, for a model with no Hugging Face form, against numbers computed here."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    tasks = make_tasks(tmp_path / "tasks")
    model = make_model(**MODELS[2])
    run = make_run(tmp_path / "run", model)
    argv = [f"--out_dir={run}", f"--tasks_path={tasks}", "--device=cpu", f"--save={tmp_path / 'result.json'}"]
    evaluation.main([*argv, "--tasks=choice,gen*", "--limit=6", "--batch_size=3"])
    results = json.loads((tmp_path / "result.json").read_text())["tasks"]["results"]
    right = 0
    for doc in json.loads((tasks / "choice.json").read_text())[:6]:
        encode = BYTES.encode
        scores = [one_at_a_time(model, encode(doc["question"]), encode(" " + choice))[0] for choice in doc["choices"]]
        right += max(range(4), key=scores.__getitem__) == doc["answer"]
    assert results["choice"]["acc,none"] == pytest.approx(right / 6) and 0 <= results["generation"]["exact_match,none"] <= 1
    out = capsys.readouterr().out
    assert f"{right / 6:.4f}" in out and "generation" in out and "rolling" not in out
    manager = functools.partial(sys.modules["lm_eval.tasks"].TaskManager, include_path=tasks)
    monkeypatch.setattr(sys.modules["lm_eval.tasks"], "TaskManager", lambda include_path, include_defaults: manager(include_defaults=False))
    assert "there is no task 'choise' in lm-eval; the nearest names are choice, " in fails(argv[0], "--tasks=choise")


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 4])
def test_lm_eval_gives_the_numbers_of_hugging_faces_adapter(tmp_path, monkeypatch, batch_size):
    """The same weights through our harness and, exported, through transformers and lm-eval's own adapter: every answer, not only the means."""
    pytest.importorskip("accelerate")  # which that adapter needs
    lm_eval = pytest.importorskip("lm_eval")
    import hf
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    codec = train_bpe([TEXT], 300)
    model = make_model(n_kv_head=2, vocab_size=codec.n_vocab)
    hf.export(model, tmp_path / "hf", codec)
    ours = type("LM", (evaluation.Harness, TemplateLM), {})(model, codec, batch_size)
    theirs = HFLM(pretrained=str(tmp_path / "hf"), dtype="float32", device="cpu", batch_size=batch_size)
    tasks = make_tasks(tmp_path / "tasks")
    a, b = (lm_eval.simple_evaluate(model=lm, tasks=["choice", "rolling", "generation"], bootstrap_iters=0, num_fewshot=0,
                                    task_manager=TaskManager(include_path=str(tasks), include_defaults=False)) for lm in (ours, theirs))
    for task in a["results"]:
        numbers = [{name: value for name, value in result["results"][task].items() if isinstance(value, float)} for result in (a, b)]
        print(f"\n{task}: ours {numbers[0]}, lm-eval's adapter on the export {numbers[1]}")
        assert len(numbers[0]) >= 1 and numbers[0] == pytest.approx(numbers[1], rel=1e-5)
        answers = [[sample["resps"] for sample in sorted(result["samples"][task], key=lambda sample: sample["doc_id"])] for result in (a, b)]
        if task == "generation":
            assert answers[0] == answers[1] and len({str(answer) for answer in answers[0]}) > 8
        else:
            torch.testing.assert_close(*answers, rtol=1e-5, atol=1e-4)
