# Manifold-constrained hyper-connections (arXiv 2512.24880), 4 streams.
import pathlib

exec(pathlib.Path(__file__).with_name("base.py").read_text(encoding="utf-8"))
out_dir = "out/compare/mhc"
connector = "mhc"
mhc_num_streams = 4
mhc_sinkhorn_iters = 20
mhc_alpha_init = 0.01
