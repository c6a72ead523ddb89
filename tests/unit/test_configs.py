"""The papers' experiments under config/: they build, train and go together; test_paper_values.py
has their values.

There are two kinds of file: an experiment (size, data, optimizer; it sets n_layer), and an overlay
(a few lines that go on top of an experiment).
"""

import re
from itertools import product

import pytest
import torch

from configurator import configure, describe
from layers import rules
from model import GPTConfig
from nanodnt.engine import Trainer, prepare_model, split_batch, training_step
from nanodnt.optim import lr_at, make_optimizer, notes
from nanodnt.optim.groups import group_table
from nanodnt.run.environment import Env
from nanodnt.settings import TrainConfig
from nanodnt.tasks import task_of
from nanodnt.weights import profile_admin
from support.pages import CONFIGS, ROOT, config, keys_of, outline

pytestmark = pytest.mark.house
FILES = {
    str(path.relative_to("config"))[:-3]: ROOT / path for path in CONFIGS if len(path.parts) == 3
}
# ours; images, see below; nanoGPT's, see tests/tools/test_nanogpt.py
OTHERS = r"moe/small$|claims/|track/mini$|studies/|vdnt/|.*/vit_|nanogpt/(gpt2|shakespeare_char)$"
FILES = {name: path for name, path in FILES.items() if not re.match(OTHERS, name)}
KEYS = {name: keys_of(path) for name, path in FILES.items()}
EXPERIMENTS = [name for name in FILES if "n_layer" in KEYS[name]]
OVERLAYS = [name for name in FILES if name not in EXPERIMENTS]
OF_IMAGES = ["vdnt/large", "vdnt/huge", "dyt/vit_b", "dyt/vit_l", "lns/vit_s"]
SIZES_OF_DNT = ["dnt_small", "dnt_large", "dnt_xl", "gpt2_small", "gpt2_large", "gpt2_xl"]
BASE = {
    "lns": "lns/130m",
    "dyt": "dyt/small",
    "scale_vectors": "scale_vectors/llama_120m",
    "dnt": "dnt_small",
}
BASE |= {
    "blockwise": "blockwise/llama_237m",
    "optimizers": "dnt_small",
    "decay": "dnt_small",
    "init": "gpt2_small",
}
BASE |= {"nanogpt": "dyt/small", "layouts": "dnt_small", "track": "track/base"}
BASE |= {"sft": "lns/250m"}  # the model of the run that a fine-tuning starts from
# as small as the flags allow: 32 groups of 2 channels, 3 Post-LN blocks of 4
TINY = dict(n_layer=4, n_head=2, n_embd=64, n_ff=96, block_size=8, vocab_size=64)
TINY_IMAGES = dict(n_layer=2, n_head=2, n_embd=8, image_size=4, patch_size=2, channels=1, n_class=3)
TINY_IMAGES |= dict(batch_size=4, micro_batch_size=4)


# -------------------------------------------------------------------------------------- experiments


@pytest.mark.parametrize("name", [*EXPERIMENTS, *OF_IMAGES])
def test_experiments_split_over_gpus_end_at_min_lr_and_print_no_notes(name):
    model, c = config(name)
    # 300 is the paper's, and does not split over 8
    for gpus in (1, 2, 4) if c.batch_size == 300 else (1, 2, 4, 8):
        assert c.micro_batch_size in (0, split_batch(c.batch_size, c.micro_batch_size, gpus)[0])
    assert lr_at(c.max_iters - 1, c) == pytest.approx(c.min_lr, rel=1e-3)
    assert rules.notes(model) == notes(c, outline(model)) == []


def test_every_experiment_has_a_run_directory_of_its_own():
    assert len({KEYS[name]["out_dir"] for name in EXPERIMENTS}) == len(EXPERIMENTS)


# ----------------------------------------------------------------------------------------- overlays


@pytest.mark.parametrize("baseline", ["lns/pre_ln", "scale_vectors/shared", "dyt/rmsnorm"])
def test_the_baseline_overlay_changes_nothing_in_its_family(baseline):
    base = BASE[baseline.split("/")[0]]
    assert config(base) == config(base, baseline)


# images: the sizes, and pairs that the headers name
IMAGES = [*((name,) for name in OF_IMAGES), ("vdnt/digits",), ("dyt/vit_b", "dyt/vit_layernorm")]
IMAGES += [
    ("vdnt/large", "vdnt/vit"),
    ("vdnt/large", "vdnt/large_msgdw"),
    ("vdnt/huge", "vdnt/vit"),
]
IMAGES += [
    ("vdnt/huge", "vdnt/huge_msgdw"),
    ("dyt/vit_b", "dyt/vit_dyt"),
    ("dyt/vit_l", "dyt/vit_dyt"),
]
IMAGES += [("vdnt/digits", "vdnt/vit"), ("vdnt/digits", "dnt/s1", "dyt/vit_dyt")]
IMAGES += [(base, f"dnt/s{i}") for base in ("vdnt/digits", "vdnt/huge") for i in range(1, 6)]
IMAGES += [
    ("vdnt/large", "vdnt/vit", "vdnt/large_msgdw"),
    ("vdnt/huge", "dnt/s1", "vdnt/huge_msgdw"),
]
IMAGES += [
    ("dyt/vit_b", f"dyt/{name}") for name in ("dyt", "hardtanh", "sigmoid", "identity", "no_alpha")
]
# true of the base model of this file
NOTES = {"decay/dyt": ["decay_scalars has no effect: the model has no learned scalars or biases"]}
NOTES["optimizers/track_3"] = [  # its rates are for an untied head
    "blockwise_lr: the paper has ratios for adamw and adam_mini; those for muon are our choice",
    *NOTES["decay/dyt"],
    "lr_ratio_head has no effect: the model has no head of its own",
]


@pytest.mark.parametrize(
    "names", [*((BASE[n.split("/")[0]], n) for n in OVERLAYS), *IMAGES], ids="+".join
)
def test_files_together_build_train_and_print_no_notes(names):
    model, train = config(*names)
    assert (rules.notes(model), notes(train, outline(model))) == ([], NOTES.get(names[-1], []))
    model, train = config(*names, **TINY_IMAGES if model.patch_size else TINY)
    net = task_of(model).network()(model)
    batch = (torch.randn(4, 1, 4, 4), torch.tensor([0, 1, 2, 0]))
    if not model.patch_size:
        batch = torch.arange(32).view(4, 8).flip(0), torch.arange(32).view(4, 8)
        profile_admin(net, batch[0])
    prepare_model(net, train, Env(0, 1, torch.device("cpu"), torch.float32, False))
    optimizer = make_optimizer(net, train)  # refuses decay of gains that the model does not have
    decay = {g["role"]: g["weight_decay"] > 0 for g in optimizer.param_groups}
    wanted = {
        "all": ("gain_in", "gain_out"),
        "input": ("gain_in",),
        "output": ("gain_out",),
        "none": (),
    }
    for role in decay.keys() & {"gain_in", "gain_out"}:
        assert decay[role] == (role in wanted[train.decay_gains])
    for group in optimizer.param_groups:
        group["lr"] = lr_at(train.warmup_iters, train, group)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    trainer = Trainer(net, optimizer, scaler, 4, train.grad_clip)
    for _ in range(2):  # SOAP's first step makes its bases alone
        result = training_step(trainer, batch)
        assert result.loss.isfinite() and not result.found_inf
    for name, p in net.named_parameters():
        assert p.isfinite().all() and (not torch.equal(p, before[name]) or not p.grad.any()), name


def test_a_start_is_short():
    """It prints 40 lines at most before the first step: 16 leave room for the lines that
    tests/runs/test_console.py counts, those of a GPU, and notes."""
    overlays = [(BASE[name.split("/")[0]], name) for name in OVERLAYS]
    alone = [(name,) for name in [*EXPERIMENTS, *SIZES_OF_DNT, "moe/small", "quickstart"]]
    for names in [*alone, *overlays, *IMAGES]:
        files = [f"{ROOT}/config/{name}.py" for name in names]
        model, train = config(*names)
        given = configure(GPTConfig, TrainConfig, argv=files).given
        settings = describe(model, train, given=given)
        n_groups = len(group_table(outline(model), train))
        assert settings.count("\n") + 1 + n_groups + 1 <= 40 - 16, names


@pytest.mark.deep
def test_overlays_start_after_every_size():
    """Those of optimizers, and nanoGPT's network, after all; those of LNS after its deeper models,
    without a note."""
    of_all = ("optimizers", "blockwise", "decay", "nanogpt")
    over = [name for name in OVERLAYS if name.split("/")[0] in of_all]
    for size, overlay in product(
        [*EXPERIMENTS, *SIZES_OF_DNT, "quickstart", "shakespeare_char"], over
    ):
        config(size, overlay)
    for size, overlay in product(["lns/250m", "lns/350m", "lns/1b"], OVERLAYS):
        assert not overlay.startswith("lns/") or rules.notes(config(size, overlay)[0]) == []
