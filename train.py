"""Train a GPT.

python train.py config/quickstart.py                                       # CPU or one GPU
torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py      # 8 GPUs
python train.py config/dnt_small.py --optimizer=msgdw --learning_rate=1.0  # any flag overrides
"""

import gc
import math
import statistics
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import torch

import rundir
import runtime
from configurator import configure, describe
from loader import Dataset, Tokenizer, load_meta
from model import GPT, GPTConfig, whole
from optim import describe_groups, fill_defaults, load_optimizer, lr_at, make_optimizer, notes, state_bytes
from rundir import Metrics, Saver, snapshot
from runtime import Env, Prefetch, Stop
from tracking import Tracker

GPT2 = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


@dataclass
class TrainConfig:
    # --- run ---
    out_dir: str = "out/run"  # the run directory: config.json, metrics.jsonl, checkpoints, loss.png
    init_from: str = "scratch"  # scratch, resume, auto (resume if there is something to resume), a checkpoint's path,
    #   gpt2, gpt2-medium, gpt2-large, gpt2-xl
    overwrite: bool = False  # let init_from=scratch replace the checkpoints of an earlier run in out_dir
    seed: int = 1337  # of initialisation, data order and dropout, each with a generator of its own
    # --- data ---
    dataset: str = "pystdlib"  # a folder under data/ (or a path) made by its prepare.py
    batch_size: int = 480  # sequences per optimizer step, over all devices
    micro_batch_size: int = 0  # sequences one device holds at a time; 0 = the largest that divides its share, up to 16
    # --- optimizer ---
    optimizer: Literal["adamw", "msgdw", "muon", "adam_mini"] = "adamw"  # AdamW; momentum SGD with decoupled decay
    #   (DNT's mSGDW); Muon for the matrices of the blocks with AdamW for the rest; Adam-mini
    learning_rate: float | None = None  # peak; None = the optimizer's default: msgdw 1.0, muon with original 0.02,
    #   the others 6e-4
    weight_decay: float | None = None  # decoupled, on matrices; None = the default: msgdw 1e-4, muon with original
    #   0.01, else 0.1
    decay_emb: bool = True  # decay for embeddings, of tokens (with a tied head: the head too) and positions
    decay_gains: Literal["none", "all", "input", "output"] = "none"  # scale vectors that get weight decay too: all,
    #   those followed by a linear map (input: pre norms, final norm; IWD), or the others
    decay_scalars: bool = False  # decay for learned scalars and biases (DyT's LLaMA code decays them)
    beta1: float = 0.9  # AdamW, Adam-mini
    beta2: float = 0.95  # AdamW, Adam-mini
    momentum: float | None = None  # None = 0.9 for msgdw, 0.95 for muon
    dampening: float | None = None  # msgdw: the gradient enters the momentum times 1 - dampening; None = 0
    nesterov: bool | None = None  # None = False for msgdw, True for muon
    muon_adjust_lr: Literal["original", "match_rms_adamw"] | None = None  # muon: updates times √max(1, rows/columns),
    #   or times 0.2·√max(rows, columns), as large as AdamW's; None = match_rms_adamw
    muon_steps: int | None = None  # muon: steps of the Newton-Schulz iteration; None = 5
    adamw_learning_rate: float | None = None  # muon: peak LR of the rest, on AdamW; None = learning_rate, with
    #   original 6e-4
    adamw_weight_decay: float | None = None  # muon: decay of the rest; None = weight_decay, with original 0.1
    grad_clip: float = 1.0  # limit on the global gradient norm; 0 = off
    # --- schedule ---
    max_iters: int = 200_000  # optimizer steps
    schedule: Literal["cosine", "wsd", "linear", "constant", "dyt"] = "cosine"  # after warm-up; wsd: constant, then a
    #   decay over the last wsd_decay_iters; dyt: the recipe of DyT's LLaMA runs, with its own warm-up
    warmup_iters: int = 2000  # steps of warm-up
    lr_decay_iters: int | None = None  # step at which min_lr is reached; None = max_iters
    min_lr: float | None = None  # None = learning_rate / 10
    wsd_decay: Literal["linear", "sqrt", "cosine"] | None = None  # wsd: form of the decay, sqrt is 1 - √; None = linear
    wsd_decay_iters: int | None = None  # wsd: steps of the decay; None = a fifth of lr_decay_iters
    # --- blockwise learning rates (arXiv 2502.19002) ---
    blockwise_lr: bool = False  # LR of a block type = ratio · learning_rate
    lr_ratio_emb: float | None = None  # token embedding, tied head included; None = the paper's, 10 (adam_mini 4)
    lr_ratio_qk: float | None = None  # query and key; None = 8 (adam_mini 1)
    lr_ratio_ffn: float | None = None  # None = 6 (adam_mini 4)
    lr_ratio_vo: float | None = None  # value and output; None = 4
    lr_ratio_norm: float | None = None  # norms, and all other scale vectors and scalars; None = 1
    lr_ratio_head: float | None = None  # untied head; None = 1
    lr_ratio_pos: float | None = None  # learned positions; None = 1
    blockwise_start: Literal["start", "warmup_end"] = "start"  # ratios from the first step, or after warm-up
    blockwise_min_lr: Literal["shared", "proportional"] = "shared"  # all decay to min_lr, or each to ratio · min_lr
    blockwise_decay: Literal["scaled", "unscaled"] = "scaled"  # LR times decay grows with the ratio, or weight_decay is
    #   divided by it (exact while the LR is ratio times the base, so not near a shared min_lr)
    # --- evaluation, logging, checkpoints ---
    eval_interval: int = 1000  # steps between evaluations, each followed by a checkpoint
    eval_tokens: int = 1_000_000  # validation tokens read each time, the same every time; 0 = all
    eval_only: bool = False  # evaluate once and exit
    log_interval: int = 10  # steps between rows of metrics.jsonl
    track_interval: int = 100  # steps between rows that also tell of stream, logits, gradients, updates, gains; 0 = off
    save_interval: int = 0  # steps between further checkpoints; 0 = only after evaluations
    keep_every: int = 0  # steps between checkpoints that are kept for good, as step_N.pt; 0 = none
    max_skipped: int = 10  # end the run after this many steps in a row whose gradient is not finite (each is skipped)
    loss_spike: float = 0.0  # go back to last.pt, and pass over the batches since, when a logged loss lies so many nats
    #   above the median of the 20 before; 0 = never
    max_rollbacks: int = 3  # end the run when that happens more often
    wandb_log: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works)
    wandb_project: str = "nanodnt"  # its project; the run is named after out_dir
    # --- system ---
    device: str = "auto"  # auto, cpu, cuda, cuda:N, mps
    parallel: Literal["auto", "none", "ddp", "fsdp"] = "auto"  # under torchrun: ddp has all of the model everywhere,
    #   fsdp (FSDP2) shards weights, gradients and optimizer state; auto: fsdp where these fill most of a GPU, else ddp
    fsdp_shard_size: int = 0  # fsdp: processes that one copy of the model is sharded over, such as those of one machine
    #   (HSDP); 0 = all
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of the matrix multiplications; weights are fp32
    compile: Literal["auto", True, False] = "auto"  # torch.compile; auto: on a GPU, on a CPU for runs of minutes
    cuda_graphs: bool = False  # replay the compiled step as one CUDA graph: for tiny models, whose kernels are shorter
    #   than their launches; one GPU, one micro batch a step
    activation_checkpointing: bool = False  # keep only the stream between blocks and compute the rest again in the
    #   backward pass: far less memory for about a third more work
    loss_chunks: int = 0  # the loss takes its tokens in so many parts, to bound the memory of the logits; 0 = as many
    #   as keep them to 1 GiB
    peak_flops: float = 0.0  # FLOP/s of one device, for MFU; 0 = by device name, or no MFU where it is unknown
    timeout_s: int = 1800  # seconds after which a process waiting for another gives up

    def check(self):
        """ValueError for values that no run could mean."""
        for name in ("batch_size", "eval_interval", "log_interval", "max_skipped", "timeout_s"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in (
            "max_iters",
            "micro_batch_size",
            "eval_tokens",
            "track_interval",
            "save_interval",
            "keep_every",
            "loss_spike",
            "max_rollbacks",
            "fsdp_shard_size",
            "loss_chunks",
            "peak_flops",
            "seed",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        saves = [n for n in ("eval_interval", "save_interval", "keep_every") if getattr(self, n) % self.log_interval]
        if self.loss_spike and saves:  # or a checkpoint could be of a loss that nobody has looked at
            raise ValueError(
                f"loss_spike needs {', '.join(saves)} to be a multiple of log_interval={self.log_interval}"
            )
        if not self.out_dir:
            raise ValueError("out_dir is empty: name a folder")
        if self.fsdp_shard_size and self.parallel != "fsdp":
            raise ValueError(f"fsdp_shard_size={self.fsdp_shard_size} needs parallel=fsdp: set that, or leave it out")


RECENT = 20  # logged losses that a spike is measured against, once there are a quarter of them


class RollBack(Exception):
    """The loss spiked at `step`: the run is to go on from its last checkpoint."""

    def __init__(self, step: int, loss: float, usual: float):
        self.step, self.loss, self.usual = step, loss, usual


def split_batch(batch_size: int, micro_batch_size: int, world_size: int) -> tuple:
    """(micro batch, accumulation steps) of one process; ValueError with the nearest valid values otherwise."""
    share, rest = divmod(batch_size, world_size)
    if rest:
        low = share * world_size
        near = f"{low} or {low + world_size}" if low else str(world_size)
        raise ValueError(f"batch_size={batch_size} cannot be split over {world_size} processes: use {near}")
    valid = [m for m in range(1, share + 1) if share % m == 0]
    micro = micro_batch_size or max(m for m in valid if m <= 16)
    if micro not in valid:
        near = sorted(sorted(valid, key=lambda m: abs(m - micro))[:2])
        raise ValueError(
            f"micro_batch_size={micro} does not divide the {share} sequences of each process "
            f"(batch_size={batch_size} over {world_size}): use {' or '.join(map(str, near))}"
        )
    return micro, share // micro


def start_model(config: TrainConfig, flags: GPTConfig, meta: dict, env: Env) -> tuple:
    """(empty model, weights or None: to be drawn, checkpoint to resume from or None), as init_from says.

    Prints what it took from where."""
    out_dir, source = Path(config.out_dir), config.init_from
    checkpoint = rundir.load_latest(out_dir, env.print) if source in ("resume", "auto") else None
    if source == "resume" and checkpoint is None:
        raise ValueError(
            f"nothing to resume in {out_dir} (no last.pt or prev.pt): use --init_from=scratch or auto, another "
            "--out_dir, or --init_from=CHECKPOINT_FILE for a new run from its weights"
        )
    earlier = sorted(rundir.fingerprint(out_dir))
    if checkpoint is None and earlier and not config.overwrite and not config.eval_only:
        raise ValueError(
            f"{out_dir} holds checkpoints of an earlier run ({', '.join(earlier[:4])}): continue it with "
            "--init_from=resume, choose another --out_dir, or replace it with --overwrite=True"
        )
    weights = saved_meta = None
    if checkpoint is None and source in ("scratch", "auto"):
        model = GPT.empty(flags)
        if flags.admin:  # on the CPU and on the same few sequences everywhere, so that a seed means the same weights
            data, profiled = (
                Dataset(config.dataset, flags.block_size, config.seed, verify=False),
                GPT(flags, config.seed),
            )
            profiled.profile_admin(torch.from_numpy(data.batch(0, config.batch_size, slice(0, 8))[0]))
            weights = profiled.state_dict()
            env.print("admin: profiled on the first sequences")
    elif checkpoint is None and source in GPT2:
        pretrained, saved_meta = GPT.from_pretrained(source, dropout=flags.dropout), Tokenizer.meta_for("gpt2")
        model, weights = GPT.empty(pretrained.config), pretrained.state_dict()
    else:
        if checkpoint is None and not Path(source).is_file():
            allowed = ", ".join(("scratch", "resume", "auto", *GPT2))
            raise ValueError(f"init_from={source!r} is neither a checkpoint file nor one of {allowed}")
        found = checkpoint or rundir.load_checkpoint(Path(source))
        # the architecture comes from the checkpoint alone; dropout has no parameters and may change
        model, weights, saved_meta = GPT.shaped_like(found, dropout=flags.dropout), found["model"], found["meta"]
        print_changes("model of the checkpoint, not of the flags", asdict(flags), asdict(model.config), env)
        if checkpoint:
            used = {name: value for name, value in asdict(config).items() if value is not None}
            print_changes("changed on resume", checkpoint["train_config"], used, env)
        env.print(f"weights: {out_dir if checkpoint else source}, step {found['step']}")
    different = saved_meta and any(meta.get(k) != saved_meta.get(k) for k in ("tokenizer", "vocab_size", "chars"))
    if different or meta["vocab_size"] > model.config.vocab_size:
        trained = f"{saved_meta['tokenizer']}, {saved_meta['vocab_size']}" if different else model.config.vocab_size
        raise ValueError(
            f"dataset {config.dataset!r} ({meta['tokenizer']}, {meta['vocab_size']} tokens) does not fit the model's "
            f"vocabulary ({trained} tokens): choose another dataset, or start from scratch"
        )
    return model, weights, checkpoint


def place(model: GPT, weights: dict | None, config: TrainConfig, env: Env) -> None:
    """Put an empty model on its device, sharded under fsdp, and fill it with `weights`, or from the seed."""
    fixed = 12 * model.num_params() + state_bytes(model, config)  # fp32 weights, gradients, and DDP's copy of these
    env.parallel, reason = runtime.choose_parallel(config.parallel, env, fixed)
    env.check_same({"parallel": env.parallel, "dtype": env.dtype, "device": env.device.type})
    if env.parallel == "fsdp":
        runtime.shard(model, config.fsdp_shard_size, env)
    shards = f", shards of {config.fsdp_shard_size}" if config.fsdp_shard_size else ""
    env.print(f"parallel {env.parallel} ({reason}), {env.world_size} processes{shards}")
    model.to_empty(device=env.device)
    if weights is None:
        model.init_weights(config.seed)
    else:
        model.load_weights(weights)


def prepare_model(model: GPT, config: TrainConfig, env: Env) -> GPT:
    """`model` on its device, computing as configured."""
    model.checkpointing, model.loss_chunks = config.activation_checkpointing, config.loss_chunks
    return model.to(env.device).set_compute_dtype(env.dtype)


def print_changes(title: str, old: dict, new: dict, env: Env) -> None:
    defaults = TrainConfig(optimizer=new.get("optimizer", "adamw"))
    fill_defaults(defaults)
    old = {f.name: f.default for f in fields(GPTConfig)} | asdict(defaults) | old  # what older versions did not have
    changes = [f"{k} {old[k]} → {new[k]}" for k in new if k in old and old[k] != new[k]]
    changes = [line for line in changes if line.split()[0] not in ("init_from", "overwrite", "out_dir", "vocab_size")]
    if changes:
        env.print(f"{title}: {', '.join(changes)}")


@torch.no_grad()
def evaluate(model, data: Dataset, config: TrainConfig, micro: int, env: Env, stop: Stop) -> float | None:
    """Mean loss in nats per token over the fixed validation windows, split over ranks; None if stopped meanwhile.

    It is a sum of loss · tokens over a sum of tokens, so it depends on neither the batch size nor the rank count."""
    starts = data.validation(config.eval_tokens)
    mine, batches = starts[env.rank :: env.world_size], -(-len(starts) // (env.world_size * micro))
    dtype = torch.float32 if env.device.type == "mps" else torch.float64  # mps has no fp64
    sums, stopped = torch.zeros(2, device=env.device, dtype=dtype), False
    model.eval()
    for i in range(batches):  # as many on every rank
        x, y = data.val_batch(mine[i * micro : (i + 1) * micro], micro)
        count = int((y != -1).sum())
        if config.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # or each batch would be recorded anew, as part of one long step
        loss = model(*env.put(*env.pin(x, y)))[1]
        sums += torch.stack((loss * count, torch.full_like(loss, count)))
        if stopped := stop.agreed():
            break
    model.train()
    loss_sum, count = env.sum(sums).tolist()
    return None if stopped else loss_sum / count


def training_step(model, raw_model, optimizer, scaler, x, y, micro: int, config, lap=lambda part: None) -> tuple:
    """One optimizer step on the sequences x, y (rows, T) of this process, `micro` rows at a time; `model` is raw_model
    as compiled and wrapped. Returns three tensors on the device, without waiting for it: the mean loss, the gradient
    norm before clipping, and whether that is not finite, when nothing was changed. `lap` hears of each part done."""
    loss, batches = torch.zeros((), device=x.device), list(zip(x.split(micro), y.split(micro), strict=True))
    optimizer.zero_grad(set_to_none=True)
    if config.cuda_graphs:
        torch.compiler.cudagraph_mark_step_begin()
    for i, (inputs, targets) in enumerate(batches):
        with runtime.sync_gradients(model, i == len(batches) - 1):
            micro_loss = model(inputs, targets)[1] / len(batches)
            lap("forward")
            scaler.scale(micro_loss).backward()
            lap("backward")
        loss += micro_loss.detach()
    scaler.unscale_(optimizer)
    parameters = [p for p in raw_model.parameters() if p.grad is not None]
    norm = whole(torch.nn.utils.get_total_norm([p.grad for p in parameters]))
    bad = ~norm.isfinite()
    if config.grad_clip:  # a bad gradient is left as it is, to be named
        torch.nn.utils.clip_grads_with_norm_(parameters, config.grad_clip, norm.masked_fill(bad, 0.0))
    lap("clip")
    optimizer.found_inf = bad.float()  # a bad step changes neither parameters nor optimizer state
    optimizer.step()
    scaler.update()
    raw_model.power_iteration()  # σReparam; else nothing
    lap("optimizer")
    return loss, norm, bad


def train(config: TrainConfig, flags: GPTConfig, env: Env, stop: Stop, back: RollBack | None = None) -> int:
    """Train as configured and return the exit code. Every rank runs this and meets the same collectives.

    RollBack asks to be called again with it, to resume."""
    out_dir, meta = Path(config.out_dir), load_meta(config.dataset, verify=env.main)
    env.check_same({"contents of the dataset": meta})
    flags.vocab_size = flags.vocab_size or meta["vocab_size"]
    micro, accumulation = split_batch(config.batch_size, config.micro_batch_size, env.world_size)

    # the model, its optimizer, and where an earlier run stopped
    seen = rundir.fingerprint(out_dir)
    raw_model, weights, checkpoint = start_model(config, flags, meta, env)
    data = Dataset(config.dataset, raw_model.config.block_size, config.seed, verify=False)
    place(raw_model, weights, config, env)
    prepare_model(raw_model, config, env)
    optimizer = make_optimizer(raw_model, config)
    scaler = torch.amp.GradScaler(env.device.type, enabled=env.dtype == torch.float16)  # of the loss, for fp16
    step, tokens, skipped, evaluated, saved, best_val_loss, wandb_id, pending = 0, 0, 0, -1, -1, math.inf, None, {}
    recent, shift, rollbacks = [], 0, 0  # logged losses; step s has batch s + shift
    if checkpoint:
        used = checkpoint["train_config"].get("optimizer", config.optimizer)
        if used == config.optimizer:
            load_optimizer(optimizer, checkpoint["optimizer"], checkpoint["step"])
            for group in optimizer.param_groups if checkpoint["step"] else ():
                group["lr"] = lr_at(checkpoint["step"] - 1, config, group)  # if no step follows, it is saved so
        else:
            env.print(f"optimizer {used} → {config.optimizer}: its state starts fresh")
        if checkpoint["scaler"]:  # empty after a run that needed none
            scaler.load_state_dict(checkpoint["scaler"])
        step = saved = checkpoint["step"]
        tokens, skipped, evaluated = checkpoint["tokens"], checkpoint["skipped"], checkpoint["evaluated"]
        best_val_loss, wandb_id, pending = (checkpoint[k] for k in ("best_val_loss", "wandb_id", "pending"))
        recent, shift, rollbacks = (checkpoint[k] for k in ("recent", "shift", "rollbacks"))
    resumed, checkpoint, weights = checkpoint and checkpoint["path"], None, None  # frees their memory
    if not env.same(step):  # here all ranks meet, so that all have read what rank 0 may now replace
        raise ValueError(f"processes found different checkpoints: {out_dir} must be one folder that all of them see")
    if back:
        passed, rollbacks, saved = back.step - step, rollbacks + 1, -1  # and saved so
        shift, event = shift + passed, dict(rolled_back_from=back.step, spike_loss=back.loss, usual_loss=back.usual)
        env.print(
            f"rolled back to step {step}: the loss spiked to {back.loss:.4f} at step {back.step}, usual are "
            f"{back.usual:.4f}; the {passed} batches between are passed over ({rollbacks} of {config.max_rollbacks})"
        )
    step_tokens = config.batch_size * data.block_size
    step_flops = step_tokens * raw_model.flops_per_token()
    env.print(describe_groups(optimizer, raw_model))
    n, counted = raw_model.num_params(), raw_model.num_params(positions=False)
    env.print(f"{n:,} parameters ({counted / 1e6:.1f}M without the position table)")
    env.print(
        f"{config.batch_size} × {data.block_size} = {step_tokens:,} tokens a step = {env.world_size} processes × "
        f"{accumulation} accumulation × {micro} sequences; {data.windows:,} windows an epoch"
    )
    # by the whole run's work, not what is left of it: a resumed run computes as it did before
    work = 0 if config.eval_only else step_flops * config.max_iters / env.world_size
    compiled, reason = runtime.choose_compile(config.compile, env.device, work)
    if env.agree(not compiled) and compiled:
        compiled, reason = False, "auto: another process cannot"
    env.print(f"compile {compiled} ({reason}), attention {runtime.attention_backend(raw_model.config, env)}")
    if config.cuda_graphs:
        runtime.check_cuda_graphs(compiled, accumulation, env)
    if config.warmup_iters >= config.max_iters and not config.eval_only:
        env.print(f"note: warm-up ({config.warmup_iters} steps) does not end within max_iters={config.max_iters}")
    for note in raw_model.config.notes() + notes(config, raw_model):
        env.print(f"note: {note}")
    example = env.put(*env.pin(*data.val_batch(data.validation(1), micro)))
    model = runtime.compile_model(raw_model, config, example, env) if compiled else raw_model
    if config.eval_only:
        val_loss = evaluate(model, data, config, micro, env, stop)
        if val_loss is not None:
            env.print(f"step {step}: validation loss {val_loss:.6f}")
        return stop.exit_code()

    step_model = runtime.distribute(model, env)
    tracker = Tracker(raw_model, optimizer, data, config, env) if config.track_interval else None
    log, saver = None, Saver(out_dir)
    env.closing.append(saver.close)
    if env.main:
        configs = {"model": asdict(raw_model.config), "train": asdict(config)}
        wandb = (config.wandb_project, wandb_id) if config.wandb_log else None
        # the row of an interrupted evaluation is still to be written, and that of a roll-back which was not saved
        until = step - bool(pending), rollbacks - bool(back)
        log = Metrics(out_dir, resumed, until, configs, 8 * n, seen, wandb)  # 8 bytes: at least weights, a momentum
        wandb_id = log.wandb_id
        if back:
            log.write({"step": step, "tokens": tokens, **event, "rollbacks": rollbacks})
    rows = slice(env.rank * micro * accumulation, (env.rank + 1) * micro * accumulation)  # of the batch, here
    next_batch = Prefetch(lambda step: env.pin(*data.batch(step + shift, config.batch_size, rows)))
    peak = runtime.peak_flops(env.device, env.dtype, config.peak_flops)
    # skipped steps: in all, in a row now, most in a row since the last look; counted without a host sync
    skipped = torch.tensor([skipped, 0.0, 0.0], device=env.device)
    loss = norm = bad = rates = None  # of the step just made
    gc.collect()
    gc.freeze()  # what is alive now stays; the collector need not walk through it during the run
    timed, clock = step, time.perf_counter()

    while True:
        saver.check()
        row, pending, is_best, failure, spiked = {"step": step, "tokens": tokens} | pending, {}, False, None, False
        if loss is not None and (step % config.log_interval == 0 or step >= config.max_iters):
            values = torch.stack((env.sum(loss) / env.world_size, norm, *skipped)).tolist()  # the host waits only here
            seconds = (time.perf_counter() - clock) / (step - timed)
            row |= {"train_loss": values[0], **rates, "grad_norm": values[1], "skipped_steps": int(values[2])}
            row |= {"tokens_per_s": step_tokens / seconds, "peak_mem_bytes": runtime.peak_memory_bytes(env.device)}
            row["mfu"] = step_flops / seconds / (peak * env.world_size) if peak else None
            env.print(runtime.progress(row, config.max_iters, seconds))
            timed, clock, skipped[2] = step, time.perf_counter(), 0.0
            if values[4] >= config.max_skipped:  # the parameters are good, since every such step was skipped
                failure = (
                    f"{int(values[4])} steps in a row, up to about step {step}, had a gradient that is not finite "
                    f"(first bad tensor: {runtime.first_bad(raw_model, env)}). Nothing of them was kept; resume "
                    f"{out_dir} with a lower learning rate"
                )
            usual = statistics.median(recent) if len(recent) >= RECENT // 4 else math.inf
            if spiked := bool(config.loss_spike) and usual + config.loss_spike < values[0] < math.inf:
                failure = (
                    f"the loss spiked to {values[0]:.4f} at step {step} (usual are {usual:.4f}), after {rollbacks} "
                    f"roll-backs: resume {out_dir} with a lower learning rate, or raise max_rollbacks"
                )
            recent = [*recent, values[0]][-RECENT:] if math.isfinite(values[0]) else recent

        evaluating = (
            evaluated != step and (step % config.eval_interval == 0 or step >= config.max_iters) and not failure
        )
        keep = bool(config.keep_every) and step % config.keep_every == 0
        due = (
            saved != step
            and not spiked
            and (keep or back or (config.save_interval and step % config.save_interval == 0))
        )
        tracking = tracker and loss is not None and tracker.due(step)
        if evaluating or due or tracking:
            env.synchronize()  # what the GPU still has to do belongs to the steps
        pause = time.perf_counter()
        if tracking:  # before an evaluation, whose CUDA graph may have the gradients' memory
            row["track"] = tracker.after(norm, bad)
        if evaluating:
            val_loss = evaluate(model, data, config, micro, env, stop)
            if val_loss is None:
                pending = rundir.finite(row)  # interrupted: the run that resumes here evaluates, and logs the whole row
            else:
                evaluated, is_best, row["val_loss"] = step, val_loss < best_val_loss, val_loss
                best_val_loss = min(best_val_loss, val_loss)
                env.print(f"step {step}: validation loss {val_loss:.4f}{' (best)' if is_best else ''}")
        if env.main and len(row) > 2 and not pending:
            log.write(row | ({"failure": failure} if failure else {}))
        if spiked and rollbacks < config.max_rollbacks:
            saver.finish()
            if env.main:
                log.close()
            env.agree(False)  # all wait for the checkpoint
            gc.unfreeze()
            raise RollBack(step, values[0], usual)
        stopping = stop.agreed()
        if due or (evaluating and not pending) or (saved != step and not spiked and (stopping or failure)):
            saved, back = step, None
            saver.finish()  # before there is a second copy
            tensors = snapshot({"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}, env.main)
            if env.main:
                state = {"scaler": scaler.state_dict(), "step": step, "tokens": tokens, "evaluated": evaluated}
                state |= {"skipped": int(skipped[0]), "pending": pending, "recent": recent, "shift": shift}
                state |= {"rollbacks": rollbacks, "best_val_loss": best_val_loss, "wandb_id": wandb_id, "meta": meta}
                state |= {"model_config": asdict(raw_model.config), "train_config": asdict(config)}
                saver.save(tensors | state, is_best, keep)
            del tensors
        if failure:
            saver.finish()
            raise ValueError(failure)
        if stopping or step >= config.max_iters:
            break
        clock += time.perf_counter() - pause

        # one optimizer step; all randomness in it is a function of (seed, step, rank), so resuming needs no RNG state
        torch.manual_seed(((config.seed * 1_000_003 + step) * 65_537 + env.rank) % 2**63)
        rates = {"lr": lr_at(step, config)}
        for group in optimizer.param_groups:
            group["lr"] = rates[f"lr_{group['label']}"] = lr_at(step, config, group)
        x, y = env.put(*next_batch(step))
        if tracker and tracker.due(step + 1):
            tracker.before()
        loss, norm, bad = training_step(step_model, raw_model, optimizer, scaler, x, y, micro, config)
        streak = (skipped[1] + 1) * bad
        skipped = torch.stack((skipped[0] + bad, streak, torch.maximum(skipped[2], streak)))
        step, tokens = step + 1, tokens + step_tokens

    gc.unfreeze()
    saver.finish()
    if env.main:
        log.close()
        rundir.draw_loss(out_dir, out_dir.name)
        env.print(f"{'stopped' if stopping else 'done'} at step {step}; run directory {out_dir}")
    return stop.exit_code()


def main() -> int:
    (flags, config), given = configure(GPTConfig, TrainConfig, description=__doc__)
    try:
        with runtime.environment(config.device, config.dtype, config.timeout_s) as env, Stop(env) as stop:
            config.check()  # in here, so that other processes hear of it at once
            fill_defaults(config)
            # the rest may be a machine's own; that the data are the same is seen when they have been read
            env.check_same({**asdict(flags), **asdict(config), "dataset": None, "device": None})
            env.print(describe(flags, config, given=given))
            sources = [given.get(name, (None, ""))[1] for name in ("optimizer", "learning_rate")]
            if sources[0] == "command line" and sources[1] not in ("", "command line"):
                env.print(
                    f"note: learning_rate={config.learning_rate:g} is from {sources[1]}; does it suit this optimizer?"
                )
            back = None
            while True:
                try:
                    return train(config, flags, env, stop, back)
                except RollBack as e:
                    back, config.init_from = e.with_traceback(None), "resume"  # the traceback would keep the old model
                gc.collect()
    except runtime.EXPECTED as e:
        return runtime.report(e)


if __name__ == "__main__":
    runtime.end_with(main)
