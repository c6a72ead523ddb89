"""How well a trained model predicts texts and answers.

nats_per_token          mean of −log p over the tokens of a text. bits_per_byte and perplexity
                        follow from it
nats_per_answer_token   mean of −log p over all tokens of all answers, with the end of text after
                        each: the val_loss of training on that dataset with doc_mask=True and
                        eval_tokens=0
exact_match             share of the answers that the model would write at temperature 0, token for
                        token: every token, and the end of text, is the most likely one after the
                        true text before it

An answer of more than `max_answer_tokens` tokens does not count for exact_match, whose standard
error is that of independent answers. Each conversation is read by itself, from its beginning,
however the run was trained."""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from model import GPT
from nanodnt.generate import sample_token


class Example(NamedTuple):
    """One sequence of token ids, and the predictions in it that count."""

    inputs: np.ndarray  # (T,)
    places: np.ndarray  # (n,): positions in the inputs whose predictions count
    targets: np.ndarray  # (n,): the ids that follow these positions


class Source(NamedTuple):
    """A text, or conversations, ready to be scored by one model."""

    task: str  # the task and the name of its input: "text README.md", "answers faq.jsonl"
    examples: list[Example]  # windows of a text, or conversations
    settings: dict[str, Any]  # settings for evaluation.json; sha256 is that of the file, or of a
    #   dataset's val.bin
    n_bytes: int = 0  # size of a text in UTF-8
    eot: int | None = None  # the token that ends an answer; None for a text

    def answers(self, values: np.ndarray, example: Example) -> list[np.ndarray]:
        """`values` (n,), one for each target of an example, cut into answers."""
        return np.split(values, np.flatnonzero(example.targets == self.eot)[:-1] + 1)


class Prediction(NamedTuple):
    """The predictions of an example's targets, arrays (n,)."""

    nats: np.ndarray  # −log of the target's probability
    hits: np.ndarray  # whether no token is more likely


@torch.no_grad()
def predict(
    model: GPT, examples: list[Example], batch_size: int, unused: Tensor | None = None
) -> list[Prediction]:
    """The predictions of each example. `unused` of `find_unused`: ids of the vocabulary that are no
    token and are never drawn; they do not count as more likely."""
    predictions = [None] * len(examples)
    device = model.wte.weight.device
    # a batch holds examples of about the same length
    order = sorted(range(len(examples)), key=lambda i: -len(examples[i].inputs))
    starts = range(0, len(order), batch_size)
    for first in tqdm(starts, desc="scoring", unit=" batches", disable=None):
        rows = order[first : first + batch_size]
        ids = np.zeros((len(rows), len(examples[rows[0]].inputs)), np.int64)
        for row, i in enumerate(rows):
            # padding on the right, where no token looks
            ids[row, : len(examples[i].inputs)] = examples[i].inputs
        stream = model.stream(torch.from_numpy(ids).to(device))
        # only the logits of one example at a time are in memory
        for x, i in zip(stream, rows, strict=True):
            targets = torch.from_numpy(examples[i].targets.astype(np.int64)).to(device)
            logits = model.logits(x[examples[i].places][None])[0]
            nats = F.cross_entropy(logits, targets, reduction="none")
            hits = sample_token(logits, temperature=0, unused=unused)[:, 0] == targets
            predictions[i] = Prediction(nats.cpu().numpy(), hits.cpu().numpy())
    return predictions


def score(
    model: GPT, source: Source, batch_size: int, unused: Tensor | None = None
) -> dict[str, Any]:
    """The entry of a source in evaluation.json. `unused`: as for `predict`."""
    predictions = predict(model, source.examples, batch_size, unused)
    total = sum(prediction.nats.sum(dtype=np.float64) for prediction in predictions)
    n_tokens = sum(len(example.targets) for example in source.examples)
    nats = float(total / n_tokens)
    if source.eot is None:
        return {
            "metrics": text_metrics(nats, n_tokens, source.n_bytes),
            "settings": source.settings,
            "tokens": n_tokens,
            "bytes": source.n_bytes,
        }
    answers = []  # the hits of each answer
    for example, prediction in zip(source.examples, predictions, strict=True):
        answers += source.answers(prediction.hits, example)
    limit = source.settings["max_answer_tokens"] or math.inf
    short = [hits for hits in answers if len(hits) <= limit]
    metrics = {"nats_per_answer_token": {"value": nats, "stderr": None}}
    if short:
        share = sum(bool(hits.all()) for hits in short) / len(short)
        stderr = math.sqrt(share * (1 - share) / len(short))
        metrics["exact_match"] = {"value": share, "stderr": stderr}
    return {
        "metrics": metrics,
        "settings": source.settings,
        "answer_tokens": n_tokens,
        "examples": len(source.examples),
        "answers": len(answers),
        "short_answers": len(short),
    }


def text_metrics(nats: float, n_tokens: int, n_bytes: int) -> dict[str, dict[str, float | None]]:
    """The metrics of a text, from its nats per token and its size."""
    bits_per_byte = math.nan
    if n_bytes:
        bits_per_byte = nats * n_tokens / math.log(2) / n_bytes
    perplexity = math.exp(nats) if nats < 700 else math.inf
    return {
        "nats_per_token": {"value": nats, "stderr": None},
        "bits_per_byte": {"value": bits_per_byte, "stderr": None},
        "perplexity": {"value": perplexity, "stderr": None},
    }
