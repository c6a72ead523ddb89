"""Documents kept apart in the network: a row of several equals each of them alone, whatever
computes it."""

import copy
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from layers.attention import attend, document_blocks, visible_keys
from model import GPTConfig
from nanodnt.generate import KVCache
from nanodnt.run.compilation import can_use_flex, compile_parts
from support.depth import examples as count
from support.depth import spread
from support.examples import documents
from support.models import ALL, LLAMA, POST, S5, build, depth_of, error, gradients, network, tokens
from support.operators import assert_same_gradients, fresh_compiler, standing_for
from support.tolerances import LOSS, as_near, roundings

ROWS = ((7, 1, 12), (20,), (1, 1, 2, 3, 5, 8))  # tokens of the documents of each row
OTHER_ROWS = ((19, 1), (4, 9, 7), (10, 10))
T = 20


def positions_of(rows):
    """Positions (rows, T) of rows of documents with these numbers of tokens."""
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])


def batch_of(rows, seed=1):
    """idx, targets, positions. Targets that count are few in some documents, and none in a row's
    last but one."""
    positions = positions_of(rows)
    idx, targets = tokens(*positions.shape, seed=seed), tokens(*positions.shape, seed=seed + 100)
    targets[torch.rand(targets.shape, generator=torch.Generator().manual_seed(seed)) < 0.4] = -1
    for row, lengths in enumerate(rows):
        targets[row, sum(lengths[:-2]) : sum(lengths[:-1])] = -1
    return idx, targets, positions


def by_documents(model, idx, targets, positions):
    """(logits (B, T, V), mean loss over the targets that count, {parameter: gradient}), each
    document by itself."""
    model.zero_grad(set_to_none=True)
    pieces, total = [], 0.0
    for row, part in documents(positions):
        logits = model(idx[row : row + 1, part])[0]
        pieces.append(logits.detach())
        total = total + F.cross_entropy(
            logits[0], targets[row, part], ignore_index=-1, reduction="sum"
        )
    loss = total / (targets != -1).sum()
    loss.backward()
    logits = torch.cat(pieces, 1).view(*idx.shape, -1)
    return logits, loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_apart(model, batch):
    """Logits, loss and gradients of a batch are those of its documents, and not those of whole
    rows."""
    idx, targets, positions = batch
    logits, loss, grads = by_documents(model, *batch)
    found, (found_loss, found_grads) = model(idx, positions=positions)[0], gradients(model, *batch)
    if logits.dtype == torch.float64:
        assert error(found, logits) < 1e-11
        assert_same_gradients((found_loss, found_grads), (loss, grads), 1e-10)
    else:
        exact, _, exact_grads = by_documents(copy.deepcopy(model).double(), *batch)
        assert error(found_loss, loss) < LOSS
        assert as_near(found, logits, exact) and as_near(found_grads, grads, exact_grads)
    assert error(model(idx)[0], logits) > 0.01


SOME = (
    "S1",
    "S2 + mqa",
    "post + LN",
    "S5 + dyt + beta",
    "llama + S5",
    "S5 + Mix-LN + LNS + rope",
    "much at once",
)


@pytest.mark.parametrize("name", spread(tuple(ALL), fast=SOME))
def test_a_row_of_documents_is_each_alone(name):
    flags = dict(network(name, depth_of(name))[0], block_size=T)
    for dtype in (torch.float64, torch.float32):
        assert_apart(build(flags, depth_of(name), dtype), batch_of(ROWS))


# -------------------------------------------------------------------------------- the ways to train


@pytest.mark.parametrize("backend", spread(("eager", "aot_eager", "inductor"), fast=("eager",)))
@pytest.mark.parametrize("checkpointing", (False, pytest.param(True, marks=pytest.mark.deep)))
@fresh_compiler()
def test_compiled_by_blocks(backend, checkpointing, monkeypatch):
    """Blocks of one kind share a graph, whose input the mask is; it serves all rows."""
    dtype = torch.float32 if backend == "inductor" else torch.float64
    model, plain = (build(dict(S5, n_kv_head=2, block_size=T), 2, dtype) for _ in "ab")
    with monkeypatch.context() as patch:
        patch.setattr(
            torch, "compile", partial(torch.compile, backend=backend, fullgraph=not checkpointing)
        )
        compile_parts(model.train()).runtime.checkpointing = checkpointing
    torch._dynamo.utils.counters.clear()
    for rows in (ROWS, OTHER_ROWS, ((T,),) * 3):
        batch = batch_of(rows, seed=len(rows[0]))
        ours, (_, *wanted) = gradients(model, *batch), by_documents(plain, *batch)
        if dtype == torch.float64:
            assert_same_gradients(ours, wanted, 1e-10)
        else:
            exact = by_documents(copy.deepcopy(plain).double(), *batch)[2]
            assert error(ours[0], wanted[0]) < LOSS and as_near(ours[1], wanted[1], exact)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
    assert not torch._dynamo.utils.counters["graph_break"]


# ------------------------------------------------------------------------------------ nothing leaks


CUTS = st.sets(st.integers(1, T - 1), max_size=6)  # where documents of a row end
ROWS_OF_DOCUMENTS = st.tuples(
    *[CUTS.map(lambda cuts: [b - a for a, b in pairwise([0, *sorted(cuts), T])])] * 2
)


NETWORKS = [
    build(dict(flags, block_size=T), dtype=torch.float32)
    for flags in (dict(norm="dyt"), dict(LLAMA, **S5))
]


@pytest.mark.parametrize("model", NETWORKS, ids=("learned, tied", "llama, S5"))
@given(st.data(), ROWS_OF_DOCUMENTS)
@settings(max_examples=count(10, 400), deadline=None)
def test_no_document_reads_another(model, data, rows):
    """Logits of all others keep their bits when one document's tokens change; and so do the
    gradients, which at its tokens are 0, where the targets of the others alone count."""
    idx, targets, positions = batch_of(rows)
    row, part = data.draw(st.sampled_from(list(documents(positions))))
    changed, here = idx.clone(), torch.zeros_like(idx, dtype=torch.bool)
    here[row, part] = True
    changed[here] = (changed[here] + 1 + tokens(int(here.sum()), vocab=49, seed=9)) % 50
    targets = tokens(*idx.shape, seed=5).masked_fill(here, -1)
    logits, grads, at_tokens = [], [], []
    hook = model.wte.register_forward_hook(
        lambda module, args, x: at_tokens.append(x) or x.retain_grad()
    )
    for tried in (idx, changed):
        logits.append(model(tried, positions=positions)[0].detach())
        model.zero_grad(set_to_none=True)
        out = model(tried, positions=positions)[0]
        F.cross_entropy(
            out.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum"
        ).backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        assert not at_tokens[-1].grad[here].any() and at_tokens[-1].grad[~here].any()
    hook.remove()
    assert torch.equal(logits[0][~here], logits[1][~here]) and not torch.equal(
        logits[0][here], logits[1][here]
    )
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


# ---------------------------------------------------------------------------------- the mask itself


def random_positions(T, begins, seed=0):
    """Positions (rows, T) where a document begins at each token with a row's probability of
    `begins`."""
    index = torch.arange(T)
    begin = (
        torch.rand(len(begins), T, generator=torch.Generator().manual_seed(seed))
        < torch.tensor(begins)[:, None]
    )
    return index - torch.where(begin, index, 0).cummax(1).values


eager_flex = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
BEGINS = (0.0, 0.003, 0.03, 0.5, 1.0)  # one document, … , of one token each
LISTS = [
    f"{side}_{what}"
    for side in ("kv", "q", "full_kv", "full_q")
    for what in ("num_blocks", "indices")
]
END_WITH_A_TILE = ((128, 128, 256, 128), (127, 129, 255, 129), (129, 127, 257, 127), (1, 384, 255))


@pytest.mark.parametrize(
    "T", spread((100, 128, 256, 300, 384, 511, 640, 1025), fast=(100, 300, 640))
)
def test_blocks_are_torchs(T):
    """Tiles, which torch finds by asking for every pair; and where all are whole, also which ones
    need no mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    positions = positions_of(END_WITH_A_TILE) if T == 640 else random_positions(T, BEGINS, seed=T)
    begin, blocks = torch.arange(T) - positions, document_blocks(positions)
    torchs = create_block_mask(
        lambda b, h, q, k: (k <= q) & (k >= begin[b, q]), len(begin), None, T, T, device="cpu"
    )
    assert torch.equal(blocks.to_dense(), torchs.to_dense())
    if T % 128 == 0:
        assert [
            name for name in LISTS if not torch.equal(getattr(blocks, name), getattr(torchs, name))
        ] == []


COMPILED = [
    pytest.param(n, heads, True, marks=pytest.mark.deep)
    for n, heads in ((512, 4), (512, 2), (300, 2))
]


@eager_flex
@pytest.mark.parametrize("T, kv_heads, compiled", ((200, 2, False), (200, 1, False), *COMPILED))
@fresh_compiler()
def test_flex_attention_is_attention(T, kv_heads, compiled):
    """On a CPU, without gradients. The compiled kernel skips tiles; the eager one does not."""
    if compiled and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("torch compiles flex attention for a CPU with AVX2 alone")
    positions = random_positions(T, BEGINS, seed=7)
    dtype = torch.float32 if compiled else torch.float64
    q, k, v = (torch.randn(5, heads, T, 32, dtype=dtype) for heads in (4, kv_heads, kv_heads))
    call = torch.compile(lambda *args: attend(*args), dynamic=False) if compiled else attend
    with torch.no_grad():
        plain = attend(q, k, v, visible_keys(torch.arange(T), positions, T))
        # 80: sums of 32 products, a softmax, a sum of up to T
        allowed = roundings(80) if compiled else 1e-12
        assert error(call(q, k, v, document_blocks(positions)), plain) < allowed


@eager_flex
def test_a_network_with_flex_attention():
    model, positions = build(dict(LLAMA, block_size=130), 1), random_positions(130, BEGINS[1:])
    idx = tokens(4, 130)
    with torch.no_grad():
        expected = model(idx, positions=positions)[0]
        model.runtime.flex_attention = True
        assert not torch.is_tensor(model.attention_mask(torch.arange(130), positions, None))
        assert error(model(idx, positions=positions)[0], expected) < 1e-12
        assert model.attention_mask(torch.arange(130), None, None) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
@pytest.mark.parametrize(
    "T, by_blocks, checkpointing", ((512, False, False), (300, False, True), (300, True, False))
)
def test_training_with_flex_attention_on_a_gpu(T, by_blocks, checkpointing):
    """Compiled, as train.py does it: gradients of the plain mask on the CPU in float64."""
    torch._dynamo.reset()
    flags = dict(LLAMA, **S5, n_embd=128, block_size=T)
    exact, model = build(flags), build(flags, dtype=torch.float32).cuda().train()
    model.runtime.flex_attention, model.runtime.checkpointing = True, checkpointing
    call = (
        compile_parts(model)
        if by_blocks
        else standing_for(model, torch.compile(model, dynamic=False))
    )
    for seed in (1, 2):
        positions = random_positions(T, BEGINS[:4], seed)
        batch = tokens(4, T, seed=seed), tokens(4, T, seed=seed + 5), positions
        loss, found = gradients(call, *(t.cuda() for t in batch))
        assert_same_gradients(
            (loss.cpu(), {k: g.cpu() for k, g in found.items()}), gradients(exact, *batch), 2e-3
        )


# ------------------------------------------------------------------------------------- with a cache

CACHED = {
    "learned": dict(),
    "llama, S5": dict(LLAMA, **S5),
    "rope": dict(pos="rope"),
    "gqa, post": dict(POST, n_kv_head=2),
    "dyt": dict(norm="dyt"),
}
cached_layouts = pytest.mark.parametrize(
    "name", spread(tuple(CACHED), fast=("learned", "llama, S5"))
)
PARTS = ((9, *[1] * 11), (3, 5, 1, 9, 2), (1, 19), (18, 2), (20,))  # tokens that come together


def cached(name, size=T):
    """(model, empty cache): it has room for `size` tokens."""
    model = build(dict(CACHED[name], block_size=size))
    return model, [KVCache(size) for _ in model.blocks]


def in_parts(model, cache, idx, positions, parts):
    """Logits of idx (B, T), of which `parts` tokens are given at a time."""
    pieces = [
        idx.split(parts, 1),
        [None] * len(parts) if positions is None else positions.split(parts, 1),
    ]
    return torch.cat(
        [model(x, positions=p, cache=cache)[0] for x, p in zip(*pieces, strict=True)], 1
    )


@cached_layouts
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_documents_in_a_cache(name, parts):
    """Rows whose documents begin at other tokens; and rows of one document, with positions and
    without."""
    idx, _, positions = batch_of(ROWS)
    for places in (positions, positions_of(((T,),) * 3), None):
        model, cache = cached(name)
        assert (
            error(in_parts(model, cache, idx, places, parts), model(idx, positions=places)[0])
            < 1e-11
        )
        assert [layer.length for layer in cache] == [T] * len(model.blocks)
    assert error(model(idx)[0], model(idx, positions=positions)[0]) > 0.01


@cached_layouts
def test_what_does_not_fit_is_refused_in_a_line_and_changes_nothing(name):
    model, cache = cached(name, size=9)
    idx, _, positions = (t[:, :12] for t in batch_of(ROWS))
    in_parts(model, cache, idx[:, :6], None, (6,))
    kept = [(layer.k[:, :, :6].clone(), layer.v[:, :, :6].clone()) for layer in cache]
    for wrong in (
        lambda: model(idx[:, :4], cache=cache),
        lambda: model(idx[:, :4], positions=positions[:, :4], cache=cache),
        lambda: model(idx[:, :10], positions=positions[:, :10]),
    ):
        with pytest.raises(ValueError, match="a sequence of 10 tokens does not fit block_size=9$"):
            wrong()
    # beyond the 6 tokens the buffers may hold anything, NaN too
    for layer, (k, v) in zip(cache, kept, strict=True):
        assert layer.length == 6
        assert torch.equal(layer.k[:, :, :6], k) and torch.equal(layer.v[:, :, :6], v)


# ---------------------------------------------------------------------------------- what is tracked


def test_where_flex_attention_is_used():
    """For doc_mask on a GPU; not with dropout, which it has not, nor with heads of fewer than 16
    channels."""
    gpu, cpu = (SimpleNamespace(device=torch.device(name)) for name in ("cuda", "cpu"))
    wide, narrow, drops = (
        GPTConfig(n_embd=d, n_head=4, dropout=p) for d, p in ((64, 0.0), (60, 0.0), (64, 0.1))
    )
    cases = [
        (wide, True, gpu),
        (wide, True, cpu),
        (wide, False, gpu),
        (narrow, True, gpu),
        (drops, True, gpu),
    ]
    assert [can_use_flex(*case) for case in cases] == [True, False, False, False, False]
    blocks = document_blocks(torch.arange(9)[None])
    with pytest.raises(ValueError, match="FlexAttention has no dropout"):
        attend(*torch.randn(3, 1, 4, 9, 16), blocks, dropout=0.1)
