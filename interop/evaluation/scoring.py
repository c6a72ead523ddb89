"""Numbers of a trained model: what it predicts of texts and of answers.

nats_per_token          of a text: mean of −log p over its tokens. bits_per_byte and perplexity follow from it
nats_per_answer_token   mean over all tokens of all answers, the end of text after each included: the val_loss of
                        training on that dataset with doc_mask=True and eval_tokens=0
exact_match             share of the answers of which every token, the end of text included, is the model's most likely
                        one after the true text before it: so what it would write at temperature 0, token for token

An answer of more than `max_answer_tokens` tokens does not count for exact_match, whose standard error is that of
independent answers. Each conversation is read by itself, from its beginning, however the run was trained."""

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from nanodnt.generate import sample_token

MAX_LOGITS = 1 << 26  # that are in memory at a time: 256 MiB


class Example(NamedTuple):
    """Token ids that a model reads by themselves, and those of its predictions that count."""

    inputs: np.ndarray  # (T,)
    places: np.ndarray  # (n,) where in the inputs
    targets: np.ndarray  # (n,) the ids that follow there


class Source(NamedTuple):
    """A text, or conversations, ready to be scored by one model."""

    task: str  # with its name: "text README.md", "answers faq.jsonl"
    examples: list  # an `Example` for each window or conversation
    settings: dict  # as evaluation.json has them; sha256 is that of the file, or of a dataset's val.bin
    n_bytes: int = 0  # of a text in UTF-8
    eot: int | None = None  # the token that ends an answer; None: it is a text

    def answers(self, values: np.ndarray, example: Example) -> list:
        """`values` (n,) of an example's targets, cut into those of each answer."""
        return np.split(values, np.flatnonzero(example.targets == self.eot)[:-1] + 1)


@torch.no_grad()
def predict(model, examples: list, batch_size: int, env, unused=None) -> list:
    """[(nats, hits)] of each example, arrays (n,): −log of the probability of each target, and whether no token is more
    likely. Ids that are no token, `unused` of `find_unused`, do not count there: they are never drawn. A forward pass
    has at most batch_size · block_size inputs, or one example."""
    found, left = [None] * len(examples), sorted(range(len(examples)), key=lambda i: -len(examples[i].inputs))
    bar = tqdm(total=len(examples), desc="scoring", unit=" texts", disable=True if env.rank else None)
    while left:  # some of about the same length; the longest come first: where memory ends, it ends at once
        longest = len(examples[left[0]].inputs)
        n = max(1, batch_size * model.config.block_size // longest)
        rows, left = left[:n], left[n:]
        batch = [examples[i] for i in rows]
        ids = np.zeros((len(batch), longest), np.int64)  # padded on the right, where no other token looks
        for row, example in zip(ids, batch, strict=True):
            row[: len(example.inputs)] = example.inputs
        places = np.concatenate([example.places + longest * row for row, example in enumerate(batch)])
        targets = np.concatenate([example.targets for example in batch]).astype(np.int64)
        ids, places, targets = env.put(*env.pin(ids, places, targets))
        x = model.stream(ids).flatten(0, 1)[places]  # (targets of all, C)
        at_a_time, parts = max(1, MAX_LOGITS // model.config.padded_vocab_size), []
        for part, target in zip(x.split(at_a_time), targets.split(at_a_time), strict=True):
            logits = model.logits(part[None])[0]
            nats = F.cross_entropy(logits, target, reduction="none")
            parts.append((nats, sample_token(logits, temperature=0, unused=unused)[:, 0] == target))
        ends = np.cumsum([len(example.targets) for example in batch])[:-1]
        nats, hits = (np.split(torch.cat(values).cpu().numpy(), ends) for values in zip(*parts, strict=True))
        for i, *both in zip(rows, nats, hits, strict=True):
            found[i] = both
        bar.update(len(rows))
    bar.close()
    return found


def score(model, source: Source, batch_size: int, env, unused=None) -> dict:
    """What evaluation.json holds of a source; the work is split over the processes. All ranks must call it.

    unused      ids that are no token, as `find_unused` returns them"""
    mine, total, right = source.examples[env.rank :: env.world_size], 0.0, 0
    limit = source.settings.get("max_answer_tokens") or math.inf
    for example, (nats, hits) in zip(mine, predict(model, mine, batch_size, env, unused), strict=True):
        total += nats.sum(dtype=np.float64)
        right += sum(len(part) <= limit and part.all() for part in source.answers(hits, example))
    dtype = torch.float32 if env.device.type == "mps" else torch.float64  # mps has no fp64
    total, right = env.sum(torch.tensor([total, right], dtype=dtype, device=env.device)).tolist()
    n_tokens = sum(len(example.targets) for example in source.examples)
    nats, stderr = total / n_tokens, {}
    if source.eot is None:
        bits = total / math.log(2) / source.n_bytes if source.n_bytes else math.nan
        found = dict(nats_per_token=nats, bits_per_byte=bits, perplexity=math.exp(nats) if nats < 700 else math.inf)
        counts = dict(tokens=n_tokens, bytes=source.n_bytes)
    else:
        lengths = [len(part) for e in source.examples for part in source.answers(e.targets, e)]
        short = sum(length <= limit for length in lengths)
        found, counts = dict(nats_per_answer_token=nats), dict(examples=len(source.examples), answers=len(lengths))
        counts |= dict(short_answers=short, answer_tokens=n_tokens)
        if short:  # else there is no exact_match
            found["exact_match"] = share = right / short
            stderr["exact_match"] = math.sqrt(share * (1 - share) / short)
    metrics = {name: dict(value=value, stderr=stderr.get(name)) for name, value in found.items()}
    return dict(metrics=metrics, settings=source.settings, **counts)
