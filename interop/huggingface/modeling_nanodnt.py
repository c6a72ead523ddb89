"""The network as a model of Hugging Face's `transformers`: for loading exported folders, generation
and fine-tuning.

An exported folder carries a copy of this file, of model.py and of layers/ (see carry.py), and
`transformers` imports the copies: AutoModelForCausalLM.from_pretrained(FOLDER,
trust_remote_code=True). Nothing in this repository imports it.
"""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from model import GPT, GPTConfig

# the name of a cache in `transformers`: in older versions past_key_values
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class NanoDNTConfig(PretrainedConfig):
    """`network` holds GPTConfig's fields in a dict of its own, since some have the names of
    `transformers`' own fields. The sizes beside it are copies for tools that look for them under
    the usual names."""

    model_type = "nanodnt"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(self, network: dict[str, Any] | None = None, **kwargs: Any) -> None:
        config = GPTConfig(**network or {})
        # a tied head is no parameter here, so `transformers` has nothing to tie
        kwargs["tie_word_embeddings"] = False
        super().__init__(**kwargs)
        self.network = asdict(config)
        self.vocab_size = config.vocab_size
        self.max_position_embeddings = config.block_size
        self.hidden_size = config.n_embd
        self.intermediate_size = config.ffn_width
        self.num_hidden_layers = config.n_layer
        self.num_attention_heads = config.n_head
        self.num_key_value_heads = config.n_kv_head or config.n_head
        self.head_dim = config.head_dim


class LayerCache:
    """One layer of a `transformers` cache, with the methods of nanodnt.generate's KVCache that GPT
    calls."""

    def __init__(self, cache: DynamicCache, layer: int) -> None:
        self.cache = cache
        self.layer = layer

    @property
    def length(self) -> int:
        return self.cache.get_seq_length(self.layer)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v, each (B, H_kv, T, head_dim). Returns all keys and all values."""
        return self.cache.update(k, v, self.layer)


class NanoDNTForCausalLM(PreTrainedModel, GenerationMixin):
    """GPT with the methods of a `transformers` model. Parameters have GPT's names after "network.".

    Routers of experts are trained for the loss alone: `network.set_runtime(balance_coef=0.01)` adds
    the balance loss to the gradient. The biases of balance=bias stay as they are: `transformers`
    does not know their rule."""

    config_class = NanoDNTConfig
    _no_split_modules = ["GPT"]  # all on one device: a tied head reads the embedding
    _supports_sdpa = True

    def __init__(self, config: NanoDNTConfig) -> None:
        super().__init__(config)
        self.network = GPT(GPTConfig(**config.network), seed=torch.initial_seed())
        self.network.set_runtime(balance_coef=0.0)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: GPT has initialised the parameters, or a file will replace them."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: DynamicCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """input_ids (B, T) → logits (B, T, vocab_size) in fp32, and with labels (B, T) the loss.

        attention_mask   (B, cached + T), 0 for padding on either side, which changes no other
                         token's logits
        cache            a DynamicCache, which input_ids continue; older versions of `transformers`
                         call it past_key_values
        labels           −100 = ignored; position t predicts label t + 1. Padding predicts nothing
        use_cache        return a cache (None: unless training). Batches with padding have none
        logits_to_keep   number of logits, counted from the end, or their positions; 0 = all
        """
        for name, value in kwargs.items():  # arguments of other models must not be ignored
            known = name in ("num_items_in_batch", "return_dict")
            if not known and value is not None and value is not False:
                raise ValueError(f"this network does not take {name}: leave it out")
        if cache is None:
            cache = past_key_values
        if use_cache is None:
            use_cache = not self.training
        if cache is None and use_cache:
            cache = DynamicCache()
        positions = self._positions(attention_mask, input_ids, cache)
        layers = None
        if positions is not None:
            cache = None
        elif cache is not None:
            layers = [LayerCache(cache, i) for i in range(len(self.network.blocks))]
        x = self.network.stream(input_ids, positions, cache=layers)

        kept = logits_to_keep
        if isinstance(kept, int):
            kept = slice(-kept, None)
        logits = self.network.logits(x[:, kept])
        loss = None
        if labels is not None:
            if positions is not None:  # the first token after padding is not predicted
                labels = labels.masked_fill(positions == 0, -100)
            items = kwargs.get("num_items_in_batch")
            loss = self.loss_function(
                logits, labels, self.config.vocab_size, num_items_in_batch=items
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})

    def _positions(
        self, mask: Tensor | None, input_ids: Tensor, cache: DynamicCache | None
    ) -> Tensor | None:
        """(B, T) positions of input_ids, which start anew where padding ends or begins, so that
        tokens and padding do not see each other; None without padding."""
        if mask is None or mask.all():
            return None
        keep = mask.bool()
        if mask.shape != input_ids.shape or (cache is not None and cache.get_seq_length()):
            raise ValueError(
                "attention_mask with padding must be of the shape of input_ids, without a filled "
                "cache"
            )
        if (keep[:, 1:] & ~keep[:, :-1]).sum(1).add(keep[:, 0]).ne(1).any():
            raise ValueError(
                "attention_mask has a row without tokens, or padding between tokens: pad on the "
                "left"
            )
        return torch.where(keep, keep.cumsum(1), (~keep).cumsum(1)) - 1

    def train(self, mode: bool = True) -> "NanoDNTForCausalLM":
        """As in torch. `from_pretrained` calls it last, after it has replaced the parameters by
        trainable ones."""
        for router in self.network.routers().values():
            # its gradient is a count, which would be all of the gradient's norm
            if router.choice_bias is not None:
                router.choice_bias.requires_grad_(False)
        return super().train(mode)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: DynamicCache | None = None,
        attention_mask: Tensor | None = None,
        cache_position: Any = None,
        next_sequence_length: Any = None,
        is_first_iteration: Any = None,
        cache: DynamicCache | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The arguments of the next `forward`: the tokens that the cache does not hold yet. They
        are counted here, since a cache stays empty with padding; cache_position and the next two
        arguments are not used."""
        if cache is None:
            cache = past_key_values
        n_cached = 0 if cache is None else cache.get_seq_length()
        kwargs["input_ids"] = input_ids[:, n_cached:]
        kwargs["attention_mask"] = attention_mask
        kwargs[CACHE] = cache
        return kwargs

    def get_input_embeddings(self) -> nn.Module:
        return self.network.wte

    def get_output_embeddings(self) -> nn.Module | None:
        return self.network.head  # None if it is tied
