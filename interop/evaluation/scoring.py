"""Numbers of a trained model: what it predicts of texts and of answers.

nats_per_token          of a text: mean of −log p over its tokens. bits_per_byte and perplexity follow from it
nats_per_answer_token   mean over all tokens of all answers, the end of text after each included: the val_loss of
                        training on that dataset with doc_mask=True and eval_tokens=0
exact_match             share of the answers of which every token, the end of text included, is the model's most likely
                        one after the true text before it: so what it would write at temperature 0,
                        token for token

An answer of more than `max_answer_tokens` tokens does not count for exact_match, whose standard
error is that of independent answers. Each conversation is read by itself, from its beginning,
however the run was trained."""

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from nanodnt.generate import sample_token


class Example(NamedTuple):
    """Token ids that a model reads by themselves, and those of its predictions that count."""

    inputs: np.ndarray  # (T,)
    places: np.ndarray  # (n,) where in the inputs
    targets: np.ndarray  # (n,) the ids that follow there


class Source(NamedTuple):
    """A text, or conversations, ready to be scored by one model."""

    task: str  # with its name: "text README.md", "answers faq.jsonl"
    examples: list  # an `Example` for each window or conversation
    settings: dict  # as evaluation.json has them; sha256 is that of the file, or of a dataset's
    #   val.bin
    n_bytes: int = 0  # of a text in UTF-8
    eot: int | None = None  # the token that ends an answer; None: it is a text

    def answers(self, values: np.ndarray, example: Example) -> list:
        """`values` (n,) of an example's targets, cut into those of each answer."""
        return np.split(values, np.flatnonzero(example.targets == self.eot)[:-1] + 1)


@torch.no_grad()
def predict(model, examples: list, batch_size: int, unused=None) -> list:
    """[(nats, hits)] of each example, arrays (n,): −log of the probability of each target, and
    whether no token is more likely. Ids that are no token, `unused` of `find_unused`, do not count
    there: they are never drawn."""
    found, device = [None] * len(examples), model.wte.weight.device
    # those of a batch are about as long
    order = sorted(range(len(examples)), key=lambda i: -len(examples[i].inputs))
    for first in tqdm(
        range(0, len(order), batch_size), desc="scoring", unit=" batches", disable=None
    ):
        rows = order[first : first + batch_size]
        ids = np.zeros((len(rows), len(examples[rows[0]].inputs)), np.int64)
        for row, i in enumerate(rows):
            # padding on the right, where no token looks
            ids[row, : len(examples[i].inputs)] = examples[i].inputs
        stream = model.stream(torch.from_numpy(ids).to(device))
        # the logits of one example at a time are in memory
        for x, i in zip(stream, rows, strict=True):
            targets = torch.from_numpy(examples[i].targets.astype(np.int64)).to(device)
            logits = model.logits(x[examples[i].places][None])[0]
            nats = F.cross_entropy(logits, targets, reduction="none")
            hits = sample_token(logits, temperature=0, unused=unused)[:, 0] == targets
            found[i] = nats.cpu().numpy(), hits.cpu().numpy()
    return found


def score(model, source: Source, batch_size: int, unused=None) -> dict:
    """What evaluation.json holds of a source. unused: ids that are no token, as `find_unused`
    returns them."""
    predicted = predict(model, source.examples, batch_size, unused)
    total = sum(nats.sum(dtype=np.float64) for nats, _ in predicted)
    n_tokens = sum(len(example.targets) for example in source.examples)
    nats = float(total / n_tokens)
    if source.eot is None:
        bits = nats * n_tokens / math.log(2) / source.n_bytes if source.n_bytes else math.nan
        perplexity = math.exp(nats) if nats < 700 else math.inf
        found = dict(nats_per_token=nats, bits_per_byte=bits, perplexity=perplexity)
        metrics = {name: dict(value=value, stderr=None) for name, value in found.items()}
        return dict(
            metrics=metrics, settings=source.settings, tokens=n_tokens, bytes=source.n_bytes
        )
    answers = [
        hits
        for example, (_, all_hits) in zip(source.examples, predicted, strict=True)
        for hits in source.answers(all_hits, example)
    ]
    limit = source.settings["max_answer_tokens"] or math.inf
    short = [hits for hits in answers if len(hits) <= limit]
    metrics = dict(nats_per_answer_token=dict(value=nats, stderr=None))
    if short:
        share = sum(bool(hits.all()) for hits in short) / len(short)
        metrics["exact_match"] = dict(
            value=share, stderr=math.sqrt(share * (1 - share) / len(short))
        )
    counts = dict(examples=len(source.examples), answers=len(answers), short_answers=len(short))
    return dict(metrics=metrics, settings=source.settings, answer_tokens=n_tokens, **counts)
