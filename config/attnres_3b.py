# Attention residuals as the Depth-Attention reference has them: each sub-layer reads a softmax over snapshots of the stream.
# Everything but the lines of the method is as in config/vanilla_3b.py, so that the runs differ in the method alone.
#     torchrun --standalone --nproc_per_node=8 train.py config/attnres_3b.py --init_from=auto
out_dir = "out/attnres_3b"

# shape: llama_config of the released 3B models
n_layer = 48
n_head = 32
n_kv_head = 8
n_embd = 2048
head_dim = 64
n_inner = 6912
block_size = 2048
vocab_size = 50304
rope_theta = 10000.0
norm_eps = 1e-5
init_std = 0.01
qk_norm = "head"  # norm before RoPE, the order that this method's recipe runs (flash_attention_2)
connector = "attnres"
attnres_sources = "snapshots"
attnres_block_size = 12  # sub-layers, so a snapshot every 6 layers
attnres_recency_bias_init = 3.0

# recipe: the 3B yaml files (1024 sequences of 2048 a step, AdamW 0.9/0.95, decay 0.1, 1e-3 to 10 % along a cosine, warm-up 2 %, clipping at 1,
# seed 42), 2 sequences a device and micro-step (its recipe; the other methods take 4). They run one epoch of smallpile, whose size they do not
# say; at the about 26B tokens that the same group's sister project reads of it, that is 12,500 steps.
data_dir = "data/smallpile"
batch_size = 2
global_batch_size = 1024
zero1 = True  # with the optimizer's state spread over 8 GPUs, these micro-batches fit into 80 GB
max_iters = 12500
learning_rate = 1e-3
min_lr = 1e-4
warmup_iters = 250
weight_decay = 0.1
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0
seed = 42

eval_interval = 500
eval_tokens = 10_485_760
save_interval = 250
