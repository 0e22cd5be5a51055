# A looped Depth-Attention decoder with the compute of config/depth_410m.py and about half of its weights: 16 layers, run twice.
#     torchrun --standalone --nproc_per_node=8 train.py config/looped_410m.py --init_from=auto
# The paper (arXiv 2606.05014) says that its gains extend to looped Transformers. It does not say how many loops, what is shared or which layers
# are sources, so these are our choice: the whole stack loops, every pass of a layer is a virtual layer with its own keys and values, and the stride
# in virtual units is half of the 16 layers, which gives each pass the sources of the unlooped model and adds those of the pass before
# (virtual layers 0, 8, 16 and 24 of 32).
out_dir = "out/looped_410m"

# shape: config/depth_410m.py's with half of the layers, each run twice
n_layer = 16
n_loop = 2
n_prelude = 0
n_coda = 0
n_head = 16
n_kv_head = 4
n_embd = 1024
head_dim = 64
n_inner = 2816
block_size = 2048
vocab_size = 50304
rope_theta = 10000.0
norm_eps = 1e-6
init_std = 0.02
qk_norm = "head"
depth = "depth_attention"
depth_stride = 8

# recipe: config/depth_410m.py's
data_dir = "data/smallpile"
batch_size = 16
global_batch_size = 256
max_iters = 50000
learning_rate = 3e-4
min_lr = 3e-5
warmup_iters = 1000
weight_decay = 0.1
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0
seed = 42

eval_interval = 1000
eval_tokens = 10_485_760
save_interval = 500
