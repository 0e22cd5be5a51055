# 12 layers run twice: the compute of the 24 layers, half of their weights. The control of looped_depth_attention.
import pathlib

exec(pathlib.Path(__file__).with_name("base.py").read_text(encoding="utf-8"))
out_dir = "out/compare/looped_vanilla"
n_layer = 12
n_loop = 2
