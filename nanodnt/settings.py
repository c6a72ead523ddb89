"""Every flag of a training run, with its meaning: these comments are the text of `python train.py
--help`."""

import math
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from configurator import PathName
from layers.roles import OPEN_GAINS
from nanodnt.optim import OPTIMIZERS

# sequences, or images; a larger number is a typing error, and its batches would not fit into memory
MAX_BATCH = 2**20

INPUT_GAINS = ["none", *(",".join(part) for n in (1, 2, 3) for part in combinations(OPEN_GAINS, n))]

# The least value of each number that has one.
LEAST = dict.fromkeys("batch_size eval_interval log_interval max_skipped timeout_s".split(), 1)
LEAST |= dict.fromkeys(
    "max_iters micro_batch_size eval_tokens track_interval save_interval keep_every seed".split(), 0
)
LEAST |= dict.fromkeys(
    "loss_spike max_rollbacks fsdp_shard_size loss_chunks peak_flops data_workers".split(), 0
)
LEAST |= dict.fromkeys(
    "sample_interval target_val_loss balance_coef balance_rate z_coef".split(), 0
)
LEAST |= dict.fromkeys("crop_padding mixup cutmix".split(), 0)


@dataclass
class TrainConfig:
    # --- run ---
    out_dir: PathName = "out/run"  # the run directory: config.json, metrics.jsonl, checkpoints,
    #   loss.png
    init_from: PathName = "scratch"  # scratch, resume, auto (resume if there is something to
    #   resume), or weights to start from: a run directory (its best.pt), a checkpoint's path, or
    #   those of Hugging Face: a folder, OWNER/MODEL, gpt2, gpt2-medium, gpt2-large, gpt2-xl;
    #   auto:SOURCE resumes, or starts from any of these
    overwrite: bool = False  # let init_from=scratch replace the checkpoints of an earlier run in
    #   out_dir
    seed: int = 1337  # of initialisation, data order and dropout, which have separate generators
    # --- data ---
    dataset: PathName = "pystdlib"  # a folder under data/ (or a path) made by its prepare.py
    doc_mask: bool = False  # keep documents apart: attention stays within each, and positions
    #   restart at its start
    batch_size: int = 480  # sequences, or images, per optimizer step, over all devices
    micro_batch_size: int = 0  # sequences one device holds at a time; 0 = the largest divisor of
    #   its share that fits into a GPU's memory by the count of --plan; on a CPU, and in bench.py,
    #   the largest up to 16
    # --- images ---
    label_smoothing: float = 0.0  # share of each target that training spreads over all classes
    crop_area: float = 1.0  # training images are random parts of at least this share of the area,
    #   resized (ImageNet: 0.08); 1 = whole images, or where their sizes differ the middle, as in
    #   validation
    crop_padding: int = 0  # training images are moved by up to this many pixels, black comes in
    #   (CIFAR: 4)
    flip: bool = False  # mirror every second training image, left to right
    rand_augment: float = 0.0  # RandAugment: magnitude, up to 10, of two random operations on an
    #   image; 0 = off
    rand_augment_std: float = 0.5  # standard deviation of the magnitude
    mixup: float = 0.0  # α: an image is the sum of two, with weights from Beta(α, α); 0 = off
    cutmix: float = 0.0  # α: a box of an image, its share of the area from Beta(α, α), is that of
    #   another; 0 = off
    data_workers: int = 0  # threads of a process that decode and augment images; 0 = one a core
    # --- optimizer ---
    optimizer: Literal[tuple(OPTIMIZERS)] = "adamw"  # AdamW; Adam-mini; momentum SGD with decoupled
    #   decay (DNT's mSGDW); Muon for the matrices of the blocks (but routers) with AdamW for the
    #   rest
    learning_rate: float | None = None  # peak; None = the optimizer's own default: adamw and
    #   adam_mini 6e-4, msgdw 1.0, muon 6e-4 or, with muon_adjust_lr=original, 0.02
    weight_decay: float | None = None  # decoupled, on matrices; None = the optimizer's own default:
    #   adamw and adam_mini 0.1, msgdw 1e-4, muon 0.1 or, with original, 0.01
    decay_emb: bool = True  # decay for embeddings: of tokens (with a tied head: the head too),
    #   positions, class token
    decay_gains: Literal["none", "all", "input", "output"] = "none"  # scale vectors that get weight
    #   decay too: all, those followed by a linear map (input: pre norms, and those of input_gains;
    #   IWD), or the others
    input_gains: Literal[tuple(INPUT_GAINS)] = "final"  # which gains count as input though the
    #   paper leaves it open: after v, after SwiGLU's up (gain_out), of the final norm; in this
    #   order, as in v,final
    decay_scalars: bool = False  # decay for learned scalars (as in DyT's LLaMA code) and biases
    beta1: float = 0.9  # of running averages like Adam's: not for msgdw, nor for Muon's matrices
    beta2: float = 0.95  # the same
    momentum: float | None = None  # None = 0.9 for msgdw, 0.95 for muon
    dampening: float | None = None  # msgdw: the gradient enters the momentum times 1 - dampening;
    #   None = 0
    nesterov: bool | None = None  # None = False for msgdw, True for muon
    muon_adjust_lr: Literal["original", "match_rms_adamw"] | None = None  # muon: updates times
    #   √max(1, rows/columns), or times 0.2·√max(rows, columns), as large as AdamW's; None =
    #   match_rms_adamw
    muon_steps: int | None = None  # muon: steps of the Newton-Schulz iteration; None = 5
    adamw_learning_rate: float | None = None  # muon: peak LR of the rest (AdamW); None =
    #   learning_rate, original: 6e-4
    adamw_weight_decay: float | None = None  # muon: decay of the rest; None = weight_decay, with
    #   original 0.1
    grad_clip: float = 1.0  # limit on the global gradient norm; 0 = off
    balance_coef: float = 0.01  # experts with balance=loss: weight of the balance loss, which is
    #   minimised too
    balance_rate: float = 0.001  # experts with balance=bias: step of the biases, constant over the
    #   run
    z_coef: float = 0.0  # experts: weight of the z-loss, which keeps the routers' logits small
    #   (ST-MoE has 0.001)
    # --- schedule ---
    max_iters: int = 200_000  # optimizer steps
    schedule: Literal["cosine", "wsd", "linear", "constant", "dyt"] = "cosine"  # after warm-up;
    #   wsd: constant, then a decay over the last wsd_decay_iters; dyt: as in the code of DyT's
    #   LLaMA runs, with its own warm-up
    warmup_iters: int = 2000  # steps of warm-up
    lr_decay_iters: int | None = None  # step at which min_lr is reached; None = max_iters
    min_lr: float | None = None  # None = learning_rate / 10
    wsd_decay: Literal["linear", "sqrt", "cosine"] | None = None  # wsd: form of the decay, sqrt is
    #   1 - √; None = linear
    wsd_decay_iters: int | None = None  # wsd: steps of the decay; None = a fifth of lr_decay_iters
    # --- blockwise learning rates (arXiv 2502.19002) ---
    blockwise_lr: bool = False  # LR of a block type = ratio · learning_rate
    lr_ratio_emb: float | None = None  # token embedding, tied head included; None = the paper's, 10
    #   (adam_mini 4)
    lr_ratio_qk: float | None = None  # query and key; None = 8 (adam_mini 1)
    lr_ratio_ffn: float | None = None  # None = 6 (adam_mini 4)
    lr_ratio_vo: float | None = None  # value and output; None = 4
    lr_ratio_norm: float | None = None  # norms, and all other scale vectors and scalars (our
    #   choice); None = 1
    lr_ratio_head: float | None = None  # untied head; None = 1
    lr_ratio_pos: float | None = None  # learned positions; None = 1
    lr_ratio_router: float | None = None  # routers of experts; None = 1
    lr_ratio_patch: float | None = None  # matrix of an image's patches; None = 1
    blockwise_start: Literal["start", "warmup_end"] = "start"  # ratios from the first step, as in
    #   the authors' code, or at the end of warm-up, as in the paper (A.2)
    blockwise_min_lr: Literal["shared", "proportional"] = "shared"  # all decay to min_lr, as in the
    #   authors' code, or each to ratio · min_lr
    blockwise_decay: Literal["scaled", "unscaled"] = "scaled"  # LR times decay grows with the
    #   ratio, or weight_decay is divided by it (exact while the LR is ratio times the base, so not
    #   near a shared min_lr)
    # --- evaluation, logging, checkpoints ---
    eval_interval: int = 1000  # steps between evaluations, each followed by a checkpoint
    eval_tokens: int = 1_000_000  # validation tokens, the same each time; 0 = all. Of images:
    #   patches and class tokens
    eval_only: bool = False  # evaluate once and exit
    target_val_loss: float = 0.0  # end the run at the first evaluation with a loss of at most this;
    #   0 = never
    sample_interval: int = 0  # steps between short texts that the model writes, greedily, after
    #   sample_start; 0 = never
    sample_start: str = ""  # what these texts continue; empty = a new document
    log_interval: int = 10  # steps between rows of metrics.jsonl, which evaluations have too
    track_interval: int = 100  # steps between rows that also log stream, logits, gradients,
    #   updates, gains; 0 = off
    save_interval: int = 0  # steps between further checkpoints; 0 = only after evaluations
    keep_every: int = 0  # steps between checkpoints that are kept for good, as step_N.pt; 0 = none
    checkpoint_format: Literal["auto", "file", "sharded"] = "auto"  # sharded: under FSDP every
    #   process writes its own part, and last.pt says where; auto: that from 10 GB on, else one file
    max_skipped: int = 10  # end the run after this many steps in a row whose gradient is not finite
    #   (each is skipped)
    loss_spike: float = 0.0  # go back to last.pt and skip the batches since, when a logged loss is
    #   this many nats above the median of the 20 before it; 0 = never
    max_rollbacks: int = 3  # end the run when that happens more often than this
    wandb_log: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works)
    wandb_project: str = "nanodnt"  # its project; the run is named after out_dir
    wandb_group: str = ""  # the group of the run there
    wandb_tags: str = ""  # the run's tags there, with commas between
    # --- system ---
    device: str = "auto"  # auto, cpu, cuda, cuda:N, mps
    must_fit: bool = True  # refuse a start on GPUs for whose memory `--plan` counts too much;
    #   False: try it
    parallel: Literal["auto", "none", "ddp", "fsdp"] = "auto"  # under torchrun: ddp keeps the whole
    #   model on every device, fsdp (FSDP2) shards weights, gradients and optimizer state; auto:
    #   fsdp if no useful micro batch fits into a GPU under ddp, by the count of --plan
    fsdp_shard_size: int = 0  # fsdp: processes that share one copy of the model, as those of a
    #   machine (HSDP); 0 = all
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of the matrix products;
    #   weights are fp32. float32 is TF32 on GPUs that have it, unless NVIDIA_TF32_OVERRIDE=0 is in
    #   the environment
    stream_dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the residual stream between
    #   sub-layers, whose sums are fp32 either way. bfloat16 halves its memory traffic, but rounds
    #   each sum; auto: on a GPU with dtype=bfloat16. docs/results/speed.md compares the losses
    compile: Literal["auto", True, False, "blocks"] = "auto"  # torch.compile; auto: on a GPU, on a
    #   CPU for runs of minutes. One graph of the whole model; of each block by itself under FSDP,
    #   with blocks, and where auto meets 36 layers or more or, under DDP, a step in which that
    #   loses less
    kernels: Literal["auto", "off", "all"] = "auto"  # faster ways to compute, for compiled code on
    #   NVIDIA GPUs of compute capability 8.0 or more, each tried at the start. auto: a kernel of
    #   its own for the loss's softmax; q, k and v in one product. all: also FFNs with the
    #   activation in their products (from 9.0 on), which no GPU has measured yet. off: none
    activation_checkpointing: bool = False  # keep only the residual stream between blocks; the
    #   backward pass computes the rest again: far less memory for about a third more work
    loss_chunks: int = 0  # number of chunks that the loss splits the tokens of a micro batch into,
    #   to bound the memory of the logits; 0 = as many as keep them to 1 GiB, on a GPU to 2³¹ − 1
    #   entries
    peak_flops: float = 0.0  # FLOP/s of one device, for MFU; 0 = by device name, or no MFU where it
    #   is unknown
    timeout_s: int = 1800  # seconds after which a process waiting for another gives up

    @property
    def changes(self) -> bool:
        """Whether images are changed one by one."""
        return self.crop_area < 1 or self.crop_padding > 0 or self.flip or self.rand_augment > 0

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with others."""
        return self.mixup > 0 or self.cutmix > 0

    def source_notes(self) -> list:
        """A line for commands that only look at the network of the flags, where a run would load
        another."""
        if self.init_from in ("scratch", "resume", "auto"):
            return []
        return [
            f"note: this is the network of the flags; a run takes the one of init_from={self.init_from}"
        ]

    def check(self):
        """ValueError for values that make no sense."""
        for name, right, allowed in (
            *(
                (name, low <= getattr(self, name) < math.inf, f"be at least {low}")
                for name, low in LEAST.items()
            ),
            ("label_smoothing", 0 <= self.label_smoothing < 1, "be at least 0 and below 1"),
            ("crop_area", 0 < self.crop_area <= 1, "be above 0 and at most 1, which is off"),
            (
                "rand_augment",
                0 <= self.rand_augment <= 10,
                "be 0, which is off, or a magnitude of at most 10",
            ),
            ("rand_augment_std", 0 <= self.rand_augment_std <= 10, "be from 0 to 10"),
            (
                "batch_size",
                self.batch_size <= MAX_BATCH,
                f"be at most {MAX_BATCH}: it counts sequences",
            ),
        ):
            if not right:
                raise ValueError(f"{name}={getattr(self, name)} must {allowed}")
        saves = [
            n
            for n in ("eval_interval", "save_interval", "keep_every")
            if getattr(self, n) % self.log_interval
        ]
        # else a checkpoint could be saved after a spike that was not yet read
        if self.loss_spike and saves:
            multiple = f"a multiple of log_interval={self.log_interval}"
            raise ValueError(f"loss_spike needs {', '.join(saves)} to be {multiple}")
        if self.crop_area < 1 and self.crop_padding:
            both = f"crop_area={self.crop_area} and crop_padding={self.crop_padding} are two kinds of crops"
            raise ValueError(f"{both}: set crop_area=1 or crop_padding=0")
        if not self.out_dir:
            raise ValueError("out_dir is empty: name a folder")
        if self.fsdp_shard_size and self.parallel != "fsdp":
            raise ValueError(
                f"fsdp_shard_size={self.fsdp_shard_size} needs parallel=fsdp: set that, or leave it out"
            )
