# Manifold-constrained hyper-connections (arXiv 2512.24880) as the Depth-Attention reference has them.
# Everything but the lines of the method is as in config/vanilla_410m.py, so that the runs differ in the method alone.
#     torchrun --standalone --nproc_per_node=8 train.py config/mhc_410m.py --init_from=auto
out_dir = "out/mhc_410m"

# shape: llama_config/410m of the Depth-Attention repository; vocabulary 50304 instead of its 32000, which cannot hold the ids of its own data
n_layer = 32
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
qk_norm = "head"  # norm before RoPE, the order that this method's recipe runs (flash_attention_2)
connector = "mhc"
mhc_num_streams = 4
mhc_sinkhorn_iters = 20
mhc_alpha_init = 0.01

# recipe: its 410M script (50,000 steps, AdamW 0.9/0.95, decay 0.1, 3e-4 to 10 % along a cosine, warm-up 2 %, clipping at 1). It gives 64 sequences a
# device without saying how many devices; 4 of them make the 256 sequences that the same group's sister project uses: 26B tokens in all.
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
