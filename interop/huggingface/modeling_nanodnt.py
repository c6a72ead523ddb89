"""The network as a model of Hugging Face's `transformers`: for loading exported folders, generation and fine-tuning.

An exported folder carries a copy of this file, of model.py and of layers/ (see carry.py), and `transformers` imports
the copies: AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True). Nothing in this repository imports it.
"""

from dataclasses import asdict

import torch
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.generation import StoppingCriteriaList
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from model import GPT, GPTConfig

logger = logging.get_logger(__name__)
# what `transformers` calls a cache: older versions past_key_values
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class NanoDNTConfig(PretrainedConfig):
    """`network` holds GPTConfig's fields, in a dict of their own: some have the names of `transformers`' own fields.
    The sizes beside it are copies for tools that look for them under the usual names."""

    model_type = "nanodnt"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(self, network: dict | None = None, **kwargs):
        c = GPTConfig(**network or {})
        kwargs["tie_word_embeddings"] = False  # a tied head is no parameter here, so `transformers` has nothing to tie
        super().__init__(**kwargs)
        self.network = asdict(c)
        self.vocab_size, self.max_position_embeddings = c.vocab_size, c.block_size
        self.hidden_size, self.intermediate_size, self.num_hidden_layers = c.n_embd, c.ffn_width, c.n_layer
        self.num_attention_heads, self.num_key_value_heads = c.n_head, c.n_kv_head or c.n_head
        self.head_dim = c.head_dim


class LayerCache:
    """One layer of a `transformers` cache, as GPT takes it: the methods of nanodnt.generate's KVCache."""

    needs_mask = False

    def __init__(self, cache: DynamicCache, layer: int):
        self.cache, self.layer = cache, layer

    @property
    def length(self) -> int:
        return self.cache.get_seq_length(self.layer)

    def n_keys(self, T: int) -> int:
        return self.length + T

    def extend(self, k, v):
        """Append k and v, each (B, H_kv, T, head_dim). Returns (all keys, all values)."""
        return self.cache.update(k, v, self.layer)


class NanoDNTForCausalLM(PreTrainedModel, GenerationMixin):
    """GPT with the methods of a `transformers` model. Parameters have GPT's names after "network.".

    With experts, routers are trained for more than the loss, in training mode: `network.set_runtime(balance_coef=…,
    z_coef=…)` says how much, 0.01 and 0 unless called. `loss` stays the cross-entropy, and the penalties enter the
    gradient, as `loss.backward()` needs them. Where num_items_in_batch is given, as by Trainer, they count as much as
    this call's labels do. A loop that multiplies the loss by something (fp16's scale, 1/steps) has to pass that factor,
    a tensor, to `network.set_runtime(loss_scale=…)`, and to compute the loss from the logits: labels set it anew.
    Padding counts as load. The biases of balance=bias stay as they are: `transformers` does not know their rule."""

    config_class = NanoDNTConfig
    supports_gradient_checkpointing = True
    _no_split_modules = ["GPT"]  # all on one device: a tied head reads the embedding
    _supports_sdpa = True

    def __init__(self, config: NanoDNTConfig):
        super().__init__(config)
        self.network = GPT(GPTConfig(**config.network), seed=torch.initial_seed())
        for tensor in (*self.network.parameters(), *self.network.buffers()):
            tensor._is_hf_initialized = not tensor.is_meta  # GPT has set the values, unless a file is to bring them
        self.post_init()

    def _init_weights(self, module):
        """Called for each module that may have parameters without values: the file should have brought them."""
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        missing = {id(tensor) for tensor in own if not getattr(tensor, "_is_hf_initialized", False)}
        if missing:
            names = [n for n, t in self.state_dict(keep_vars=True).items() if id(t) in missing]
            raise ValueError(f"the weights lack {', '.join(names)}, or have other shapes: export the model again")

    def forward(
        self, input_ids=None, attention_mask=None, past_key_values=None, labels=None, use_cache=None, logits_to_keep=0,
        return_dict=None, cache=None, **kwargs,
    ):  # fmt: skip
        """input_ids (B, T) → logits (B, T, vocab_size) in fp32, and with labels (B, T) the loss.

        attention_mask   (B, cached + T), 0 for padding on either side, which changes no other token's logits
        cache            a DynamicCache, which input_ids continue; past_key_values is its name in older versions
        labels           −100 = ignored; position t predicts label t + 1. Padding predicts nothing
        use_cache        return a cache (None: unless training). Batches with padding have none
        logits_to_keep   how many logits, counted from the end, or their positions; 0 = all
        """
        self._refuse(input_ids, labels, logits_to_keep, kwargs)
        if labels is not None:
            items = kwargs.get("num_items_in_batch")
            scale = None if items is None else labels[:, 1:].ne(-100).sum() / items
            self.network.set_runtime(loss_scale=scale)
        cache = past_key_values if cache is None else cache
        if cache is None and (not self.training if use_cache is None else use_cache):
            cache = DynamicCache()
        keep = self._tokens_of(attention_mask, input_ids, cache)  # (B, T), or None: no padding
        if keep is None:
            layers = None if cache is None else [LayerCache(cache, i) for i in range(len(self.network.blocks))]
            x = self.network.stream(input_ids, cache=layers)
        else:
            x, cache = self._padded_stream(input_ids, keep), None

        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits, loss = self.network.logits(x[:, positions]), None
        if labels is not None:
            if keep is not None:  # what stands after padding has nothing to be predicted from; nor has the first token
                labels = labels.masked_fill(~keep.roll(1, dims=1), -100)
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()

    def _refuse(self, input_ids, labels, logits_to_keep, kwargs: dict) -> None:
        """ValueError for arguments of other models, which must not be ignored."""
        known = kwargs | {"num_items_in_batch": None}  # Trainer's, for the loss
        if unknown := [name for name, v in known.items() if v is not None and v is not False]:
            raise ValueError(f"this network does not take {', '.join(unknown)}: leave it out")
        if input_ids is None:
            raise ValueError("this network needs input_ids")
        if labels is not None and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            raise ValueError("labels need all logits: leave logits_to_keep out")
        if self.training and self.config.network["sigma_reparam"]:
            logger.warning_once("sigma_reparam: call model.network.power_iteration() after every optimizer step")

    def _tokens_of(self, mask, input_ids, cache):
        """Which of input_ids (B, T) are tokens and not padding: (B, T) bool, or None for all."""
        if cache is not None and not isinstance(cache, DynamicCache):
            raise ValueError(f"past_key_values must be a DynamicCache, not a {type(cache).__name__}")
        if mask is None:
            return None
        cached = cache.get_seq_length() if cache is not None else 0
        B, T = input_ids.shape
        if mask.shape != (B, cached + T):
            needed = f"{cached} cached + {T} new tokens"
            raise ValueError(f"attention_mask is {tuple(mask.shape)}, but needs ({B}, {cached + T}): {needed}")
        keep = mask.bool()
        if keep.all():
            return None
        if cached:
            raise ValueError("attention_mask has padding, but past_key_values none: give the whole sequences instead")
        if (keep[:, 1:] & ~keep[:, :-1]).sum(1).add(keep[:, 0]).ne(1).any():
            raise ValueError("attention_mask has a row without tokens, or padding between tokens: pad on the left")
        return keep

    def _padded_stream(self, input_ids, keep):
        """The stream (B, T, C) after the last block for rows with padding, without a cache: each row is moved to the
        left, where its positions are those it has alone, and what stands to its right cannot change it."""
        lengths = keep.sum(1, keepdim=True)
        filled = torch.arange(int(lengths.max()), device=keep.device) < lengths  # (B, longest)
        packed = input_ids.new_zeros(filled.shape)
        packed[filled] = input_ids[keep]
        stream = self.network.stream(packed)
        x = stream.new_zeros(*keep.shape, stream.shape[-1])
        x[keep] = stream[filled]
        return x

    def train(self, mode: bool = True):
        """As in torch. `from_pretrained`, which calls it last, has replaced the parameters by trainable ones."""
        for router in self.network.routers().values():
            if router.choice_bias is not None:  # its gradient is a count, which would be all of the gradient's norm
                router.choice_bias.requires_grad_(False)
        return super().train(mode)

    def generate(self, inputs=None, **kwargs):
        """As in `transformers`; texts end where the longest fills the context, padding not counted."""
        longest, mask = self.config.max_position_embeddings, kwargs.get("attention_mask")
        longest += 0 if mask is None else int(mask.eq(0).sum(1).min())
        ends = [lambda ids, *_, **__: torch.full((len(ids),), ids.shape[1] >= longest, device=ids.device)]
        ends += kwargs.pop("stopping_criteria", None) or []
        return super().generate(inputs, stopping_criteria=StoppingCriteriaList(ends), **kwargs)

    def prepare_inputs_for_generation(
        self, input_ids, past_key_values=None, attention_mask=None, cache_position=None, next_sequence_length=None,
        is_first_iteration=None, cache=None, **kwargs,
    ):  # fmt: skip
        """Arguments of the next `forward`, from the sequences so far: what the cache does not hold yet. That is counted
        here, since a cache stays empty where there is padding; cache_position and the next two are not used."""
        cache = past_key_values if cache is None else cache
        cached = cache.get_seq_length() if cache is not None else 0
        if cached:
            total = input_ids.shape[1] if attention_mask is None else attention_mask.shape[1]
            if total <= cached:
                raise ValueError(f"the cache holds {cached} tokens, the input {total}: give both input and cache whole")
            input_ids = input_ids[:, cached - total :]
        return dict(kwargs, input_ids=input_ids, attention_mask=attention_mask, **{CACHE: cache})

    def get_input_embeddings(self):
        return self.network.wte

    def get_output_embeddings(self):
        return self.network.head  # None if it is tied

    def resize_token_embeddings(self, new_num_tokens=None, *args, **kwargs):
        """The table, if its size stays; ValueError otherwise: the network ends the vocabulary at vocab_size."""
        size = self.config.vocab_size
        if new_num_tokens not in (None, size):
            raise ValueError(f"the vocabulary has {size} tokens, which cannot become {new_num_tokens}")
        return self.network.wte

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.network.runtime.checkpointing

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs=None):
        """Always with use_reentrant=False, whatever the arguments say."""
        self.network.runtime.checkpointing = True

    def gradient_checkpointing_disable(self):
        self.network.runtime.checkpointing = False
