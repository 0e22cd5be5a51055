# DenseFormer (arXiv 2402.02622): every layer is followed by an average over all earlier ones.
import pathlib

exec(pathlib.Path(__file__).with_name("base.py").read_text(encoding="utf-8"))
out_dir = "out/compare/denseformer"
connector = "denseformer"
denseformer_dilation = 1
denseformer_period = 1
