"""The papers' experiments on images, config/vdnt/ and the ViTs of config/dyt/ and config/lns/: they build and train."""

import pytest
import torch

from configurator import read_file
from layers import rules
from nanodnt.engine import Trainer, prepare_model, training_step
from nanodnt.optim import lr_at, make_optimizer, notes
from nanodnt.run.environment import Env
from support.pages import ROOT, config
from vision import ViT

FILES = [*(ROOT / "config/vdnt").glob("*.py"), *(ROOT / "config").glob("*/vit_*.py")]
FILES = {str(path.relative_to(ROOT / "config"))[:-3]: path for path in sorted(FILES)}
TINY = dict(n_layer=2, n_head=2, n_embd=8, image_size=4, patch_size=2, channels=1, n_class=3, batch_size=4)
TINY |= dict(micro_batch_size=4)
# pairs that the headers name
TOGETHER = [("vdnt/large", "vdnt/vit"), ("vdnt/large", "vdnt/large_msgdw"), ("vdnt/huge", "vdnt/vit")]
TOGETHER += [("vdnt/huge", "vdnt/huge_msgdw"), ("dyt/vit_b", "dyt/vit_dyt"), ("dyt/vit_l", "dyt/vit_dyt")]
TOGETHER += [("dyt/vit_b", "dyt/vit_layernorm"), ("vdnt/digits", "vdnt/vit"), ("vdnt/digits", "dnt/s1", "dyt/vit_dyt")]
TOGETHER += [(base, f"dnt/s{i}") for base in ("vdnt/digits", "vdnt/huge") for i in range(1, 6)]
TOGETHER += [("vdnt/large", "vdnt/vit", "vdnt/large_msgdw"), ("vdnt/huge", "dnt/s1", "vdnt/huge_msgdw")]
TOGETHER += [("dyt/vit_b", f"dyt/{name}") for name in ("dyt", "hardtanh", "sigmoid", "identity", "no_alpha")]
TOGETHER += [(name,) for name in FILES if "n_layer" in read_file(FILES[name])]


@pytest.mark.parametrize("names", TOGETHER, ids="+".join)
def test_they_build_train_and_print_no_notes(names):
    model, train = config(*names)
    assert (rules.notes(model), notes(train, ViT.empty(model))) == ([], [])
    model, train = config(*names, **TINY)
    net, env = ViT(model), Env(0, 1, torch.device("cpu"), torch.float32, False)
    prepare_model(net, train, env)
    optimizer, scaler = make_optimizer(net, train), torch.amp.GradScaler("cpu", enabled=False)
    for group in optimizer.param_groups:
        group["lr"] = lr_at(train.warmup_iters, train, group)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    batch = torch.randn(4, 1, 4, 4), torch.tensor([0, 1, 2, 0])
    result = training_step(Trainer(net, optimizer, scaler, 4, train.grad_clip), batch)
    assert result.loss.isfinite() and not result.found_inf
    for name, p in net.named_parameters():
        assert p.isfinite().all() and (not torch.equal(p, before[name]) or not p.grad.any()), name
