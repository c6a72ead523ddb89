"""Sampling: the KV cache, `generate` compared with a plain loop, and which tokens are drawn, and
how often."""

import pytest
import torch

from nanodnt.generate import attention_kernels, generate, sample_token
from support import reference
from support.depth import spread
from support.models import LLAMA, POST, S5, build, tokens


def plain_loop(model, idx, n, temperature=0.0, generator=None):
    """Sampling without a cache. Past block_size (9) a window restarts at the last 4 tokens and
    grows again."""
    start = 0
    for _ in range(n):
        if idx.shape[1] - start > 9:
            start = idx.shape[1] - 4
        logits = model(idx[:, start:])[0][:, -1]
        if temperature == 0:
            new = logits.max(-1, keepdim=True).indices
        else:
            new = torch.multinomial(reference.softmax(logits / temperature), 1, generator=generator)
        idx = torch.cat((idx, new), dim=1)
    return idx


# tokens of the prompt, tokens to generate; block_size is 9
LENGTHS = ((1, 8), (4, 6), (3, 20), (9, 7), (12, 8))
WALKED = {
    "learned": dict(),
    "gqa": dict(n_kv_head=2),
    "llama S5": dict(LLAMA, **S5),
    "post": dict(POST, pos="rope"),
}


@pytest.mark.parametrize("flags", WALKED.values(), ids=WALKED)
@pytest.mark.parametrize("lengths", spread(LENGTHS, fast=((3, 20), (12, 8))), ids=str)
def test_generate_equals_a_plain_loop(flags, lengths):
    prompt, new = lengths
    model, idx = build(flags), tokens(3, prompt)
    out = generate(model, idx, new, temperature=0)
    assert torch.equal(out, plain_loop(model, idx, new))
    seeded = [torch.Generator().manual_seed(4) for _ in range(2)]
    out = generate(model, idx, new, temperature=1.3, generator=seeded[0])
    assert torch.equal(out, plain_loop(model, idx, new, 1.3, seeded[1]))
    assert out.shape == (3, prompt + new) and torch.equal(out[:, :prompt], idx)


def test_a_gpu_s_cached_attention_is_not_cudnn_s():
    enabled = torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.flash_sdp_enabled
    before = [f() for f in enabled]
    with attention_kernels(torch.device("cuda")):
        assert [f() for f in enabled] == [False, True]
    with attention_kernels(torch.device("cpu")):
        assert [f() for f in enabled] == before
    assert before == [f() for f in enabled] == [True, True]


def test_generate_stops_row_by_row():
    model, idx = build(dict(vocab_size=4)), tokens(4, 2, vocab=4)

    def run(n, stop=None):
        return generate(
            model, idx, n, temperature=5.0, stop=stop, generator=torch.Generator().manual_seed(0)
        )

    for stop in (0, 3):
        expected, ends = run(30), []
        for row in expected:
            hits = (row[2:] == stop).nonzero()
            assert len(hits)
            ends.append(2 + hits[0].item() + 1)
            row[ends[-1] :] = stop
        # rows end at different positions, and a stop token in a prompt ends none
        assert len(set(ends)) > 1
        assert torch.equal(run(30, stop), expected[:, : max(ends)])
        short = max(ends) - 2 - 1  # cut off before the last row ends
        assert torch.equal(run(short, stop), expected[:, : 2 + short])


@pytest.mark.parametrize("tied", (True, False))
def test_padding_tokens_are_never_sampled(tied):
    """Even if their rows of the output table would give them by far the largest logits."""
    model = build(dict(tie_weights=tied))
    table = (model.wte if tied else model.head).weight
    with torch.no_grad():
        # whatever the sign of the stream's sum, some padding token wins
        table[50:57], table[57:] = 1e4, -1e4
    for options in (dict(temperature=0), dict(temperature=100.0), dict(top_k=60)):
        out = generate(
            model, tokens(64, 12), 3, generator=torch.Generator().manual_seed(0), **options
        )
        assert out.max() < 50, options


@pytest.mark.parametrize(
    "options, support",
    (
        (dict(), {0, 1, 2, 3}),
        (dict(temperature=0), {1}),
        (dict(top_k=1), {1}),
        (dict(top_k=3), {0, 1, 3}),
        (dict(top_k=99), {0, 1, 2, 3}),
        (dict(top_p=0.91), {0, 1, 2, 3}),
        (dict(top_p=0.49), {1}),
        (dict(top_k=2, top_p=0.6), {1}),  # of the two that top_k leaves, token 1 has p = 2/3
        (dict(top_p=0.51, temperature=0.5), {1}),  # probabilities squared: .25 of .345
    ),
    ids=str,
)
def test_sampling_support(options, support):
    logits = torch.tensor([0.15, 0.5, 0.1, 0.25]).log().repeat(4000, 1)
    out = sample_token(logits, generator=torch.Generator().manual_seed(0), **options)
    assert out.shape == (4000, 1) and set(out.flatten().tolist()) == support


def test_sampling_treats_rows_apart():
    logits = (
        torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.05, 0.05, 0.9]]).log().repeat(500, 1)
    )
    for options, last in ((dict(top_k=2), {0, 1, 2}), (dict(top_p=0.6), {2})):
        out = sample_token(logits, generator=torch.Generator().manual_seed(0), **options).view(
            500, 3
        )
        assert [set(column.tolist()) for column in out.T] == [{0, 1}, {1, 2}, last]


@pytest.mark.parametrize(
    "options, p",
    (
        (dict(), (0.64, 0.32, 0.04)),
        (dict(temperature=2.0), (0.8, 0.32**0.5, 0.2)),
        (dict(top_k=2), (0.64, 0.32, 0)),
    ),
    ids=str,
)
def test_sampling_frequencies(options, p):
    n, expected = 20000, torch.tensor(p) / sum(p)
    logits = torch.tensor([0.64, 0.32, 0.04]).log().repeat(n, 1)
    out = sample_token(logits, generator=torch.Generator().manual_seed(0), **options)
    counts = out.flatten().bincount(minlength=3)
    assert ((counts - n * expected).abs() <= 5 * (n * expected * (1 - expected)).sqrt()).all()
