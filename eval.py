"""
Evaluation of a run or of a Hugging Face folder, on token shards and on the tasks of lm-eval:

    python eval.py --out_dir=out                                             # loss, perplexity, bits per byte on the run's own val shards
    python eval.py --init_from=FOLDER_OR_ID --data_dir=data/fineweb10b
    python eval.py --out_dir=out --tasks=lambada_openai,arc_easy             # pip install lm-eval
    python eval.py --out_dir=out --tasks=my_task --tasks_path=FOLDER         # task files (YAML) of your own

One process on one device. The results do not depend on the batch size: windows of shards have one length, and where texts of several
lengths share a batch, nothing that fills it up can be seen by a token that counts.
"""
import contextlib
import difflib
import fnmatch
import functools
import json
import math
import os

import torch
import torch.nn.functional as F
from tqdm import tqdm

import configurator
from data import shards
from data.tokenizer import same_ids, tokenizer_from_meta
from hf import open_model
from model import KVCache, sample

# ----------------------------------------------------------------------------------------------------------------------
# model
out_dir = "out"  # folder of the run (relative to the working directory)
which = "best"  # its checkpoint: best or last
init_from = ""  # a Hugging Face folder or Hub id instead
k_norm_after_rope = False  # whether that one norms keys after RoPE; not given = what hf.py inspect says
# shards
data_dir = ""  # folder of shards; empty = the run's own or, with --tasks, none
split = "val"  # which of its shards: val or train
block_size = 0  # tokens in a window; 0 = the model's context
eval_tokens = 0  # tokens to evaluate, spread evenly over the shards; 0 = all
# tasks
tasks = ""  # lm-eval's names of tasks, groups and tags, separated by commas; * and ? match anything
tasks_path = ""  # folder with task files (YAML) of your own
num_fewshot = -1  # solved examples before each question; -1 = as the task says
limit = 0  # examples a task; 0 = all
max_gen_toks = 0  # most tokens of an answer in tasks that generate text; 0 = as the task says
# machine
batch_size = 8  # sequences at a time; matters for speed and memory only
device = ""  # cpu, cuda, cuda:1, mps; empty = the best there is
dtype = ""  # float32 or bfloat16 of the matmuls; empty = bfloat16 on GPUs that have it, float32 elsewhere
save = ""  # JSON file to write the results to as well
# ----------------------------------------------------------------------------------------------------------------------


FULL_PRECISION = contextlib.nullcontext()  # where the other functions take an autocast context


# ----------------------------------------------------------------------------------------------------------------------
# shards

def token_losses(model, x, y):
    """Losses [B,T] in nats, float32, of the targets y [B,T] given the inputs x [B,T]. Only one row's logits at a time are float32."""
    logits = model(x)[0]
    return torch.stack([F.cross_entropy(row.float(), target, reduction="none") for row, target in zip(logits, y)])


@torch.no_grad()
def evaluate(model, split, block_size, eval_tokens=0, batch_size=8, bytes_per_token=None, autocast=FULL_PRECISION):
    """
    Loss of a model in eval mode on fixed windows of a TokenSplit, the same windows as those of training's evaluations.

    Returns a dict: windows, tokens; loss (nats a token, the mean over all tokens), perplexity and, given bytes_per_token (bytes of text
    a token of the split), bits_per_byte; each of the three with its _stderr, which takes windows to be independent samples: the standard
    deviation of their losses over the root of their number (None for one window), carried over to first order.
    """
    windows = shards.eval_windows(split, block_size, eval_tokens)
    losses = torch.empty(len(windows), dtype=torch.float64)
    for first in tqdm(range(0, len(windows), batch_size), "loss", unit="batch", disable=None):  # None: no bar where stderr is no terminal
        x, y = (part.to(model.cos.device) for part in split.windows(windows[first:first + batch_size], block_size))
        with autocast:
            losses[first:first + len(x)] = token_losses(model, x, y).double().mean(1).cpu()
    loss = losses.mean().item()
    stderr = losses.std().item() / math.sqrt(len(windows)) if len(windows) > 1 else None
    result = {"windows": len(windows), "tokens": len(windows) * block_size}
    scales = {"loss": (loss, 1), "perplexity": (math.exp(loss), math.exp(loss))}  # value, and its derivative by the loss
    if bytes_per_token:
        bits = 1 / (math.log(2) * bytes_per_token)
        scales["bits_per_byte"] = loss * bits, bits
    for name, (value, slope) in scales.items():
        result |= {name: value, f"{name}_stderr": stderr and stderr * slope}
    return result


def evaluate_folder(c, model, tokenizer, folder, autocast):
    """`evaluate` on a folder of shards, after the checks that its ids mean to the model what they mean in the folder."""
    meta, part = shards.load_meta(folder), shards.open_split(folder, c.split)
    if meta.get("tokenizer") and tokenizer and not same_ids(tokenizer_from_meta(meta["tokenizer"], folder), tokenizer):
        raise ValueError(f"{folder} was made with another tokenizer than the model was trained with, so that its loss would mean nothing; "
                         "run prepare.py with the model's tokenizer, or give another --data_dir.")
    shards.check_vocab(part, model.config.vocab_size, "the model")
    n_bytes = (meta.get("bytes") or {}).get(c.split)
    return evaluate(model, part, c.block_size or model.config.block_size, c.eval_tokens, c.batch_size, n_bytes and n_bytes / part.n_tokens, autocast)


def table(result):
    """The lines that report what `evaluate` returns."""
    units = {"loss": "nats a token", "perplexity": "", "bits_per_byte": "bits a byte of text"}
    lines = [f"{result['windows']:,} windows, {result['tokens']:,} tokens"]
    for name, unit in units.items():
        if name in result:
            error = result[f"{name}_stderr"]
            lines.append(f"{name.replace('_', ' '):<14} {result[name]:.4f} {'' if error is None else f'± {error:.4f} '}{unit}".rstrip())
    return lines + ["bits per byte  unknown: no meta.json says how many bytes of text the shards hold"] * ("bits_per_byte" not in result)


# ----------------------------------------------------------------------------------------------------------------------
# lm-eval

class Harness:
    """
    Our model as lm-eval sees it. lm-eval is optional, so `run_tasks` makes the class that lm-eval accepts of this one and of
    lm_eval.api.model.TemplateLM, which cuts (context, continuation) texts into tokens. Texts are encoded as they are: no token is put
    before them, but an empty context is the end-of-text token.
    """

    def __init__(self, model, tokenizer, batch_size=8, autocast=FULL_PRECISION):
        super().__init__()
        self.model, self.codec, self.batch_size, self.autocast = model, tokenizer, batch_size, autocast
        self.max_length, self.where = model.config.block_size, model.cos.device

    @property
    def eot_token_id(self):
        if self.codec.eot is None:
            raise ValueError("a task scores text from its first token on, but the model's tokenizer has no end-of-text token to put before it; "
                             "choose tasks with a context, or a model with another tokenizer.")
        return self.codec.eot

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return self.codec.encode(string)

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
        """
        requests: (anything, context ids, continuation ids). Returns (log-probability in nats of the continuation, whether it is what
        greedy decoding gives) for each. What is too long for the model's context loses tokens on the left.
        """
        answers = [(0.0, True)] * len(requests)  # an empty continuation is certain
        members = {}  # requests that differ in nothing but their last token, such as one-letter choices, share their input
        for i, (_, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise ValueError(f"a continuation of {len(continuation)} tokens does not fit into the model's context of {self.max_length}.")
            if continuation:  # lm-eval counts blanks at the end of a context to the continuation, which may leave no context
                context = context or [self.eot_token_id]
                members.setdefault(tuple((context + continuation)[-self.max_length - 1:-1]), []).append(i)
        for batch in self.batches(members, "log-likelihoods", disable_tqdm):
            x = torch.zeros(len(batch), len(batch[0]), dtype=torch.long)  # filled up on the right, where causal attention does not look
            for row, ids in zip(x, batch):
                row[:len(ids)] = torch.tensor(ids)
            with self.autocast:
                logits = self.model(x.to(self.where))[0]
            for row, ids in zip(logits, batch):
                for i in members[ids]:
                    target = torch.tensor(requests[i][2], device=self.where)
                    logp = torch.log_softmax(row[len(ids) - len(target):len(ids)].float(), -1)
                    answers[i] = logp.gather(1, target[:, None]).sum().item(), bool((logp.argmax(-1) == target).all())
        return answers

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """Log-probability in nats of each request's whole text, in windows as long as the model's context, every token counted once."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
        pieces, owner = [], []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.eot_token_id, self.max_length, 1):
                pieces.append((None, *make_disjoint_window(window)))
                owner.append(i)
        totals = [0.0] * len(requests)
        for i, (logp, _) in zip(owner, self._loglikelihood_tokens(pieces, disable_tqdm)):
            totals[i] += logp
        return totals

    def generate_until(self, requests, disable_tqdm=False):
        """The text that the model generates after each request's context, up to the first of its stop strings or the end of text."""
        answers = [""] * len(requests)
        groups = {}
        for i, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
        for wishes, group in groups.items():
            until, max_new, sampling = self.read_wishes(json.loads(wishes))
            prompts = {}
            for i in group:
                ids = self.tok_encode(requests[i].args[0]) or [self.eot_token_id]
                prompts[i] = ids[-(self.max_length - max_new):]
            finish = functools.partial(self.finish, until=until)
            for batch in self.batches(prompts, "generation", disable_tqdm, length=lambda i, prompts=prompts: len(prompts[i])):
                for i, ids in zip(batch, self.decode([prompts[i] for i in batch], max_new, sampling, finish)):
                    answers[i] = finish(ids)[0]
        return answers

    def read_wishes(self, wishes):
        """A task's generation_kwargs -> (stop strings, most new tokens, arguments of model.sample). ValueError for what is not there."""
        wishes = dict(wishes)
        until = wishes.pop("until", None) or []
        until = [until] if isinstance(until, str) else list(until)
        lengths = [wishes.pop(name, None) for name in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")]
        max_new = int(next((n for n in lengths if n is not None), 256))
        if not 0 < max_new < self.max_length:
            raise ValueError(f"a task asks for {max_new} new tokens; with the model's context of {self.max_length} it can be 1 to "
                             f"{self.max_length - 1}, so that there is room for a prompt: set it with --max_gen_toks.")
        temperature = float(wishes.pop("temperature", None) or 0.0)
        if not wishes.pop("do_sample", temperature > 0):
            temperature = 0.0
        sampling = {"temperature": temperature, "top_k": wishes.pop("top_k", None), "top_p": wishes.pop("top_p", None)}
        if wishes.pop("num_beams", 1) != 1 or wishes:
            raise ValueError(f"a task asks for generation with {', '.join(sorted(wishes)) or 'num_beams'}, which this model does not have.")
        return until, max_new, sampling

    def finish(self, ids, until):
        """The new tokens of a row -> (the text before the end of text and all stop strings, whether there was one of these)."""
        eot = self.codec.eot
        ended = eot in ids
        text = whole = self.codec.decode(ids[:ids.index(eot)] if ended else ids)
        for stop in filter(None, until):
            text = text.split(stop)[0]
        return text, ended or text != whole

    @torch.no_grad()
    def decode(self, prompts, max_new, sampling, finish):
        """
        Continues lists of ids by max_new tokens at most, with one cache; a row stops early when finish(new ids)[1]. Returns the new ids.
        Rows of several lengths need no padding: all read the shortest prompt's length at once, then those with a longer prompt go on reading it,
        token by token, while the others generate already.
        """
        start = min(map(len, prompts))
        end = max(map(len, prompts)) + max_new
        cache, rows, done = KVCache(self.model.config, end), [list(prompt) for prompt in prompts], [False] * len(prompts)
        new = torch.tensor([row[:start] for row in rows], device=self.where)
        for t in range(start, end):
            with self.autocast:
                logits = self.model(new, cache=cache, last_only=True)[0][:, -1]
            tokens = sample(logits.float(), **sampling).tolist()
            for i, row in enumerate(rows):
                if len(row) == t and not done[i]:
                    row.append(tokens[i])
                    made = row[len(prompts[i]):]
                    done[i] = len(made) == max_new or finish(made)[1]
            if all(done):
                break
            new = torch.tensor([row[t:t + 1] or [0] for row in rows], device=self.where)  # a row that is done reads anything
        return [row[len(prompt):] for row, prompt in zip(rows, prompts)]

    def batches(self, items, label, silent, length=len):
        """The items, longest first, in lists of batch_size: what runs out of memory does so at once."""
        ordered = sorted(items, key=length, reverse=True)
        batches = [ordered[i:i + self.batch_size] for i in range(0, len(ordered), self.batch_size)]
        return tqdm(batches, label, unit="batch", disable=silent or None)


def run_tasks(c, model, tokenizer, autocast):
    """lm-eval's results (its dict) for the tasks that the options name. Raises ValueError without lm-eval or a tokenizer, or for unknown tasks."""
    if tokenizer is None:
        raise ValueError("tasks are texts, but the model comes without a tokenizer; put a tokenizer.json into its folder.")
    if tokenizer.n_vocab > model.config.vocab_size:
        raise ValueError(f"the tokenizer has {tokenizer.n_vocab} ids, the model {model.config.vocab_size}: they do not belong together.")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from lm_eval import simple_evaluate
        from lm_eval.api.model import TemplateLM
    except ImportError as error:
        raise ValueError(f"--tasks needs lm-eval, which cannot be imported ({error}); run: pip install lm-eval") from None
    manager, names = find_tasks(c)
    lm = type("LM", (Harness, TemplateLM), {})(model, tokenizer, c.batch_size, autocast)
    return simple_evaluate(model=lm, tasks=names, task_manager=manager, num_fewshot=None if c.num_fewshot < 0 else c.num_fewshot,
                           limit=c.limit or None, gen_kwargs=f"max_gen_toks={c.max_gen_toks}" if c.max_gen_toks else None, log_samples=False)


def find_tasks(c):
    """(lm-eval's TaskManager, the names it knows that --tasks means)."""
    from lm_eval.tasks import TaskManager
    if c.tasks_path and not os.path.isdir(c.tasks_path):
        raise ValueError(f"--tasks_path={c.tasks_path} is not a folder; give one with YAML task files.")
    wanted = [name.strip() for name in c.tasks.split(",") if name.strip()]
    for defaults in (False, True) if c.tasks_path else (True,):  # reading lm-eval's own thousands of files takes a while
        manager = TaskManager(include_path=c.tasks_path or None, include_defaults=defaults)
        found = {name: fnmatch.filter(manager.all_tasks, name) for name in wanted}
        if all(found.values()):
            return manager, list(dict.fromkeys(sum(found.values(), [])))
    missing = next(name for name in wanted if not found[name])
    near = difflib.get_close_matches(missing, manager.all_tasks, n=3, cutoff=0)
    raise ValueError(f"--tasks: there is no task {missing!r}{f' in lm-eval or {c.tasks_path}' if c.tasks_path else ' in lm-eval'}; "
                     f"the nearest names are {', '.join(near)}. Files of your own are found with --tasks_path.")


# ----------------------------------------------------------------------------------------------------------------------

def validate(c):
    """Raises ValueError for options that cannot work, naming option, value and rule."""
    for name, ok, rule in (("which", c.which in ("best", "last"), "must be best or last"), ("split", c.split in ("train", "val"), "must be train or val"),
                           ("batch_size", c.batch_size >= 1, "must be at least 1"), ("dtype", c.dtype in ("", "float32", "bfloat16"), "must be float32, bfloat16 or empty"),
                           *((name, getattr(c, name) >= 0, "must not be negative") for name in ("block_size", "eval_tokens", "limit", "max_gen_toks"))):
        configurator.require(c, name, ok, rule)
    configurator.require_writable(c, "save")


def run(c):
    """Evaluates as the options say, prints the results and returns them."""
    validate(c)
    device = configurator.find_device(c.device)
    wide = c.dtype == "float32" or not c.dtype and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0))
    autocast = FULL_PRECISION if wide else torch.autocast(device.type, torch.bfloat16)
    order = {"k_norm_after_rope": c.k_norm_after_rope} if "k_norm_after_rope" in c.given else {}
    model, tokenizer, saved = open_model(c, device, **order)
    folder = c.data_dir or ("" if c.tasks or not saved else saved["config"]["data_dir"])
    if not folder and not c.tasks:
        raise ValueError("there is nothing to evaluate: give --data_dir, --tasks or both.")
    results = {"model": c.init_from or c.out_dir, "step": saved.get("step")}
    if folder:
        results["shards"] = {"data_dir": folder, "split": c.split, **evaluate_folder(c, model, tokenizer, configurator.find(folder), autocast)}
        print(f"{results['model']} on the {c.split} shards of {folder}:", *table(results["shards"]), sep="\n", flush=True)
    if c.tasks:
        found = run_tasks(c, model, tokenizer, autocast)
        kept = {key: found[key] for key in ("results", "groups", "versions", "n-shot", "n-samples") if found.get(key)}
        results["tasks"] = json.loads(json.dumps(kept, default=float))  # NumPy's numbers as plain ones
        from lm_eval.utils import make_table
        print(*(make_table(found, key) for key in ("results", "groups") if found.get(key)), sep="\n", flush=True)
    return results


def main(argv=None):
    c = configurator.configure(__file__, argv)
    try:
        with configurator.clean_errors():
            results = run(c)
            if c.save:
                shards.write_json(c.save, results)
    except torch.OutOfMemoryError as error:
        raise SystemExit(f"error: out of GPU memory at --batch_size={c.batch_size}; halve it. PyTorch says: {str(error).splitlines()[0]}") from error


if __name__ == "__main__":
    main()
