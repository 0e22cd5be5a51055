# A first loss: a small Depth-Attention model on the source of Python's standard library, in about three minutes on two CPU cores.
#     python train.py config/quickstart.py
# The shape is the recipes' one in small (grouped queries, SwiGLU of about 3 times the width, stride of half the layers) and deep enough for the
# mechanism to have something to read: layers 0 and 2 are the sources of all later ones. The other numbers were tried out for these minutes.
out_dir = "out/quickstart"
data_dir = "data/pystdlib"

n_layer = 4
n_head = 4
n_kv_head = 2
n_embd = 128
n_inner = 384
block_size = 128
depth = "depth_attention"
depth_stride = 2
embed_init_std = 0.5  # as small as the other matrices (0.02), the embedding is drowned by the first layers: 4.61 instead of 4.39 at the end

batch_size = 4
global_batch_size = 4
max_iters = 1300
learning_rate = 3e-3
min_lr = 1e-4
warmup_iters = 50
weight_decay = 0.1
eval_interval = 325
eval_tokens = 32768
log_interval = 10

device = "cpu"
dtype = "float32"
compile = False
sample_tokens = 160
sample_start = "def "
