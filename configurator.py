"""
Options of every script: defaults <- config file <- command line, checked.

A script's options are its own top-level lines of the form

    learning_rate = 6e-4  # peak learning rate

that is: a lower-case name, a literal, an end-of-line comment. The comment is the documentation: --help prints it and the
README's table is made from it, so the three cannot disagree. train.py adds the fields of GPTConfig, read the same way from
model.py. A full-line comment above such a line starts a section of the list.

    python train.py config/quickstart.py --max_iters=100

A config file is plain Python assignments to option names (helpers start with an underscore). Values are checked against the
default's type: an int is taken for a float, nothing else is converted. On the command line the value is everything after the
first '='; it is text, read according to the option's type, so --out_dir=2024 stays a string.

A user's mistake ends in SystemExit with one sentence (Python prints it as the last line on stderr, exit code 1).

    python configurator.py train.py     # the options of a script as the README's table
"""
import ast
import contextlib
import difflib
import functools
import io
import math
import os
import sys
import tokenize
import types
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent
WORDS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


@dataclass(frozen=True)
class Option:
    name: str
    default: object
    meaning: str
    section: str

    @property
    def type(self):
        return type(self.default)


class Config(types.SimpleNamespace):
    """One attribute an option, and `given`: the names set by the config file or the command line."""

    def as_dict(self):
        return {name: value for name, value in vars(self).items() if name != "given"}


@contextlib.contextmanager
def clean_errors():
    """Turns a user's mistake (a ValueError or OSError, whose text is a sentence in this repository) and Ctrl-C into a clean exit."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit("error: stopped by Ctrl-C.") from None


def find(path):
    """A path of the repository (data, configs) as given by the user: relative to the repository's root, else to the working directory."""
    path = Path(path).expanduser()
    return path.resolve() if not (ROOT / path).exists() and path.exists() else ROOT / path


def find_device(name, local_rank=None):
    """
    The torch.device that --device means: the best there is if empty; with local_rank (one of several processes), that GPU of the machine.
    Raises ValueError for a device that the machine does not have.
    """
    import torch  # here, so that reading options does not need it
    mps = torch.backends.mps.is_available()
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "mps" if mps and local_rank is None else "cpu"))
    except RuntimeError:
        raise ValueError(f"--device={name} is not a device; give cpu, cuda, cuda:1 or mps.") from None
    if device.type not in ("cpu", "cuda", "mps"):
        raise ValueError(f"--device={name} is not supported; give cpu, cuda, cuda:1 or mps.")
    if device.type == "mps" and not mps:
        raise ValueError(f"--device={name}: PyTorch finds no Apple GPU here; use --device=cpu.")
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = (device.index or 0) if local_rank is None else local_rank
    if index >= count:
        advice = f"start at most {count} processes on it" if count else "use --device=cpu, or install a PyTorch built for CUDA"
        found = f'{count or "no"} GPU{"s" * (count > 1)}'
        raise ValueError(f"--device={name}: GPU {index} is wanted, but PyTorch finds {found} on this machine; {advice}.")
    return torch.device("cuda", index)


# -----------------------------------------------------------------------------
# the options of a script

@functools.lru_cache
def read_options(path, class_name=None):
    """
    The options that a source file declares, in its order: at top level, or as the fields of the dataclass `class_name`.
    The file is read, not imported.
    """
    source = Path(path).read_text(encoding="utf-8")
    body = ast.parse(source).body
    if class_name:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == class_name)
    comments, headings = _comments(source)
    options = []
    for node in body:
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if isinstance(node, ast.Assign) else None
        meaning = comments.get(node.end_lineno)
        if isinstance(target, ast.Name) and target.id.islower() and meaning and node.value is not None:
            section = next((text for line, text in reversed(headings) if line < node.lineno), "")
            options.append(Option(target.id, ast.literal_eval(node.value), meaning, "model" if class_name else section))
    return options


def _comments(source):
    """(line -> end-of-line comment, [(line, full-line comment)]) of a source text."""
    end_of_line, headings, code = {}, [], set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("#").strip()
            if token.start[0] in code:
                end_of_line[token.start[0]] = text
            elif text.strip("-"):
                headings.append((token.start[0], text))
        elif token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            code.update(range(token.start[0], token.end[0] + 1))
    return end_of_line, headings


def options_of(script, model_fields=False):
    """The script's options and, with model_fields, those of GPTConfig that it does not declare itself."""
    options = list(read_options(script))
    if model_fields:
        own = {option.name for option in options}
        options += [option for option in read_options(ROOT / "model.py", "GPTConfig") if option.name not in own]
    return options


def table(options):
    """The options as lines of a Markdown table: name, default, meaning."""
    def row(option):
        default = f"`{option.default!r}`"
        return f"| `{option.name}` | {default} | {option.meaning} |".replace("||", r"\|\|")
    return ["| option | default | meaning |", "|---|---|---|", *map(row, options)]


def help_text(script, options, operands=None):
    """What --help prints."""
    lines = [f'usage: python {Path(script).name} {operands or "[config/FILE.py]"} [--name=value ...]', ""]
    if not operands:
        lines += ["A config file (plain assignments to these names) overrides the defaults, the command line overrides the file.", ""]
    width = max(len(f"--{o.name}={o.default}") for o in options)
    section = None
    for option in options:
        if option.section != section:
            section = option.section
            lines += ["", section] if len(lines) > 2 else [section]
        lines.append(f'  {f"--{option.name}={option.default}":<{width}}  {option.meaning}')
    return "\n".join(lines)


# -----------------------------------------------------------------------------
# values

def configure(script, argv=None, model_fields=False, operands=None):
    """
    Resolves a script's options: defaults <- config file <- command line.

    script: the script's __file__; argv: arguments without the program's name (default: this process's);
    operands: a word for --help if the arguments without dashes are not a config file but the script's own (returned as `operands`).
    Returns a Config. Exits 0 after --help, and with a sentence for anything wrong.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    options = {option.name: option for option in options_of(script, model_fields)}
    if "--help" in argv or "-h" in argv:
        print(help_text(script, options.values(), operands))
        raise SystemExit(0)
    words = [arg for arg in argv if not arg.startswith("-")]
    with clean_errors():
        command_line = dict(_read_argument(arg, argv, options) for arg in argv if arg.startswith("-"))
        from_file = {}
        if not operands and len(words) > 1:
            raise ValueError(f'one config file at most, got {" and ".join(words)}; options are written --name=value.')
        if not operands and words:
            from_file = read_config_file(words[0], options)
    values = {name: option.default for name, option in options.items()} | from_file | command_line
    if operands:
        values["operands"] = words
    return Config(**values, given=frozenset(from_file) | frozenset(command_line))


def read_config_file(path, options):
    """The checked assignments of a config file as a dict. Raises ValueError naming file, line where known, option and value."""
    file = find(path)
    if not file.is_file():
        near = difflib.get_close_matches(Path(path).name, [p.name for p in (ROOT / "config").glob("*.py")], n=1, cutoff=0)
        hint = f" Did you mean config/{near[0]}?" if near else ""
        raise ValueError(f"{path!r} is neither an option (--name=value) nor a config file that exists ({file}).{hint}")
    names = {"__file__": str(file), "__name__": "__config__"}
    try:
        exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), names)
    except Exception as error:  # whatever a config file can raise is the config file's mistake
        line = getattr(error, "lineno", None) or getattr(error.__traceback__.tb_next, "tb_lineno", "?")
        raise ValueError(f'config file {path}, line {line}: {type(error).__name__}: {getattr(error, "msg", error)}.') from error
    values = {}
    for name, value in names.items():
        if name.startswith("_") or isinstance(value, types.ModuleType):
            continue
        if name not in options:
            raise ValueError(f"config file {path} sets {name} = {value!r}, but there is no such option. {_nearest(name, options)}")
        values[name] = check(options[name], value, f"config file {path}")
    return values


def check(option, value, where):
    """A Python value for an option, as that option's type. Raises ValueError."""
    wanted = option.type
    if wanted is float and type(value) is int:
        value = float(value)
    if wanted is bool and type(value) is int and value in (0, 1):
        value = bool(value)
    if type(value) is not wanted:
        hint = "; write it in quotes" if wanted is str else ""
        raise ValueError(f"{where}: {option.name} wants {_kind(wanted)}, given {value!r} ({_kind(type(value))}){hint}. It means: {option.meaning}.")
    if wanted is float and not math.isfinite(value):
        raise ValueError(f"{where}: {option.name} wants a finite number, given {value!r}. It means: {option.meaning}.")
    return value


def parse(option, text):
    """The text after '=' on the command line, as the option's type. Raises ValueError."""
    if option.type is str:
        return text
    if option.type is bool:
        if text.lower() not in WORDS:
            raise ValueError(f'--{option.name}={text}: wanted a yes or no, one of {", ".join(WORDS)}. It means: {option.meaning}.')
        return WORDS[text.lower()]
    try:
        value = int(text)
    except ValueError:
        try:
            value = float(text)
        except ValueError:
            value = text
    return check(option, value, f"--{option.name}={text}")


def require(c, name, ok, rule):
    """Raises ValueError, naming option and value, unless ok."""
    if not ok:
        raise ValueError(f"--{name}={getattr(c, name)} {rule}.")


def require_writable(c, name):
    """Raises ValueError unless the file that an option names, if any, can be written: for results that take a while to compute."""
    path = Path(getattr(c, name))
    if getattr(c, name):
        require(c, name, path.parent.is_dir(), f"cannot be written: there is no folder {path.parent}")
        require(c, name, not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK), "cannot be written; give a file that can be")


def make_folder(name, folder):
    """Makes the folder that an option names, and those above it. Raises ValueError if that cannot be."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--{name}={folder} cannot be made ({error.strerror}); give a folder that can be written.") from error


def _read_argument(arg, argv, options):
    """'--name=value' -> (name, value)."""
    name, equals, text = arg.removeprefix("--").partition("=")
    name = name.replace("-", "_") if arg.startswith("--") else arg
    if name not in options:
        raise ValueError(f'unknown option {arg.partition("=")[0]}. {_nearest(name, options)}')
    if not equals:
        following = argv[argv.index(arg) + 1:argv.index(arg) + 2]
        default = options[name].default
        value = following[0] if following and not following[0].startswith("-") else not default if type(default) is bool else default
        raise ValueError(f"--{name} needs its value after an equals sign: --{name}={value}")
    return name, parse(options[name], text)


def _nearest(name, options):
    return f'Did you mean --{difflib.get_close_matches(name.lstrip("-"), options, n=1, cutoff=0)[0]}? --help lists all.'


def _kind(wanted):
    return {int: "an int", float: "a float", str: "a string", bool: "a bool"}.get(wanted, f"a {wanted.__name__}")


if __name__ == "__main__":
    script = ROOT / (sys.argv[1] if len(sys.argv) > 1 else "train.py")
    if len(sys.argv) > 2 or not script.is_file():
        raise SystemExit("usage: python configurator.py [SCRIPT.py]     its options as a Markdown table; train.py's without a script")
    print("\n".join(table(options_of(script, model_fields=script.name == "train.py"))))
