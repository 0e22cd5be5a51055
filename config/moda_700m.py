# Mixture-of-Depths Attention (arXiv 2603.15619) as in row 4 of its Table 3: one softmax over the sequence and the token's own keys of earlier layers.
# Everything but the lines of the method is as in config/olmo2_700m.py.
#     torchrun --standalone --nproc_per_node=8 train.py config/moda_700m.py --init_from=auto
out_dir = "out/moda_700m"

# shape, derived from the 669.0M parameters and the FLOPs of the paper's Table 3: 36 layers, 1024 wide, 16 query and 8 key/value heads of 64,
# SwiGLU of 4096, tied embedding. Its vocabulary of 100,278 does not fit uint16 shards: 50304 (GPT-2's ids, padded) takes its place here.
n_layer = 36
n_head = 16
n_kv_head = 8
n_embd = 1024
head_dim = 64
n_inner = 4096
block_size = 4096
vocab_size = 50304
tie_embeddings = True
# OLMo2's order, which the paper says its language models follow: x + norm(F(x)), query and key norms over the whole projection. The theta is OLMo2's.
norm_order = "post"
qk_norm = "full"
rope_theta = 500000.0
norm_eps = 1e-6
init_std = 0.02
depth = "moda"
moda_ffn_kv = True

# recipe, as the paper states it: 400B tokens, 1024 sequences of 4096 a step (so 95,367 steps), warm-up of 2,000 steps to 3e-4, cosine to 3e-5,
# AdamW "as OLMo2" (0.9/0.95, decay 0.1, clipping at 1). It reads a part of OLMo2's data; here it is FineWeb-Edu, which its ablations use.
data_dir = "data/fineweb_edu"
batch_size = 4
global_batch_size = 1024
max_iters = 95367
learning_rate = 3e-4
min_lr = 3e-5
warmup_iters = 2000
weight_decay = 0.1
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0
seed = 42

eval_interval = 1000
eval_tokens = 10_485_760
save_interval = 250
