# DenseFormer (arXiv 2402.02622): each layer's input is a learned average of all earlier layers' outputs.
# Everything but the lines of the method is as in config/vanilla_3b.py, so that the runs differ in the method alone.
#     torchrun --standalone --nproc_per_node=8 train.py config/denseformer_3b.py --init_from=auto
out_dir = "out/denseformer_3b"

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
connector = "denseformer"
denseformer_dilation = 1  # 1x1 as in the reference's configs; the paper recommends dilation 4, period 5
denseformer_period = 1

# recipe: the 3B yaml files (1024 sequences of 2048 a step, AdamW 0.9/0.95, decay 0.1, 1e-3 to 10 % along a cosine, warm-up 2 %, clipping at 1,
# seed 42), 4 sequences a device and micro-step. They run one epoch of smallpile, whose size they do not say; at the about 26B tokens that the
# same group's sister project reads of it, that is 12,500 steps.
data_dir = "data/smallpile"
batch_size = 4
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
