# What all runs of the comparison share; each file of this folder reads it and adds the lines of its method.
#     python compare.py                                # all of them, and the table of what came out
#     python train.py config/compare/moda.py           # one of them
# 24 layers of 512, 8 query and 2 key/value heads of 64, SwiGLU of 2.75 times the width: 67.6M parameters between an embedding and a head of 4.2M each,
# which are not tied. Deep for its size, since depth is the question. Norms stand before the sub-layers and keys are normed before RoPE in every run, also
# where a method's paper prefers another order (MoDA's does better with norms behind the sub-layers).
data_dir = "data/pycode"  # python data/pycode/prepare.py

n_layer = 24
n_head = 8
n_kv_head = 2
n_embd = 512
head_dim = 64
n_inner = 1408
block_size = 1024
rope_theta = 10000.0
norm_eps = 1e-6
init_std = 0.02
qk_norm = "head"
tie_embeddings = False

# A thousand steps of 32,768 tokens in one micro-step: minutes on one GPU. At so few tokens, steps are worth more than larger batches.
batch_size = 32
global_batch_size = 32
cuda_graph = True  # layers this small are faster than Python can start their kernels; the numbers are the same
max_iters = 1000
warmup_iters = 40
learning_rate = 1e-3
min_lr = 1e-4  # compare.py sets both: a tenth of the peak at the end of the cosine
weight_decay = 0.1
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0
seed = 1

eval_interval = 500
eval_tokens = 2_097_152
log_interval = 10
