"""Every flag of a training run. The comment beside a flag is its text in `python train.py --help`.

A flag's annotation gives the values that it can take: a type, the choices of a Literal, a range.
"""

from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, Literal

from configurator import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PathName,
    PositiveInt,
    Range,
    check_ranges,
)
from layers.roles import OPEN_GAINS

# The largest batch, in sequences or images. A larger number is a typing error, or counts tokens.
MAX_BATCH = 2**20

# The choices of input_gains: "none", or some of OPEN_GAINS, in their order, with commas between.
INPUT_GAINS = ["none"]
for n_gains in range(1, len(OPEN_GAINS) + 1):
    INPUT_GAINS += [",".join(names) for names in combinations(OPEN_GAINS, n_gains)]


@dataclass
class TrainConfig:
    # --- run ---
    out_dir: PathName = "out/run"  # the run directory: config.json, metrics.jsonl, checkpoints,
    #   loss.png
    init_from: PathName = "scratch"  # source of the weights. scratch: random; resume: the
    #   checkpoint in out_dir; auto: that, or scratch if there is none; a run directory (its
    #   best.pt) or a checkpoint's path; nanoGPT's ckpt.pt, or its folder; a Hugging Face folder or
    #   OWNER/MODEL, or gpt2, gpt2-medium, gpt2-large, gpt2-xl. auto:SOURCE resumes if it can, else
    #   starts from SOURCE, any of these
    overwrite: bool = False  # let init_from=scratch replace the checkpoints of an earlier run in
    #   out_dir
    seed: NonNegativeInt = 1337  # seed of initialisation, data order and dropout, which have
    #   separate generators
    # --- data ---
    dataset: PathName = "pystdlib"  # a folder under data/, or a path, that a prepare.py has made
    doc_mask: bool = False  # keep documents apart: attention stays within a document, and positions
    #   restart at its beginning
    batch_size: Annotated[int, Range(ge=1, le=MAX_BATCH)] = 480  # sequences, or images, per
    #   optimizer step, over all devices
    micro_batch_size: NonNegativeInt = 0  # sequences that one device processes at a time; 0 = on a
    #   GPU the largest divisor of its share of the batch that fits, by the memory that --plan
    #   counts; on a CPU, and in bench.py, the largest divisor up to 16
    # --- images ---
    label_smoothing: Fraction = 0.0  # share of each training target that is spread over all classes
    crop_area: Annotated[float, Range(gt=0, le=1)] = 1.0  # train on random crops of at least this
    #   share of the image's area, resized (ImageNet: 0.08); 1 = whole images, or the middle where
    #   images differ in size, as in validation
    crop_padding: NonNegativeInt = 0  # shift each training image at random by up to this many
    #   pixels, and fill with black (CIFAR: 4)
    flip: bool = False  # mirror half of the training images, left to right
    rand_augment: Annotated[float, Range(ge=0, le=10)] = 0.0  # RandAugment: magnitude of the two
    #   random operations on each image; 0 = off
    rand_augment_std: Annotated[float, Range(ge=0, le=10)] = 0.5  # standard deviation of that
    #   magnitude
    mixup: NonNegativeFloat = 0.0  # α: each image is the weighted sum of two, with weights from
    #   Beta(α, α); 0 = off
    cutmix: NonNegativeFloat = 0.0  # α: each image has a box from another, with a share of the area
    #   from Beta(α, α); 0 = off
    data_workers: NonNegativeInt = 0  # threads of each process that decode and augment images; 0 =
    #   one per core
    # --- optimizer ---
    optimizer: str = "adamw"  # adamw; adam_mini; msgdw: momentum SGD with decoupled decay (DNT's
    #   mSGDW); muon, soap: Muon or SOAP for the matrices of the blocks except routers, AdamW
    #   for all other parameters; or MODULE:CLASS, any torch.optim.Optimizer, as in
    #   torch.optim:RMSprop
    optimizer_args: str = ""  # keyword arguments of MODULE:CLASS, plain values, as in
    #   betas=(0.9,0.95),eps=1e-8
    learning_rate: NonNegativeFloat | None = None  # peak learning rate; None = the optimizer's own
    #   default: adamw and adam_mini 6e-4, msgdw 1.0, soap 3e-3, muon 6e-4 or, with
    #   muon_adjust_lr=original, 0.02
    weight_decay: NonNegativeFloat | None = None  # decoupled weight decay of matrices; None = the
    #   optimizer's own default: adamw and adam_mini 0.1, msgdw 1e-4, soap 0.01, muon 0.1 or, with
    #   muon_adjust_lr=original, 0.01
    decay_emb: bool = True  # apply weight decay to embeddings: tokens (with a tied head, the head
    #   too), positions, class token
    decay_gains: Literal["none", "all", "input", "output"] = "none"  # scale vectors that get weight
    #   decay. input: those followed by a linear map (pre norms and those of input_gains; IWD);
    #   output: the others
    input_gains: Literal[tuple(INPUT_GAINS)] = "final"  # gains that count as input gains, among
    #   those that the paper does not classify: a list in the order v, up, final, as in v,final. v,
    #   up: the gains after v and after SwiGLU's up (gain_out, v_norm); final: the final norm's gain
    decay_scalars: bool = False  # apply weight decay to learned scalars (as DyT's LLaMA code does)
    #   and biases
    beta1: Fraction = 0.9  # decay rate of the average gradient, as in Adam; msgdw and Muon's
    #   matrices have momentum instead
    beta2: Fraction = 0.95  # decay rate of the average squared gradient, as in Adam, and of SOAP's
    #   two averages of products; not used by msgdw; Muon's matrices use it with muon_row_norm
    adam_eps: Annotated[float, Range(gt=0, lt=1)] | None = None  # ε of adamw, adam_mini and soap,
    #   and of muon's AdamW; None = 1e-8
    cautious_decay: bool | None = None  # adamw, muon: weight decay only where the update moves a
    #   weight towards zero (arXiv 2510.12402); None = False
    momentum: Fraction | None = None  # momentum of msgdw and muon; None = 0.9 for msgdw, 0.95 for
    #   muon
    dampening: Fraction | None = None  # msgdw: the gradient enters the momentum times
    #   1 - dampening; None = 0
    nesterov: bool | None = None  # Nesterov momentum; None = False for msgdw, True for muon
    muon_adjust_lr: Literal["original", "match_rms_adamw"] | None = None  # muon: factor on the
    #   updates. original: √max(1, rows/columns); match_rms_adamw: 0.2·√max(rows, columns), which
    #   makes them as large as AdamW's; None = match_rms_adamw
    muon_steps: Annotated[int, Range(ge=1, le=20)] | None = None  # muon: steps of the Newton-Schulz
    #   iteration; None = 5
    muon_coefficients: Literal["jordan", "polar"] | None = None  # muon: coefficients of the
    #   iteration. jordan: Keller Jordan's, the same in each step; polar: those of Polar Express
    #   (arXiv 2505.16932), for at most 5 steps; None = jordan
    muon_row_norm: bool | None = None  # muon: divide each row of an update by the root of its mean
    #   square over the last steps (NorMuon, arXiv 2510.05491); None = False
    soap_frequency: PositiveInt | None = None  # soap: number of updates from one change of the
    #   bases to the next; None = 10
    adamw_learning_rate: NonNegativeFloat | None = None  # muon, soap: peak learning rate of the
    #   parameters that AdamW updates; None = learning_rate or, with muon_adjust_lr=original, 6e-4
    adamw_weight_decay: NonNegativeFloat | None = None  # muon, soap: weight decay of the parameters
    #   that AdamW updates; None = weight_decay or, with muon_adjust_lr=original, 0.1
    grad_clip: NonNegativeFloat = 1.0  # limit on the global gradient norm; 0 = off
    balance_coef: NonNegativeFloat = 0.01  # experts with balance=loss: weight of the balance loss
    balance_rate: NonNegativeFloat = 0.001  # experts with balance=bias: step of the biases,
    #   constant over the run
    z_coef: NonNegativeFloat = 0.0  # experts: weight of the z-loss, which keeps the routers' logits
    #   small (ST-MoE: 0.001)
    # --- schedule ---
    max_iters: NonNegativeInt = 200_000  # optimizer steps
    schedule: Literal["cosine", "wsd", "linear", "constant", "dyt"] = "cosine"  # learning rate
    #   after warm-up. wsd: constant, then a decay over the last wsd_decay_iters; dyt: as in the
    #   code of DyT's LLaMA runs, with its own warm-up
    warmup_iters: NonNegativeInt = 2000  # steps of warm-up
    lr_decay_iters: NonNegativeInt | None = None  # step at which the learning rate reaches min_lr;
    #   None = max_iters
    min_lr: NonNegativeFloat | None = None  # learning rate at the end of the decay; None =
    #   learning_rate / 10
    wsd_decay: Literal["linear", "sqrt", "cosine"] | None = None  # wsd: shape of the decay, where
    #   sqrt is 1 - √; None = linear
    wsd_decay_iters: NonNegativeInt | None = None  # wsd: steps of the decay; None = a fifth of
    #   lr_decay_iters
    # --- blockwise learning rates (arXiv 2502.19002) ---
    blockwise_lr: bool = False  # give each block type its own learning rate, ratio · learning_rate
    lr_ratio_emb: NonNegativeFloat | None = None  # ratio of the token embedding, and of a tied
    #   head; None = the paper's, 10 (adam_mini 4)
    lr_ratio_qk: NonNegativeFloat | None = None  # ratio of query and key; None = 8 (adam_mini 1)
    lr_ratio_ffn: NonNegativeFloat | None = None  # ratio of the FFN; None = 6 (adam_mini 4)
    lr_ratio_vo: NonNegativeFloat | None = None  # ratio of value and output; None = 4
    lr_ratio_norm: NonNegativeFloat | None = None  # ratio of norms, and of all other scale vectors
    #   and scalars (our choice); None = 1
    lr_ratio_head: NonNegativeFloat | None = None  # ratio of an untied head; None = 1
    lr_ratio_pos: NonNegativeFloat | None = None  # ratio of learned positions; None = 1
    lr_ratio_router: NonNegativeFloat | None = None  # ratio of the routers of experts; None = 1
    lr_ratio_patch: NonNegativeFloat | None = None  # ratio of the matrix that embeds image patches;
    #   None = 1
    blockwise_start: Literal["start", "warmup_end"] = "start"  # start of the ratios. start: the
    #   first step, as in the authors' code; warmup_end: the end of warm-up, as in the paper (A.2)
    blockwise_min_lr: Literal["shared", "proportional"] = "shared"  # end of the decay. shared:
    #   min_lr for all, as in the authors' code; proportional: ratio · min_lr
    blockwise_decay: Literal["scaled", "unscaled"] = "scaled"  # scaled: decay per step (the LR
    #   times weight_decay) grows with the ratio; unscaled: weight_decay is divided by the ratio, so
    #   decay per step is the same for all block types, except near a shared min_lr
    # --- evaluation, logging, checkpoints ---
    eval_interval: PositiveInt = 1000  # steps between evaluations, each followed by a checkpoint
    eval_tokens: NonNegativeInt = 1_000_000  # validation tokens per evaluation, always the same
    #   ones; 0 = all. An image has its patches, and a class token, as tokens
    eval_rows: Literal["spread", "first"] = "spread"  # where these tokens stand in the validation
    #   split. spread: in rows evenly spaced over it; first: at its start, so that a loss can be
    #   compared with that of another code on the first n tokens
    eval_only: bool = False  # evaluate once and exit
    target_val_loss: NonNegativeFloat = 0.0  # end the run at the first evaluation with a loss of at
    #   most this; 0 = never
    sample_interval: NonNegativeInt = 0  # steps between samples, which continue sample_start with
    #   the most likely tokens; 0 = never
    sample_start: str = ""  # prompt of these samples; empty = a new document
    log_interval: PositiveInt = 10  # steps between rows of metrics.jsonl; each evaluation has a row
    #   too
    track_interval: NonNegativeInt = 100  # steps between rows that also log residual stream,
    #   logits, gradients, updates and gains; 0 = off
    save_interval: NonNegativeInt = 0  # steps between further checkpoints; 0 = only after
    #   evaluations
    keep_every: NonNegativeInt = 0  # steps between checkpoints that are kept for good, as
    #   step_N.pt; 0 = none
    checkpoint_format: Literal["auto", "file", "sharded"] = "auto"  # file: one file. sharded: under
    #   FSDP each process writes its own part, and last.pt lists the parts. auto: sharded from 10 GB
    #   on, else file
    max_skipped: PositiveInt = 10  # end the run after this many steps in a row whose gradient is
    #   not finite; each such step is skipped
    loss_spike: NonNegativeFloat = 0.0  # when a logged loss is this many nats above the median of
    #   the 20 before it, go back to last.pt and skip the batches since; 0 = never
    max_rollbacks: NonNegativeInt = 3  # end the run at a loss spike after this many returns to
    #   last.pt
    wandb_log: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works)
    wandb_project: str = "nanodnt"  # project in Weights & Biases; the run is named after out_dir
    wandb_group: str = ""  # group of the run in Weights & Biases
    wandb_tags: str = ""  # tags of the run in Weights & Biases, with commas between
    # --- system ---
    device: str = "auto"  # auto, cpu, cuda, cuda:N, mps
    must_fit: bool = True  # refuse to start if --plan counts more memory than the GPUs have; False
    #   = start anyway
    parallel: Literal["auto", "none", "ddp", "fsdp"] = "auto"  # under torchrun. ddp: every device
    #   holds the whole model; fsdp (FSDP2): weights, gradients and optimizer state are sharded;
    #   auto: ddp, or fsdp if under ddp no useful micro batch fits, by the memory that --plan counts
    fsdp_shard_size: NonNegativeInt = 0  # fsdp: number of processes that share one copy of the
    #   model, such as those of one machine (HSDP); 0 = all
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # dtype of the matrix
    #   products; weights are fp32. float32 is TF32 on GPUs that have it, unless
    #   NVIDIA_TF32_OVERRIDE=0 is in the environment
    stream_dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # dtype of the residual stream
    #   between sub-layers; its sums are fp32 either way. bfloat16 halves its memory traffic, but
    #   rounds each sum; auto: bfloat16 on a GPU with dtype=bfloat16. docs/results/speed.md compares
    #   the losses
    compile: Literal["auto", True, False, "blocks"] = "auto"  # torch.compile. True: one graph of
    #   the whole model (under FSDP one for each block); blocks: one for each block; auto: compile
    #   on a GPU, and on a CPU if the run takes minutes; as blocks from 36 layers on, and under DDP
    #   where blocks make the step faster
    kernels: Literal["auto", "off", "all"] = "auto"  # faster kernels for compiled code on NVIDIA
    #   GPUs of compute capability 8.0 or more, each tried at the start. auto: our own for the
    #   softmax of the loss, and one product for q, k and v; all: also FFNs with the activation
    #   inside their products (from 9.0 on), not yet measured on any GPU; off: none
    activation_checkpointing: bool = False  # keep only the residual stream between blocks, and
    #   compute the rest again in the backward pass: far less memory for about a third more work
    loss_chunks: NonNegativeInt = 0  # number of chunks of tokens in which a micro batch's loss is
    #   computed, to bound the memory of the logits; 0 = the fewest with at most 1 GiB of logits
    #   each, on a GPU with at most 2³¹ − 1 logits each
    peak_flops: NonNegativeFloat = 0.0  # peak FLOP/s of one device, for MFU; 0 = by device name, or
    #   no MFU if the device is unknown
    timeout_s: PositiveInt = 1800  # seconds after which a process that waits for another gives up

    @property
    def augments_images(self) -> bool:
        """Whether training images are augmented one by one."""
        return self.crop_area < 1 or self.crop_padding > 0 or self.flip or self.rand_augment > 0

    @property
    def mixes_images(self) -> bool:
        """Whether training images are mixed with each other."""
        return self.mixup > 0 or self.cutmix > 0

    def init_from_notes(self) -> list[str]:
        """A note for commands that inspect the flags' network without loading init_from."""
        source = self.init_from
        if source in ("scratch", "resume", "auto"):
            return []
        return [
            f"note: this is the network of the flags; a run takes the one of init_from={source}"
        ]

    def check(self) -> None:
        """Raise ValueError for values out of range, or that contradict each other."""
        check_ranges(self)
        if not self.out_dir:
            raise ValueError("out_dir is empty: name a folder")
        if self.crop_area < 1 and self.crop_padding:
            raise ValueError(
                f"crop_area={self.crop_area} and crop_padding={self.crop_padding} are two kinds "
                "of crops: set crop_area=1 or crop_padding=0"
            )
        if self.fsdp_shard_size and self.parallel != "fsdp":
            raise ValueError(
                f"fsdp_shard_size={self.fsdp_shard_size} needs parallel=fsdp: set that, "
                "or leave it out"
            )
        if self.loss_spike:
            self._check_saves()

    def _check_saves(self) -> None:
        """Raise ValueError where a checkpoint could be saved after a spike that is not yet
        logged."""
        intervals = ("eval_interval", "save_interval", "keep_every")
        between = [name for name in intervals if getattr(self, name) % self.log_interval]
        if between:
            multiple = f"a multiple of log_interval={self.log_interval}"
            raise ValueError(f"loss_spike needs {', '.join(between)} to be {multiple}")
