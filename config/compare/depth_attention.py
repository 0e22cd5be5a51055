# Depth-Attention (arXiv 2606.05014) with the stride of its recipes, half of the layers: layers 0 and 12 are sources.
import pathlib

exec(pathlib.Path(__file__).with_name("base.py").read_text(encoding="utf-8"))
out_dir = "out/compare/depth_attention"
depth = "depth_attention"
depth_stride = 12
