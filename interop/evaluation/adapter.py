"""A GPT as lm-evaluation-harness wants it: log-likelihoods and text, for token ids that the harness has batched.

Made to agree with the harness's own model for `transformers`, lm_eval.models.huggingface.HFLM, to rounding."""

import sys
from itertools import chain

import torch
import torch.distributed as dist
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import Collator, handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

from interop.evaluation.text import before_text
from nanodnt.generate import generate

MAX_LOGITS = 1 << 26  # that are in memory at a time, but for those of one sequence: 256 MiB
MAX_GEN_TOKS = 256  # where a task does not say it, as in HFLM
SAMPLING = ("do_sample", "temperature", "top_k", "top_p")
NEUTRAL = {"num_beams": 1}  # what some tasks say, and what changes nothing


class Adapter(TemplateLM):
    """`model` is a GPT on env's device, in eval mode. Each process gets its share of the requests (`rank`,
    `world_size`), and the harness collects the answers."""

    def __init__(self, model, tokenizer, env, batch_size: int, seed: int):
        super().__init__()
        self.model, self.tokens, self.env, self.batch_size = model, tokenizer, env, batch_size
        self._rank, self._world_size, self._device = env.rank, env.world_size, env.device
        self.max_length = model.config.block_size
        self.first = before_text(tokenizer)
        self.generator = torch.Generator(env.device).manual_seed(seed)
        self.stderr = sys.stderr  # for our bars: `quiet` redirects sys.stderr while the harness runs

    # -------------------------------------------------------------------------------------------------------- tokens

    @property
    def eot_token_id(self):
        return self.tokens.eot

    @property
    def prefix_token_id(self):
        return self.first

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list:
        start = [] if add_special_tokens is False else self.tokens.start
        return [*start, *self.tokens.encode(string)]

    # -------------------------------------------------------------------------------------------------- log-likelihood

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list:
        """(log-probability, whether it is the greedy text) of each (context, continuation)."""
        return super().loglikelihood(requests, disable_tqdm=True)  # the bar below is enough

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list:
        """The log-probability of each text, after the token that begins one."""
        windows = [
            [
                (None, *utils.make_disjoint_window(window))
                for window in utils.get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
                )
            ]
            for request in requests
        ]
        answers = iter(self._loglikelihood_tokens(list(chain(*windows))))
        return [sum(next(answers)[0] for _ in text) for text in windows]

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests, **_) -> list:
        """requests: (strings or None, context's ids, continuation's ids). What is too long loses its beginning."""
        # long ones first; requests that differ in their last token only share a forward pass
        order = Collator(
            requests,
            sort_fn=lambda request: (-len(request[1]) - len(request[2]), *request[1], *request[2]),
            group_by="contexts",
            group_fn=lambda request: request[1] + request[2][:-1],
        )
        answers, bar = [], self.progress("log-likelihoods", len(requests))
        for batch in order.get_batched(n=self.batch_size):
            inputs = [(context + continuation)[-(self.max_length + 1) : -1] for _, context, continuation in batch]
            idx = torch.zeros(len(batch), max(map(len, inputs)), dtype=torch.long)
            for row, ids in zip(idx, inputs, strict=True):
                row[: len(ids)] = torch.tensor(ids)  # padded on the right, where no other token looks
            spans = []
            for ids, (_, _, continuation) in zip(inputs, batch, strict=True):
                if len(continuation) > self.max_length:
                    raise ValueError(f"{len(continuation)} tokens to score do not fit block_size={self.max_length}")
                spans.append((len(ids) - len(continuation), len(ids)))
            x = self.model.stream(idx.to(self.device))  # (B, T, C)
            for (strings, context, continuation), found in zip(batch, self.log_probs(x, spans), strict=True):
                for _, ids, rows in order.get_cache(strings, context, continuation, found[None]):  # (1, T', V)
                    target, rows = torch.tensor(ids, device=rows.device), rows[0, -len(ids) :]
                    is_greedy = bool((rows.argmax(-1) == target).all())
                    answers.append((rows.gather(1, target[:, None]).sum().item(), is_greedy))
                    bar.update()
        bar.close()
        return order.get_original(answers)

    def log_probs(self, x, spans):
        """For each row of the stream x (B, T, C) the log-probabilities (end - start, V) that its positions start to end
        give the next token. The head reads these positions only, and a few rows at a time."""
        lengths, vocab = [end - start for start, end in spans], self.model.config.vocab_size
        first = 0
        while first < len(spans):
            last = first + 1
            while last < len(spans) and sum(lengths[first : last + 1]) * vocab <= MAX_LOGITS:
                last += 1
            picked = torch.cat([x[row, slice(*spans[row])] for row in range(first, last)])[None]  # (1, positions, C)
            yield from self.model.logits(picked)[0].log_softmax(-1).split(lengths[first:last])
            first = last

    # ----------------------------------------------------------------------------------------------------- generation

    def generate_until(self, requests, disable_tqdm: bool = False) -> list:
        """The text that continues each context, up to end of text, a string of `until` or max_gen_toks tokens."""
        prepared = []
        for context, gen_kwargs in (request.args for request in requests):
            n_new = normalize_gen_kwargs(gen_kwargs, MAX_GEN_TOKS)["max_gen_toks"]
            if n_new >= self.max_length:
                raise ValueError(
                    f"the task generates {n_new} tokens, and block_size={self.max_length} has no room for them and a "
                    f"prompt: lower it, --gen_kwargs=max_gen_toks={self.max_length // 2}, say"
                )
            prepared.append((self.tok_encode(context)[n_new - self.max_length :], gen_kwargs))
        # a batch: prompts of one length, with the same settings
        order = Collator(
            prepared,
            sort_fn=lambda request: (-len(request[0]), *request[0]),
            group_by="gen_kwargs",
            group_fn=lambda request: {**request[1], " length": len(request[0])},
        )
        texts, bar = [], self.progress("texts", len(requests))
        for batch in order.get_batched(n=self.batch_size):
            texts += self.generate_batch([prompt or [self.first] for prompt, _ in batch], batch[0][1])
            bar.update(len(batch))
        bar.close()
        return order.get_original(texts)

    def generate_batch(self, prompts: list, gen_kwargs: dict) -> list:
        """The texts that continue the prompts, token ids of one length."""
        how = normalize_gen_kwargs(gen_kwargs, MAX_GEN_TOKS)
        until = handle_stop_sequences(how.pop("until"), eos=None)
        n_new, sampling = how.pop("max_gen_toks"), {name: how.pop(name, None) for name in SAMPLING}
        if how := {name: value for name, value in how.items() if value != NEUTRAL.get(name)}:
            raise ValueError(f"{', '.join(how)}: unknown settings of generation; allowed are {', '.join(SAMPLING)}")
        temperature = sampling["temperature"] or 0 if sampling["do_sample"] else 0

        def ended(new):
            texts = map(self.tokens.decode, new.tolist())
            return torch.tensor([any(end in text for end in until if end) for text in texts], device=new.device)

        out = generate(
            self.model,
            torch.tensor(prompts, device=self.device),
            n_new,
            temperature=temperature,
            top_k=sampling["top_k"] or None,
            top_p=sampling["top_p"],
            stop=self.tokens.eot,
            generator=self.generator,
            ended=ended,
        )
        texts = map(self.tokens.decode, out[:, len(prompts[0]) :].tolist())  # without end of text
        return [postprocess_generated_text(text, until, None) for text in texts]

    # ------------------------------------------------------------------------------------------------ other processes

    def all_gather(self, tensor):
        """The tensors of all processes in one."""
        return torch.stack(self._gather(tensor.cpu())).flatten()

    def gather_object(self, obj, dst: int = 0):
        """The objects of all processes, on process `dst`; None on the others."""
        everyone = self._gather(obj)
        return everyone if self.rank == dst else None

    def _gather(self, obj) -> list:
        if not self.env.distributed:
            return [obj]
        everyone = [None] * self.world_size
        dist.all_gather_object(everyone, obj, group=self.env.control)
        return everyone

    def barrier(self) -> None:
        self.env.barrier()

    def progress(self, what: str, total: int):
        """A progress bar on the first process, on a terminal."""
        return tqdm(total=total, desc=what, file=self.stderr, disable=None if self.env.main else True, leave=False)
