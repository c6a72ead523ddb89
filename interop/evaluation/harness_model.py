"""A GPT as lm-evaluation-harness reads it: the harness's own model for `transformers`, around the network in memory.

Only log-likelihoods are computed by code of ours. The harness's own needs the logits of all positions: of 16 windows of
1,024 tokens with GPT-2's vocabulary that is 6.6 GB, and twice the time for a small model."""

import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import Collator, normalize_gen_kwargs
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from interop.evaluation.text import before_text
from interop.huggingface.modeling_nanodnt import NanoDNTConfig, NanoDNTForCausalLM
from interop.huggingface.tokenizer_files import tokenizer_files
from nanodnt.trained import Trained


class HarnessModel(HFLM):
    """`trained`, whose model is on env's device. Each process gets its share of the requests (`rank`, `world_size`),
    and the harness collects the answers.

    ValueError for a tokenizer without a token that begins or ends a text."""

    def __init__(self, trained: Trained, env, batch_size: int):
        if trained.tokenizer.bos is None:
            raise ValueError(
                f"the tokenizer of {trained.source} ({trained.tokenizer.kind}) has no token that begins or ends a "
                "text, which tasks of lm-evaluation-harness need: evaluate it with --tasks=text"
            )
        self.before_text = before_text(trained.tokenizer)
        super().__init__(as_pretrained(trained), tokenizer=as_tokenizer(trained), batch_size=batch_size)
        self.env, self._rank, self._world_size = env, env.rank, env.world_size

    @property
    def prefix_token_id(self) -> int:
        return self.before_text

    @property
    def max_gen_toks(self) -> int:
        """The longest text where a task does not say it."""
        return min(super().max_gen_toks, self.max_length // 2)

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, override_bs: int | None = None) -> list:
        """(log-probability, whether it is the greedy text) of each request (strings or None, context's ids,
        continuation's ids). What is too long loses its beginning."""
        # long ones first; requests that differ in their last token only share a forward pass
        order = Collator(
            requests,
            sort_fn=lambda request: (-len(request[1]) - len(request[2]), *request[1], *request[2]),
            group_by="contexts",
            group_fn=lambda request: request[1] + request[2][:-1],
        )
        answers, bar = [], tqdm(total=len(requests), desc="log-likelihoods", disable=disable_tqdm or self.rank != 0)
        for batch in order.get_batched(n=override_bs or self.batch_size):
            inputs = [(context + continuation)[-(self.max_length + 1) : -1] for _, context, continuation in batch]
            idx = torch.zeros(len(batch), max(map(len, inputs)), dtype=torch.long)
            for row, ids in zip(idx, inputs, strict=True):
                row[: len(ids)] = torch.tensor(ids)  # padded on the right, where no other token looks
            stream = self.model.network.stream(idx.to(self.device))  # (B, T, C)
            for x, ids, (strings, context, continuation) in zip(stream, inputs, batch, strict=True):
                n = len(continuation)
                if n > self.max_length:
                    raise ValueError(f"{n} tokens to score do not fit block_size={self.max_length}")
                found = self.model.network.logits(x[None, len(ids) - n : len(ids)]).log_softmax(-1)  # (1, n, V)
                for _, ids, rows in order.get_cache(strings, context, continuation, found):
                    target, rows = torch.tensor(ids, device=rows.device), rows[0, -len(ids) :]
                    is_greedy = bool((rows.argmax(-1) == target).all())
                    answers.append((rows.gather(1, target[:, None]).sum().item(), is_greedy))
                    bar.update()
        bar.close()
        return order.get_original(answers)

    def generate_until(self, requests, disable_tqdm: bool = False) -> list:
        """The text that continues each context. ValueError where the context and what is asked for have no room."""
        for _, gen_kwargs in (request.args for request in requests):
            n_new = normalize_gen_kwargs(gen_kwargs, self.max_gen_toks)["max_gen_toks"]
            if n_new >= self.max_length:
                raise ValueError(
                    f"the task generates {n_new} tokens, and block_size={self.max_length} has no room for them and a "
                    f"prompt: lower it, --gen_kwargs=max_gen_toks={self.max_length // 2}, say"
                )
        return super().generate_until(requests, disable_tqdm)

    def _model_generate(self, context, max_length, stop, attention_mask, **how):
        """Row by row, since the network has no cache of keys and values for rows with padding."""
        rows = []
        for ids, keep in zip(context, attention_mask.bool(), strict=True):
            padding = int((~keep).sum())
            row = super()._model_generate(ids[keep][None], max_length=max_length - padding, stop=stop, **how)[0]
            rows.append(row[len(ids) - padding :])
        end = self.tokenizer.pad_token_id
        new = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=end)
        return torch.cat((context, new), dim=1)

    def all_gather(self, tensor):
        """The tensors of all processes in one."""
        return torch.stack(self.gather_object(tensor.cpu())).flatten()

    def gather_object(self, obj, dst: int = 0) -> list:
        """The objects of all processes."""
        everyone = [obj] * self.world_size
        if self.env.distributed:
            dist.all_gather_object(everyone, obj, group=self.env.control)
        return everyone

    def barrier(self) -> None:
        self.env.barrier()


def as_pretrained(trained: Trained) -> NanoDNTForCausalLM:
    """The same network, not a copy, with the methods of a `transformers` model."""
    with torch.device("meta"):
        model = NanoDNTForCausalLM(NanoDNTConfig(network=asdict(trained.model.config)))
    model.network = trained.model
    model.generation_config.eos_token_id = trained.tokenizer.eot
    return model


def as_tokenizer(trained: Trained) -> PreTrainedTokenizerFast:
    """The tokenizer as an export has it. A special token's name in a text is ordinary text."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in tokenizer_files(trained.meta, trained.model.config.block_size).items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, split_special_tokens=True)
    tokenizer.eos_token = tokenizer.eos_token or tokenizer.bos_token
    tokenizer.bos_token = tokenizer.bos_token or tokenizer.eos_token
    return tokenizer
