# Mixture-of-Depths Attention (arXiv 2603.15619), row 4 of its Table 3: keys and values of earlier layers, and of their FFN inputs.
import pathlib

exec(pathlib.Path(__file__).with_name("base.py").read_text(encoding="utf-8"))
out_dir = "out/compare/moda"
depth = "moda"
moda_ffn_kv = True
