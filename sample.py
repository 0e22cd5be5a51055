"""
Text from a model:

    python sample.py --out_dir=out/quickstart --start="def read("          # a run of train.py
    python sample.py --init_from=FOLDER_OR_ID --start=FILE:prompt.txt      # a Hugging Face folder, the prompt from a file
"""
import contextlib
from pathlib import Path

import torch

import configurator
from hf import open_model

# ----------------------------------------------------------------------------------------------------------------------
# model
out_dir = "out"  # folder of the run (relative to the working directory)
which = "best"  # its checkpoint: best or last
init_from = ""  # a Hugging Face folder or Hub id instead
# text
start = ""  # the prompt; FILE:path reads it from a file; empty = end-of-text
num_samples = 3  # texts, drawn together
max_new_tokens = 200  # tokens added to the prompt, at most: a text ends at end-of-text
temperature = 0.8  # below 1 = bolder, above = more varied; 0 = always the most likely token
top_k = 200  # draw from the so many most likely tokens; 0 = all
top_p = 1.0  # draw from the most likely tokens that together have this probability; 1 = all
seed = 1337  # the same seed draws the same texts
# machine
device = ""  # cpu, cuda, cuda:1, mps; empty = the best there is
dtype = ""  # float32 or bfloat16 of the matmuls; empty = bfloat16 on GPUs that have it, float32 elsewhere
# ----------------------------------------------------------------------------------------------------------------------


def validate(c):
    """Raises ValueError for options that cannot work, naming option, value and rule."""
    configurator.require(c, "which", c.which in ("best", "last"), "must be best or last")
    configurator.require(c, "dtype", c.dtype in ("", "float32", "bfloat16"), "must be float32, bfloat16 or empty")
    configurator.require(c, "seed", -2**63 <= c.seed < 2**63, "must fit into 64 bits")
    configurator.require(c, "num_samples", c.num_samples >= 1, "must be at least 1")
    configurator.require(c, "max_new_tokens", c.max_new_tokens >= 0, "must not be negative")
    configurator.require(c, "temperature", c.temperature >= 0, "must not be negative; 0 = always the most likely token")
    configurator.require(c, "top_k", c.top_k >= 0, "must not be negative; 0 = all tokens")
    configurator.require(c, "top_p", 0 < c.top_p <= 1, "must be above 0 and at most 1; 1 = all tokens")


def prompt_ids(start, tokenizer):
    """The prompt's token ids: of the text, of the file's text after FILE:, or the end-of-text token (id 0 where there is none). Raises ValueError."""
    text = start
    if start.startswith("FILE:"):
        path = Path(start.removeprefix("FILE:"))
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"--start=FILE:{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8.") from error
        except OSError as error:
            raise ValueError(f"--start=FILE:{path} cannot be read ({error.strerror}); give a text file that is there.") from error
    return tokenizer.encode(text) or [tokenizer.eot or 0]


def texts(c, model, tokenizer, device):
    """Draws num_samples continuations of the prompt and yields each with it, as text, up to its end-of-text token."""
    ids = prompt_ids(c.start, tokenizer)
    largest = max(ids)
    if largest >= model.config.vocab_size:
        raise ValueError(f"the prompt has token id {largest}, but the model's vocabulary ends at {model.config.vocab_size - 1}: "
                         "tokenizer and model do not belong together.")
    generator = torch.Generator(device).manual_seed(c.seed)
    prompts = torch.tensor([ids] * c.num_samples, device=device)
    out = model.generate(prompts, c.max_new_tokens, temperature=c.temperature, top_k=c.top_k, top_p=c.top_p, generator=generator, stop_token=tokenizer.eot)
    for row in out.tolist():
        new = row[len(ids):]
        yield tokenizer.decode(([] if not c.start else ids) + (new[:new.index(tokenizer.eot)] if tokenizer.eot in new else new))


def main(argv=None):
    c = configurator.configure(__file__, argv)
    with configurator.clean_errors():
        validate(c)
        device = configurator.find_device(c.device)
        half = c.dtype == "bfloat16" or not c.dtype and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        model, tokenizer, _ = open_model(c, device)
        if tokenizer is None:
            raise ValueError(f"{c.init_from or c.out_dir} comes without a tokenizer, so that no text can be read or written; a Hugging Face folder needs its "
                             "tokenizer.json, a run a tokenizer in the meta.json of its data.")
        with torch.autocast(device.type, torch.bfloat16) if half else contextlib.nullcontext():
            for text in texts(c, model, tokenizer, device):
                print(text, "-" * 80, sep="\n", flush=True)


if __name__ == "__main__":
    main()
