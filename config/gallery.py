"""After config/quickstart.py: few steps, and every checkpoint that the figures over training read.

make gallery
python train.py config/quickstart.py config/gallery.py --init_std=0.02 --out_dir=out/gallery/s5
"""

out_dir = "out/gallery"
max_iters = 300
warmup_iters = 30
eval_interval = 50
eval_tokens = 50_000
keep_every = 50
compile = False
