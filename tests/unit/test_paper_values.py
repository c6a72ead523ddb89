"""The papers' runs, resolved as train.py resolves them, beside values that were typed from the
papers.

DNT: arXiv 2507.17501, Blockwise LR: 2502.19002, DyT: 2503.10622, Derf: 2512.10938, LNS: 2502.05795,
scale vectors: 2605.26895. `RUNS` has {command, that is names of config files and flags: (where the
paper says so, {name: value})}; `resolve` says what a name is. A later value in a sum of dicts wins.
"""

from functools import cache, partial

import pytest

from model import DYT_ALPHA, Block, GPTConfig
from nanodnt.optim import lr_at, make_optimizer
from nanodnt.tasks import task_of
from support.pages import config, outline

pytestmark = pytest.mark.house
paper = dict  # the paper's text, or a table in it
# not in the text: the authors' code or another public one (nanoGPT, timm, ConvNeXt, LLaMA, GaLore)
code = dict
ours = dict  # our choice
about = partial(pytest.approx, rel=4e-3)
RUNS = {}


def one(values):
    """The only member of `values`, or all of them."""
    values = set(values)
    return values.pop() if len(values) == 1 else values


def factors(place: str, depth: int) -> dict:
    """LNS: 1/√ℓ in both sub-layers of every block (Eq. 12), and nowhere else."""
    return {
        (f"{branch}.{place}", i): i**-0.5 for branch in ("attn", "mlp") for i in range(1, depth + 1)
    }


@cache
def resolve(command: str) -> dict:
    """{name: value}: the fields of GPTConfig and TrainConfig, and what the built model and its
    optimizer come to."""
    words = command.split()
    flags = dict(word[2:].split("=") for word in words if word.startswith("--"))
    model, c = config(*(word for word in words if not word.startswith("--")), **flags)
    net, built = build(tuple(vars(model).items()))
    epoch = 1_281_167 // c.batch_size  # training images of ImageNet-1k
    found = (
        vars(model)
        | vars(c)
        | built
        | dict(betas=(c.beta1, c.beta2), floor=c.min_lr / c.learning_rate)
    )
    found |= dict(epochs=c.max_iters / epoch, warmup_epochs=c.warmup_iters / epoch)
    found |= dict(tokens_a_step=c.batch_size * model.block_size)
    found |= dict(tokens=found["tokens_a_step"] * c.max_iters)

    # by role of the parameters: LR at the last step of warm-up, at the one after it, at the last of
    # all; decay; rule
    groups = {g["label"]: g for g in make_optimizer(net, c).param_groups}
    for name, step in dict(
        warmed=max(0, c.warmup_iters - 1), after=c.warmup_iters, last=c.max_iters - 1
    ).items():
        found[name] = {role: lr_at(step, c, g) for role, g in groups.items()}
    found["decays"] = {role: g["weight_decay"] for role, g in groups.items()}
    found["rules"] = {role: g["rule"] for role, g in groups.items()}
    return found


@cache
def build(fields: tuple) -> tuple:
    """(the network without storage of these fields of GPTConfig, {name: value} of what it is
    like)."""
    model = GPTConfig(**dict(fields))
    net = outline(model) if model.lns == "off" else task_of(model).network().empty(model)
    blocks = {i: block for i, block in enumerate(net.blocks, 1) if isinstance(block, Block)}
    found = dict(d_ff=model.ffn_width, kv_heads=model.n_kv_head or model.n_head)
    like_2 = 1 + model.n_layer - len(blocks)  # blocks that are as the second
    sizes = {
        n: p.numel() * (like_2 if n.startswith("blocks.1.") else 1)
        for n, p in net.named_parameters()
    }
    found["millions"] = sum(sizes.values()) / 1e6
    if not model.patch_size:  # GPT-2 is counted without positions
        found["millions"] -= sizes.get("wpe.weight", 0) / 1e6
    roles = net.roles()
    found["gains"] = sum(size for name, size in sizes.items() if roles[name].startswith("gain"))
    places = [(branch, place) for branch in ("attn", "mlp") for place in ("pre", "mid", "post")]
    slots = {
        (f"{b}.{p}", i): getattr(getattr(x, b), p) for i, x in blocks.items() for b, p in places
    }
    slots |= {
        ("input", 0): net.input_norm,
        ("qk", 0): net.blocks[0].attn.f.q_norm,
        ("final", 0): net.final_norm,
    }
    found["norms"] = {name for (name, _), slot in slots.items() if slot.norm_kind != "none"}
    found["factors"] = {key: slot.const for key, slot in slots.items() if slot.factor is not None}
    attn, other = (
        [s for (n, _), s in slots.items() if n in names]
        for names in ({"attn.pre"}, {"mlp.pre", "final"})
    )
    found["alpha"] = tuple(one(slot.init_alpha for slot in part) for part in (attn, other))
    found["beta"] = one(slot.bias is not None for slot in attn + other)
    # on the embedding
    found["scalar"] = None if net.embed_scale.gain is None else net.embed_scale.init_gain
    return net, found


# ---------------------------------------------------------------------------------------------- DNT
OWT = paper(dataset="openwebtext")
S = {"s1": {"attn.pre", "mlp.pre", "final"}}  # Fig. 7, sec. 4.4; the final norm: ours
S["s2"], S["s3"] = S["s1"] | {"qk"}, S["s1"] | {"qk", "input"}
S["s4"] = S["s3"] | {"attn.mid", "mlp.mid"}
S["s5"] = S["s4"] - {"mlp.pre"}
# sec. 3.1, 3.3: "selective PreNorm" before the FFN
DNT = paper(norm="rmsnorm", norms=S["s5"]) | code(norm_eps=1e-6)
GPT2 = code(norm="layernorm", norm_eps=1e-5, norms=S["s1"])
# nanoGPT's GELU is exact
GPT2_PARTS = code(pos="learned", tie_weights=True, bias=False) | ours(mlp="gelu")

# Tables 3 and 5: millions of parameters, d_model, n_head, depth, batch size; AdamW's peak of GPT-2
# and of L-DNT
SIZES = {
    "small": (124, 768, 12, 12, 480, 6e-4, 6e-4),
    "large": (774, 1280, 20, 36, 512, 2.5e-4, 6e-4),
    "xl": (1436, 1536, 24, 48, 512, 1.5e-4, 6e-4),
}
TABLE_5 = OWT | paper(
    schedule="cosine", min_lr=6e-5, max_iters=200_000, block_size=1024, dropout=0.0, grad_clip=1.0
)
# App. C: for all 2000
TABLE_5 |= paper(warmup_iters=2000, init="xavier") | ours(residual_init="plain", init_std=0.02)
TABLE_5 |= GPT2_PARTS | code(decay_gains="none", decay_scalars=False, blockwise_lr=False)
ADAMW = paper(optimizer="adamw", weight_decay=0.1, betas=(0.9, 0.95))
MSGDW = paper(optimizer="msgdw", learning_rate=1.0, weight_decay=1e-4, momentum=0.9)
MSGDW |= code(dampening=0.0, nesterov=False)
for size, (millions, d, heads, depth, batch, *peaks) in SIZES.items():
    shape = paper(
        millions=about(millions), n_embd=d, n_head=heads, n_layer=depth, batch_size=batch
    ) | ours(d_ff=4 * d)
    for family, layout, peak in zip(("gpt2", "dnt"), (GPT2, DNT), peaks, strict=True):
        name, rest = f"{family}_{size}", shape | TABLE_5 | layout
        RUNS[name] = ("Tables 3, 5; App. C", rest | ADAMW | paper(learning_rate=peak))
        RUNS[f"{name} optimizers/msgdw"] = ("Tables 3, 5; warm-up: App. C", rest | MSGDW)

# LRs of Muon on the matrices of the blocks, and of AdamW on the rest; they fall to a tenth
for name, hidden, other in (("muon_dnt", 1e-4, 6e-4), ("muon_original", 0.02, 6e-4)):
    rates = dict.fromkeys(("qk", "vo", "ffn"), hidden) | dict.fromkeys(
        ("emb", "pos", "gain_in"), other
    )
    muon = paper(
        warmed=rates,
        rules={role: "muon" if lr == hidden else "adamw" for role, lr in rates.items()},
    )
    muon |= ours(
        last={role: lr / 10 for role, lr in rates.items()},
        momentum=0.95,
        nesterov=True,
        muon_steps=5,
    )
    RUNS[f"gpt2_large optimizers/{name}"] = (
        "App. F.1; Keller Jordan; embedding on AdamW: ours",
        muon,
    )
soap = code(learning_rate=3e-3, weight_decay=0.01, betas=(0.95, 0.95), soap_frequency=10)
rules = dict.fromkeys(("qk", "vo", "ffn"), "soap")
soap |= ours(min_lr=3e-4, rules=rules | dict.fromkeys(("emb", "pos", "gain_in"), "adamw"))
RUNS["gpt2_large optimizers/soap"] = ("the authors' code; embedding on AdamW: ours", soap)
# entry 36: vectors, positions among them (ours), as gains
rates = dict.fromkeys(("qk", "vo", "ffn"), 0.025) | dict(emb=0.7, head=0.004, pos=0.015)
rates |= dict(gain_in=0.015, gain_out=0.015)
track = code(
    after=pytest.approx(rates),
    decays={role: 0.05 if rate == 0.025 else 0.001 for role, rate in rates.items()},
    rules={role: "muon" if rate == 0.025 else "adamw" for role, rate in rates.items()},
    betas=(0.8, 0.95),
    adam_eps=pytest.approx(1e-10 / 2**19),
    grad_clip=0.0,
    muon_adjust_lr="original",
)
command = "gpt2_small dnt/s3 optimizers/track_3 --tie_weights=False --schedule=wsd --max_iters=3250"
RUNS[f"{command} --wsd_decay_iters=2275"] = ("modded-nanogpt, track 3", track)
MATRICES = {"emb", "head", "qk", "vo", "ffn"}
DECAYED = {"nanogpt": MATRICES, "blockwise": MATRICES | {"gain_in", "gain_out"}, "lns": set()}
DECAYED |= {"iwd": MATRICES | {"gain_in"}, "dyt": MATRICES | {"gain_in", "gain_out", "scalar"}}
for name, roles in DECAYED.items():
    decays = {role: 0.1 * (role in roles) for role in MATRICES | {"gain_in", "gain_out", "scalar"}}
    command = f"lns/130m decay/{name} --qk_norm=True --embed_scale=True"
    RUNS[command] = ("the authors' code; IWD: abstract", code(decays=decays))

for name, norms in S.items():
    layout = paper(norms=norms, norm="rmsnorm")
    RUNS[f"dnt_small dnt/{name} --optimizer=msgdw --learning_rate=1.0"] = (
        "Figs. 6, 7",
        TABLE_5 | MSGDW | layout,
    )
    RUNS[f"vdnt/huge dnt/{name} vdnt/huge_msgdw"] = ("Figs. 6, 7", layout)
# "Adam optimizer"
APP_F = paper(optimizer="adamw", learning_rate=0.3, warmup_iters=0) | ours(weight_decay=0.0)
for norm, out in dict(
    input={"input"}, pre={"attn.pre", "mlp.pre"}, mid={"attn.mid", "mlp.mid"}, qk={"qk"}
).items():
    command = f"dnt_small dnt/no_{norm}_norm --learning_rate=0.3 --warmup_iters=0 --weight_decay=0"
    RUNS[command] = ("App. F; from S4: ours", APP_F | paper(norms=S["s4"] - out, norm="rmsnorm"))

# Tables 3 and 4: millions, d_model, n_head, depth; mSGDW's peak and decay; stochastic depth; side
# of a patch: code
VIT_SIZES = {
    "large": (pytest.approx(307, rel=0.01), 1024, 16, 24, 0.5, 2e-4, 0.1, 16),
    "huge": (about(632), 1280, 16, 32, 0.1, 1e-3, 0.5, 14),
}
AUGMENT = dict(
    rand_augment=9.0,
    rand_augment_std=0.5,
    mixup=0.8,
    cutmix=1.0,
    label_smoothing=0.1,
    image_size=224,
)
IMAGES = paper(dataset="imagenet1k") | code(
    mlp="gelu_erf", bias=True, pool="cls", decay_emb=False, n_class=1000
)
IMAGES |= code(crop_area=0.08, flip=True, schedule="cosine", grad_clip=0.0) | ours(
    residual_init="plain"
)
TABLE_4 = IMAGES | paper(
    AUGMENT, schedule="cosine", min_lr=1e-8, epochs=150, warmup_epochs=60, batch_size=1024
)
TABLE_4 |= paper(init="xavier_cut", grad_clip=0.0)
for size, (millions, d, heads, depth, peak, decay, drop, patch) in VIT_SIZES.items():
    rest = TABLE_4 | paper(millions=millions, n_embd=d, n_head=heads, n_layer=depth, drop_path=drop)
    rest |= code(patch_size=patch, d_ff=4 * d)
    # App. C's text: 0.95
    adamw = paper(optimizer="adamw", learning_rate=1e-3, weight_decay=0.1, betas=(0.9, 0.99))
    for name, layout in (
        (f"vdnt/{size}", DNT),
        (f"vdnt/{size} vdnt/vit", GPT2 | code(norm_eps=1e-6)),
    ):
        RUNS[name] = ("Tables 3, 4", rest | layout | adamw)
        msgdw = rest | layout | MSGDW | paper(learning_rate=peak, weight_decay=decay)
        RUNS[f"{name} vdnt/{size}_msgdw"] = ("Tables 3, 4", msgdw)

# ------------------------------------------------------------------------------------- Blockwise LR
# Table 2: millions of parameters, d_model, d_FF, n_head, depth, lr_max on OpenWebText and on
# MiniPile
TABLE_2 = {
    "gpt2_124m": (124, 768, 3072, 12, 12, 6e-4, 6e-4),
    "llama_134m": (134, 768, 3072, 12, 6, None, 1.2e-3),
    "llama_237m": (237, 1024, 4096, 16, 8, 8e-4, 7.5e-4),
    "llama_522m": (522, 1280, 5120, 20, 15, 8e-4, 4.5e-4),
    "llama_743m": (743, 1664, 6656, 26, 13, 6e-4, None),
    "llama_1175m": (1175, 2048, 5632, 32, 22, 4e-4, None),
}
A1 = ADAMW | paper(schedule="cosine", grad_clip=1.0, floor=1 / 20, blockwise_lr=False)
A1 |= code(dropout=0.0, decay_gains="all", decay_scalars=False)
ON_OWT = OWT | paper(block_size=1024, batch_size=480, max_iters=50_000, warmup_iters=1000)
ON_MINIPILE = paper(
    dataset="minipile", block_size=512, batch_size=300, max_iters=30_000, warmup_iters=600
)
LLAMA = paper(norm="rmsnorm", pos="rope", mlp="swiglu") | code(
    norm_eps=1e-6, tie_weights=False, bias=False
)
LLAMA |= code(init="normal", init_std=0.02, residual_init="plain")
for name, (millions, d, hidden, heads, depth, owt, minipile) in TABLE_2.items():
    rest = A1 | paper(millions=about(millions), n_embd=d, d_ff=hidden, n_head=heads, n_layer=depth)
    rest |= (
        (GPT2 | GPT2_PARTS | code(residual_init="gpt2", init="normal")) if "gpt2" in name else LLAMA
    )
    rest |= code(kv_heads=4 if name == "llama_1175m" else heads)  # App. A: TinyLlama's groups
    command = f"blockwise/{name}"
    if owt:
        RUNS[command] = ("Table 2, A.1", rest | ON_OWT | paper(learning_rate=owt))
        command += (
            f" blockwise/minipile --learning_rate={minipile} --min_lr={(minipile or 0) / 20:g}"
        )
    if minipile:
        RUNS[command] = ("Table 2, A.1", rest | ON_MINIPILE | paper(learning_rate=minipile))

# LR of Emb, QK, FFN, VO and Norm over lr_max; of an untied head: code
ROLES = ("emb", "qk", "ffn", "vo", "gain_in", "head")
RATIOS = {
    "blockwise": ("Eq. 5; from the first step on: code", 10, 8, 6, 4, 1, 1),
    "warmup_end": ("Eq. 5, A.2", 10, 8, 6, 4, 1, 1),
    "emb": ("Table 1, A.2", 10, 1, 1, 1, 1, 1),
    "emb_ffn": ("Table 1, A.2", 10, 1, 6, 1, 1, 1),
    "norm_double": ("Table 1, sec. 6.2", 1, 1, 1, 1, 2, 1),
    "rejected_8643": ("A.2, Fig. 8", 8, 6, 4, 3, 1, 1),
    "rejected_6432": ("A.2, Fig. 8", 6, 4, 3, 2, 1, 1),
    "adam_mini": ("Sec. 6.3, A.3", 1, 1, 1, 1, 1, 1),
    "adam_mini_blockwise": ("Sec. 6.3, A.3", 4, 1, 4, 4, 1, 1),
    "head_10": ("ours", 10, 8, 6, 4, 1, 10),
    "decay_unscaled": ("ours", 10, 8, 6, 4, 1, 1),
}
for overlay, (source, *ratios) in RATIOS.items():
    mini = "adam_mini" in overlay
    late = overlay == "warmup_end"
    unscaled = overlay == "decay_unscaled"
    peak = 8e-4  # Table 2: lr_max
    rates = {role: ratio * peak for role, ratio in zip(ROLES, ratios, strict=True)}
    values = paper(
        optimizer="adam_mini" if mini else "adamw", after=rates, betas=(0.9, 0.95), grad_clip=1.0
    )
    values |= paper(warmed=dict.fromkeys(ROLES, peak) if late else rates)
    decays = {role: 0.1 * peak / rate if unscaled else 0.1 for role, rate in rates.items()}
    values |= code(
        last=dict.fromkeys(ROLES, peak / 20), decays=decays | ({"gain_in": 0.0} if mini else {})
    )
    RUNS[f"blockwise/llama_237m blockwise/{overlay}"] = (source, values)
tied = paper(emb=6e-3, qk=4.8e-3, ffn=3.6e-3, vo=2.4e-3, gain_in=6e-4) | code(pos=6e-4)
RUNS["blockwise/gpt2_124m blockwise/blockwise"] = ("Eq. 5, Table 2", paper(warmed=tied, after=tied))

# ---------------------------------------------------------------------------------------------- DyT
# Table 11, App. A: width, depth, α₀ of attention and other, LR; code, LLaMA's: heads, those of k
# and v, d_ff, millions
TABLE_11 = {
    "7b": (4096, 32, 0.8, 0.2, 3e-4, 32, 32, 11008, 6738.4),
    "13b": (5120, 40, 0.6, 0.15, 3e-4, 40, 40, 13824, 13015.9),
    # the table has 8196, Table 12 8192
    "34b": (8192, 48, 0.2, 0.05, 1.5e-4, 64, 8, 22016, 33744.0),
    "70b": (8192, 80, 0.2, 0.05, 1.5e-4, 64, 8, 28672, 68976.6),
}
# at depths of 8, 16, 32 and 64
TABLE_12 = {1024: (1.0, 1.0), 2048: (1.0, 0.5), 4096: (0.8, 0.2), 8192: (0.2, 0.05)}
DYT = paper(norm="dyt", dyt_squash="tanh", dyt_learn_alpha=True)
FSDP = code(
    schedule="dyt",
    floor=0.1,
    warmup_iters=2000,
    block_size=4096,
    betas=(0.9, 0.95),
    weight_decay=0.1,
)
FSDP |= code(
    optimizer="adamw",
    dropout=0.0,
    grad_clip=1.0,
    decay_gains="all",
    decay_scalars=True,
    decay_emb=True,
)
FSDP |= ours(dataset="c4")  # the paper: The Pile
for name, (width, depth, attn, other, peak, heads, kv, hidden, millions) in TABLE_11.items():
    rest = LLAMA | FSDP | paper(n_embd=width, n_layer=depth, learning_rate=peak)
    rest |= paper(tokens_a_step=2**22, max_iters=round(200e9 / 2**22)) | code(
        n_head=heads, kv_heads=kv, d_ff=hidden
    )
    RUNS[f"dyt/{name} dyt/rmsnorm"] = ("App. A", rest | paper(norm="rmsnorm", scalar=None))
    rest |= (
        DYT
        | paper(alpha=(attn, other), scalar=width**0.5)
        | code(beta=False, millions=about(millions))
    )
    for overlay in ("", " dyt/dyt"):
        RUNS[f"dyt/{name}{overlay} --vocab_size=32000"] = ("Table 11, App. A", rest)
for width, alpha in TABLE_12.items():
    values = DYT | paper(alpha=alpha, scalar=width**0.5) | code(beta=False)
    RUNS[f"dyt/small dyt/dyt --n_embd={width} --n_head=8"] = ("Table 12, App. A", values)

# App. A, Table 13: LR, stochastic depth, betas of ViT-L; shape: code (Dosovitskiy et al.)
CONVNEXT = IMAGES | code(
    AUGMENT, min_lr=1e-6, weight_decay=0.05, batch_size=4096, epochs=300, warmup_epochs=20
)
CONVNEXT |= code(
    optimizer="adamw", betas=(0.9, 0.999), norm="layernorm", patch_size=16, init="normal"
)
VIT_B = CONVNEXT | paper(learning_rate=4e-3, drop_path=0.1)
VIT_B |= code(n_embd=768, n_head=12, n_layer=12, millions=about(86.57))
VIT_L = VIT_B | paper(drop_path=0.4, betas=(0.9, 0.95))
VIT_L |= code(n_embd=1024, n_head=16, n_layer=24, millions=about(304.3))
ON_IMAGES = paper(alpha=(0.5, 0.5), beta=True, scalar=None)  # sec. 4, 7.1; Algorithm 1; App. A
# Table 12's narrowest; width 768: ours
ON_TEXT = paper(alpha=(1.0, 1.0), scalar=768**0.5) | code(beta=False)
for name, values in (("dyt/vit_b", VIT_B), ("dyt/vit_l", VIT_L)):
    RUNS[name] = RUNS[f"{name} dyt/vit_layernorm"] = ("App. A, Table 13", values)
    RUNS[f"{name} --norm=dyt"] = ("Sec. 4, 7.1, App. A", values | DYT | ON_IMAGES)
    RUNS[f"{name} dyt/vit_dyt"] = RUNS[f"{name} --norm=dyt"]
RUNS["vdnt/digits dnt/s1 dyt/vit_dyt"] = ("Sec. 4", DYT | ON_IMAGES)
SQUASHED = {  # Tables 8 and 9: the function, and whether it is of αx
    "dyt": ("tanh", True),
    "hardtanh": ("hardtanh", True),
    "sigmoid": ("sigmoid", True),
    "identity": ("identity", True),
    "no_alpha": ("tanh", False),
    "no_alpha --dyt_squash=hardtanh": ("hardtanh", False),
    "no_alpha --dyt_squash=sigmoid": ("sigmoid", False),
}
for overlay, (squash, learned) in SQUASHED.items():
    for base, kind in (("dyt/vit_b", ON_IMAGES), ("dyt/small", ON_TEXT)):
        values = (
            kind
            | paper(norm="dyt", dyt_squash=squash, dyt_learn_alpha=learned)
            | ({} if learned else paper(alpha=(1.0, 1.0)))
        )
        RUNS[f"{base} dyt/{overlay}"] = ("Table 8" if learned else "Table 9", values)
# Derf, eq. 10, sec. 5; its language code has DyT's scalar on the embedding, and α₀ of 1
DERF = paper(norm="dyt", dyt_squash="erf", dyt_shift=True, alpha=(0.5, 0.5), beta=True)
for base, scalar in {"dnt_small": 768**0.5, "dyt/vit_b": None}.items():
    values = DERF | paper(norms={"attn.pre", "mlp.pre", "final"}) | code(scalar=scalar)
    RUNS[f"{base} layouts/derf"] = ("Eq. 10", values)
# ---------------------------------------------------------------------------------------------- LNS
# Sec. 5.1: LR. The scripts (code): d, heads, depth, d_ff, millions, thousands of steps (1B: sec.
# 5.1) and of warm-up
LNS = {
    "60m": (1e-3, 512, 8, 8, 1376, 58.1, 10, 1),  # GaLore's; steps: ours
    "130m": (1e-3, 768, 12, 12, 2048, 134.1, 20, 2),
    "250m": (1e-3, 768, 16, 24, 2560, 247.4, 40, 4),
    "350m": (1e-3, 1024, 16, 24, 2736, 368.0, 60, 6),  # the script has 5e-4
    "1b": (5e-4, 2048, 32, 24, 5461, 1339.1, 100, 1),
}
SCRIPTS = code(
    dataset="c4",
    batch_size=512,
    block_size=256,
    betas=(0.9, 0.999),
    weight_decay=0.0,
    grad_clip=0.0,
)
SCRIPTS |= code(schedule="cosine", floor=0.1, dropout=0.0, norms=S["s1"], factors={})
SCRIPTS |= paper(optimizer="adamw") | ours(decay_gains="none")  # "Adam", so AdamW without decay
for name, (peak, d, heads, depth, hidden, millions, steps, warmup) in LNS.items():
    rest = (
        LLAMA
        | SCRIPTS
        | paper(learning_rate=peak)
        | code(n_embd=d, n_head=heads, n_layer=depth, d_ff=hidden)
    )
    rest |= code(max_iters=1000 * steps, warmup_iters=1000 * warmup, kv_heads=heads)
    RUNS[f"lns/{name} --vocab_size=32000"] = ("Sec. 5.1", rest | code(millions=about(millions)))
    RUNS[f"lns/{name} lns/lns"] = ("Eq. 12", rest | paper(factors=factors("pre", depth)))
    RUNS[f"lns/{name} lns/skipinit"] = ("Sec. 6", rest | paper(branch_scale="skipinit"))
    mixed = rest | paper(post_norm_blocks=0.25 * depth, norms=S["s1"] | {"attn.post", "mlp.post"})
    flag = f" --post_norm_blocks={depth // 4}" if depth != 12 else ""
    RUNS[f"lns/{name} lns/mix_ln{flag}"] = ("Sec. 5.1: α of 0.25", mixed)
for flag, place in dict(norm="pre", branch="mid", residual="post").items():
    RUNS[f"lns/130m lns/lns --lns={flag}"] = (
        "Table 8, its cells are lost",
        paper(factors=factors(place, 12)),
    )
OLMO = code(norm="layernorm", norm_eps=1e-5, gains=0, pos="rope", mlp="swiglu", bias=False)
OLMO |= code(
    block_size=2048, batch_size=2048, weight_decay=0.1, betas=(0.9, 0.95), grad_clip=1.0, floor=0.1
)
OLMO |= paper(norms=S["s1"], tokens=about(20e9))
OLMO_1B = OLMO | code(
    n_embd=2048, n_head=16, n_layer=16, d_ff=8192, tie_weights=True, learning_rate=4e-4
)
OLMO_1B |= code(millions=about(1176.8)) | paper(init_std=2048**-0.5, residual_init="depth")
OLMO_7B = OLMO | code(
    n_embd=4096, n_head=32, n_layer=32, d_ff=11008, tie_weights=False, learning_rate=3e-4
)
OLMO_7B |= code(millions=about(6888.1)) | paper(
    init_std=4096**-0.5, residual_init="plain", factors=factors("pre", 32)
)
RUNS["lns/olmo_1b --vocab_size=50280"] = ("Table 3; OLMo-1B.yaml", OLMO_1B | paper(factors={}))
RUNS["lns/olmo_1b lns/lns"] = (
    "Table 3",
    OLMO_1B | paper(factors=factors("pre", 16)) | ours(residual_init="plain"),
)
command = (
    "lns/olmo_1b lns/lns --n_layer=32 --n_head=32 --n_embd=4096 --n_ff=11008 --tie_weights=False"
)
RUNS[f"{command} --init_std=0.015625 --learning_rate=3e-4"] = ("Fig. 6; OLMo-7B.yaml", OLMO_7B)
QWEN = (
    LLAMA
    | SCRIPTS
    | paper(tokens=about(6e9))
    | code(n_embd=896, n_head=14, kv_heads=2, n_layer=24, d_ff=4864)
)
QWEN |= code(rope_theta=1e6, tie_weights=True, millions=about(494.0)) | ours(
    learning_rate=1e-3, bias=False
)
RUNS["lns/qwen_500m --vocab_size=151936"] = ("Sec. 5.3.2", QWEN)
RUNS["lns/250m sft/commonsense170k"] = ("Sec. 5.2", paper(dataset="commonsense170k"))
# the recipe: ours, that of DyT's ViT-B
vit_s = VIT_B | ours(n_embd=384, n_head=6, millions=about(22.05))
vit_s |= paper(branch_scale="none", norms=S["s1"], factors=factors("mid", 12))
RUNS["lns/vit_s"] = ("Sec. 5.6", vit_s)
RUNS["lns/vit_s --lns=off"] = ("Sec. 5.6", vit_s | paper(factors={}))

# ------------------------------------------------------------------- scale vectors, initial weights
command = "scale_vectors/llama_120m --n_layer=22 --n_embd=1792 --n_head=14 --n_ff=4778"
RUNS[command] = ("notes on the paper", LLAMA | code(gains=80_640, millions=1028.065024))
nanogpt = GPT2 | GPT2_PARTS | code(init="normal", init_std=0.02, residual_init="gpt2")
RUNS |= {f"gpt2_{size} init/gpt2": ("nanoGPT", nanogpt) for size in SIZES}


@pytest.mark.parametrize("command", RUNS)
def test_a_run_has_the_papers_values(command):
    source, values = RUNS[command]
    found, numbers = resolve(command), (float, tuple, dict)
    wanted = {
        k: pytest.approx(v, rel=1e-6, abs=0) if isinstance(v, numbers) else v
        for k, v in values.items()
    }
    wrong = {name: (found[name], values[name]) for name in values if found[name] != wanted[name]}
    assert not wrong, f"{source}: (ours, the paper's) {wrong}"


def test_the_table_of_alpha_by_width():
    assert DYT_ALPHA == TABLE_12 | {5120: TABLE_11["13b"][2:4]}
