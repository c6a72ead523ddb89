"""The network as a model of Hugging Face's `transformers`: for loading exported folders, generation
and fine-tuning.

An exported folder carries a copy of this file, of model.py and of layers/ (see carry.py), and
`transformers` imports the copies: AutoModelForCausalLM.from_pretrained(FOLDER,
trust_remote_code=True). Nothing in this repository imports it.
"""

from dataclasses import asdict

import torch
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from model import GPT, GPTConfig

# what `transformers` calls a cache: older versions past_key_values
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class NanoDNTConfig(PretrainedConfig):
    """`network` holds GPTConfig's fields, in a dict of their own: some have the names of
    `transformers`' own fields. The sizes beside it are copies for tools that look for them under
    the usual names."""

    model_type = "nanodnt"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(self, network: dict | None = None, **kwargs):
        c = GPTConfig(**network or {})
        # a tied head is no parameter here, so `transformers` has nothing to tie
        kwargs["tie_word_embeddings"] = False
        super().__init__(**kwargs)
        self.network = asdict(c)
        self.vocab_size, self.max_position_embeddings = c.vocab_size, c.block_size
        self.hidden_size, self.intermediate_size, self.num_hidden_layers = (
            c.n_embd,
            c.ffn_width,
            c.n_layer,
        )
        self.num_attention_heads, self.num_key_value_heads = c.n_head, c.n_kv_head or c.n_head
        self.head_dim = c.head_dim


class LayerCache:
    """One layer of a `transformers` cache, as GPT takes it: the methods of nanodnt.generate's
    KVCache."""

    def __init__(self, cache: DynamicCache, layer: int):
        self.cache, self.layer = cache, layer

    @property
    def length(self) -> int:
        return self.cache.get_seq_length(self.layer)

    def extend(self, k, v):
        """Append k and v, each (B, H_kv, T, head_dim). Returns (all keys, all values)."""
        return self.cache.update(k, v, self.layer)


class NanoDNTForCausalLM(PreTrainedModel, GenerationMixin):
    """GPT with the methods of a `transformers` model. Parameters have GPT's names after "network.".

    Routers of experts are trained for the loss alone: `network.set_runtime(balance_coef=0.01)` adds
    the balance loss to the gradient. The biases of balance=bias stay as they are: `transformers`
    does not know their rule."""

    config_class = NanoDNTConfig
    _no_split_modules = ["GPT"]  # all on one device: a tied head reads the embedding
    _supports_sdpa = True

    def __init__(self, config: NanoDNTConfig):
        super().__init__(config)
        self.network = GPT(GPTConfig(**config.network), seed=torch.initial_seed())
        self.network.set_runtime(balance_coef=0.0)
        self.post_init()

    def _init_weights(self, module):
        """Nothing: GPT has set the values, unless a file is to bring them."""

    def forward(
        self, input_ids=None, attention_mask=None, past_key_values=None, labels=None, use_cache=None, logits_to_keep=0,
        cache=None, **kwargs,
    ):  # fmt: skip
        """input_ids (B, T) → logits (B, T, vocab_size) in fp32, and with labels (B, T) the loss.

        attention_mask   (B, cached + T), 0 for padding on either side, which changes no other token's logits
        cache            a DynamicCache, which input_ids continue; past_key_values is its name in older versions
        labels           −100 = ignored; position t predicts label t + 1. Padding predicts nothing
        use_cache        return a cache (None: unless training). Batches with padding have none
        logits_to_keep   how many logits, counted from the end, or their positions; 0 = all
        """
        for name, value in kwargs.items():  # arguments of other models must not be ignored
            if (
                name not in ("num_items_in_batch", "return_dict")
                and value is not None
                and value is not False
            ):
                raise ValueError(f"this network does not take {name}: leave it out")
        cache = past_key_values if cache is None else cache
        if cache is None and (not self.training if use_cache is None else use_cache):
            cache = DynamicCache()
        positions = self._positions(attention_mask, input_ids, cache)
        if positions is None:
            layers = (
                None
                if cache is None
                else [LayerCache(cache, i) for i in range(len(self.network.blocks))]
            )
            x = self.network.stream(input_ids, cache=layers)
        else:
            x, cache = self.network.stream(input_ids, positions), None

        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits, loss = self.network.logits(x[:, kept]), None
        if labels is not None:
            if positions is not None:  # what stands after padding has nothing to be predicted from
                labels = labels.masked_fill(positions == 0, -100)
            items = kwargs.get("num_items_in_batch")
            loss = self.loss_function(
                logits, labels, self.config.vocab_size, num_items_in_batch=items
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})

    def _positions(self, mask, input_ids, cache):
        """(B, T) positions of input_ids, which start anew where padding ends or begins, so that
        tokens and padding do not see each other; None where there is no padding."""
        if mask is None or mask.all():
            return None
        keep = mask.bool()
        if mask.shape != input_ids.shape or (cache is not None and cache.get_seq_length()):
            raise ValueError(
                "attention_mask with padding must be of the shape of input_ids, without a filled cache"
            )
        if (keep[:, 1:] & ~keep[:, :-1]).sum(1).add(keep[:, 0]).ne(1).any():
            raise ValueError(
                "attention_mask has a row without tokens, or padding between tokens: pad on the left"
            )
        return torch.where(keep, keep.cumsum(1), (~keep).cumsum(1)) - 1

    def train(self, mode: bool = True):
        """As in torch. `from_pretrained`, which calls it last, has replaced the parameters by
        trainable ones."""
        for router in self.network.routers().values():
            # its gradient is a count, which would be all of the gradient's norm
            if router.choice_bias is not None:
                router.choice_bias.requires_grad_(False)
        return super().train(mode)

    def prepare_inputs_for_generation(
        self, input_ids, past_key_values=None, attention_mask=None, cache_position=None, next_sequence_length=None,
        is_first_iteration=None, cache=None, **kwargs,
    ):  # fmt: skip
        """Arguments of the next `forward`, from the sequences so far: what the cache does not hold
        yet. That is counted here, since a cache stays empty where there is padding; cache_position
        and the next two are not used."""
        cache = past_key_values if cache is None else cache
        cached = cache.get_seq_length() if cache is not None else 0
        return dict(
            kwargs, input_ids=input_ids[:, cached:], attention_mask=attention_mask, **{CACHE: cache}
        )

    def get_input_embeddings(self):
        return self.network.wte

    def get_output_embeddings(self):
        return self.network.head  # None if it is tied
