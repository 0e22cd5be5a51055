# Depth-Attention with more sources: stride L/4, layers 0, 6, 12 and 18.
import pathlib

exec(pathlib.Path(__file__).with_name("base.py").read_text(encoding="utf-8"))
out_dir = "out/compare/depth_attention_dense"
depth = "depth_attention"
depth_stride = 6
