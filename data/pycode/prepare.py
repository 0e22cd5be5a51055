"""All Python source text of given folders: hundreds of megabytes on any machine that has some packages installed, without a download."""
import site
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))   # the repository, so that the script runs from any folder

from data.convert import CORES, command_line
from data.pystdlib.prepare import prepare_code, python_files
from data.shards import SHARD_TOKENS, DataError

HERE = Path(__file__).resolve().parent


def default_folders():
    """The standard library and every folder of installed packages, each once and none within another."""
    paths = sysconfig.get_paths()
    folders = [paths["stdlib"], paths["purelib"], paths["platlib"], *site.getsitepackages(), site.getusersitepackages()]
    folders = sorted({Path(folder).resolve() for folder in folders if Path(folder).is_dir()})
    return [folder for folder in folders if not any(other in folder.parents for other in folders)]


def prepare(folders="", out_dir=str(HERE), vocab_size=8192, processes=CORES, shard_tokens=SHARD_TOKENS, val_every=100):
    """Make a data set of all .py files below some folders, each content once.

    It takes seconds for 100 MB, so a killed run begins anew.

    folders       separated by commas; by default the standard library and the installed packages
    out_dir       the folder to write to
    vocab_size    ids of the byte-pair vocabulary, which is trained on the train part; at most 65536
    processes     how many processes read and encode
    shard_tokens  at how many tokens a new shard begins
    val_every     one file in so many goes to validation
    """
    chosen = [Path(folder) for folder in folders.split(",")] if folders else default_folders()
    for folder in chosen:
        if not folder.is_dir():
            raise DataError(f"--folders: {folder} is not a folder; name existing ones, separated by commas.")
    paths = [path for folder in chosen for path in python_files(folder, {"__pycache__"})]
    prepare_code("pycode", paths, out_dir, vocab_size, val_every, processes=processes, shard_tokens=shard_tokens)


if __name__ == "__main__":
    command_line(prepare)
