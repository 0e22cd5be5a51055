# Attention residuals as the Depth-Attention reference has them: snapshots of the stream every 6 layers.
import pathlib

exec(pathlib.Path(__file__).with_name("base.py").read_text(encoding="utf-8"))
out_dir = "out/compare/attnres"
connector = "attnres"
attnres_sources = "snapshots"
attnres_block_size = 12
attnres_recency_bias_init = 3.0
