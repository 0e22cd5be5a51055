# The control: nothing reads across depth but the residual stream.
import pathlib

exec(pathlib.Path(__file__).with_name("base.py").read_text(encoding="utf-8"))
out_dir = "out/compare/vanilla"
