# 12 layers run twice, with Depth-Attention: stride 6 in virtual layers, so 0, 6, 12 and 18 are sources, as within one pass of an unlooped model.
import pathlib

exec(pathlib.Path(__file__).with_name("base.py").read_text(encoding="utf-8"))
out_dir = "out/compare/looped_depth_attention"
n_layer = 12
n_loop = 2
depth = "depth_attention"
depth_stride = 6
