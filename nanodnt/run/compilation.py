"""torch.compile, as one graph or in parts. Everything is compiled before the run begins."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch._functorch.config
from torch import Tensor, nn

from layers.sharding import local_shard
from model import GPTConfig, Transformer
from nanodnt.files import reason_of
from nanodnt.run.environment import Env
from nanodnt.run.hardware import Choice
from nanodnt.settings import TrainConfig
from nanodnt.tables import count

# Lets torch cache the compiled code of networks that use autograd functions such as `Normalise`:
# the source of these functions becomes part of the key.
torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True

# Relative error of a role's gradient above which it is wrong, and not only rounded: our choice
WRONG = 0.5
# Number of blocks from which auto compiles them one by one, since a graph grows with them: our
# choice
DEEP = 36
MACHINE = 8  # number of GPUs between which messages are surely fast: our choice

# Costs of a step under DDP, counted for H100s. By blocks: 5.5 ps for each token, block and channel,
# to write and read stream and norms between the blocks; 1.65 ms for 32,768 tokens of 12 blocks of
# 768 channels. As one graph: 19 ps for each parameter, to average all gradients after the backward
# pass; 4 bytes go 2 · 7/8 times over NVLink. This is the second divided by the first.
COST_OF_ONE_GRAPH = 3.56


class Part(NamedTuple):
    """One of the parts that `compile_parts` compiles."""

    module: nn.Module
    method: str  # name of the method


def choose_blocks(
    setting: str | bool, batch_size: int, model: Transformer, parallel: str, processes: int
) -> Choice:
    """Whether to compile each block by itself, instead of the whole model as one graph, under this
    `setting` of compile. By blocks, gradients under DDP leave in buckets during the backward pass;
    as one graph, in one message after it."""
    n_layer = len(model.blocks)
    if parallel == "fsdp":
        return Choice(True, "between which FSDP gathers weights and reduces gradients")
    if setting != "auto":
        return Choice(setting == "blocks", "as asked")
    if parallel != "ddp" or processes == 1 or n_layer >= DEEP:
        return Choice(n_layer >= DEEP, f"auto: {count(n_layer, 'layer')}")
    if processes > MACHINE:
        reason = "auto: gradients leave during the backward pass, since a network may be slow"
        return Choice(True, reason)
    tokens = batch_size * model.config.block_size / processes
    cost_by_blocks = tokens * n_layer * model.config.n_embd
    by_blocks = cost_by_blocks < COST_OF_ONE_GRAPH * model.num_params()
    amount = "few" if by_blocks else "many"
    reason = f"auto: {tokens:,.0f} tokens of a process in a step are {amount} for one message"
    return Choice(by_blocks, reason)


def compile_parts(model: Transformer, **options: Any) -> Transformer:
    """Compile the embedding, each block and the loss, in place; returns the model.

    Blocks of a kind share a graph. Methods are replaced, not modules, so parameters keep their
    names and hooks stay outside. `options`: keyword arguments of torch.compile."""
    for module, method in parts(model):
        setattr(module, method, torch.compile(getattr(module, method), dynamic=False, **options))
    return model


def parts(model: Transformer) -> list[Part]:
    """The parts that `compile_parts` compiles."""
    blocks = [Part(block, "forward") for block in model.blocks]
    return [Part(model, "embed"), *blocks, Part(model, "loss")]


def can_use_flex(model_config: GPTConfig, doc_mask: bool, env: Env) -> bool:
    """Whether FlexAttention keeps documents apart: on GPUs, for heads of 16 channels or more,
    without dropout."""
    is_possible = model_config.head_dim >= 16 and not model_config.dropout
    return doc_mask and env.device.type == "cuda" and is_possible


def gradient_errors(
    model: Transformer,
    compiled: Callable[..., Any],
    example: tuple[Tensor, ...],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Compare the gradients of compiled and eager code on a micro batch of equal rows.

    Returns {role: (sum of the squared errors, sum of the squared gradients of eager code)} of this
    process; {} with dropout, where the two draw different numbers. Eager code gets a single row,
    because there may be no memory for more."""
    scale = 2.0**16 if dtype == torch.float16 else 1.0  # small gradients are 0 in fp16
    row = [t[:1] for t in example]
    equal_rows = [t[:1].expand_as(t).contiguous() for t in example]
    (scale * compiled(*equal_rows)[1]).backward()
    if model.config.dropout or model.config.drop_path:
        return {}
    gradients = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            gradients[name] = local_shard(p.grad).cpu()  # a GPU may have no room for both
        p.grad = None
    flex = model.runtime.flex_attention
    model.runtime.flex_attention = False  # eager, it keeps all attention weights
    try:
        with torch.compiler.set_stance("force_eager"):
            (scale * model(*row)[1]).backward()
    finally:
        model.runtime.flex_attention = flex
    sums = {}
    roles = model.roles()
    for name, p in model.named_parameters():
        role = roles[name]
        if p.grad is None or role == "balance":  # balance: counts of tokens, not means
            continue
        wanted = local_shard(p.grad).float()
        error = wanted
        if name in gradients:
            error = wanted - gradients[name].to(wanted)
        squares = torch.stack([error.square().sum(), wanted.square().sum()])
        sums[role] = sums.get(role, 0) + squares
    return sums


def wrong_gradients(sums: dict[str, Tensor], env: Env) -> list[str]:
    """The roles whose gradients in compiled code differ from eager code's by more than rounding:
    torch 2.11 once made them zero without a word. `sums`: from `gradient_errors`. All ranks must
    call this."""
    if not sums:
        return []
    errors, squares = env.sum(torch.stack(list(sums.values()))).T
    if not squares.isfinite().all():
        return []
    # a gradient that is zero up to rounding may differ
    limits = WRONG**2 * squares + 1e-6 * squares.sum()
    is_wrong = ~(errors <= limits)  # also for NaN
    return [role for role, wrong in zip(sums, is_wrong.tolist(), strict=True) if wrong]


def compile_model(
    model: Transformer, config: TrainConfig, example: tuple[Tensor, ...], env: Env
) -> Callable[..., Any]:
    """The model compiled, as one graph or in parts (in place).

    It is tried on an `example` micro batch (idx, targets), in both modes, so that nothing is
    compiled, or fails, during the run. If it fails on a CPU with compile=auto, all processes warn
    and run eagerly. ValueError if it fails otherwise: on a GPU, where eager code is slow, with
    another setting, and under FSDP, where others wait for its weights. All ranks must call this."""
    start = time.time()
    on_gpu = env.device.type == "cuda"
    must_compile = on_gpu or config.compile != "auto" or env.parallel == "fsdp"
    model.runtime.flex_attention = can_use_flex(model.config, config.doc_mask, env)
    by_blocks, reason = choose_blocks(
        config.compile, config.batch_size, model, env.parallel, env.world_size
    )
    graphs = "the model as one graph"
    if by_blocks:
        graphs = "embedding, blocks and loss by themselves"
    env.print(f"compiling {graphs} ({reason})")
    options = {}
    advice = "use --compile=False, or another torch"
    if on_gpu and config.kernels != "off":
        options["options"] = {"combo_kernels": True}  # small independent kernels run as one
        advice = f"try --kernels=off first; else {advice}"

    problem = ""
    sums = {}
    try:
        if by_blocks:
            compiled = compile_parts(model, **options)
        else:
            compiled = torch.compile(model, dynamic=False, **options)
        sums = try_compiled(model, compiled, example, config.eval_only, env)
    except Exception as e:  # whatever torch.compile, or the compiler that it calls, raises
        if isinstance(e, torch.OutOfMemoryError) or "out of memory" in str(e).lower():
            raise torch.OutOfMemoryError(str(e)) from e  # eager code needs even more
        problem = f"torch.compile failed ({reason_of(e)[:200]}); "
        problem += "it needs a C compiler, on a GPU Python.h, too"
        if must_compile:
            packages = "(on Debian: apt install gcc python3-dev)"
            raise ValueError(f"{problem} {packages}: {advice}") from e
    finally:
        model.train().zero_grad(set_to_none=True)

    failed = env.any_rank(problem != "")
    if failed and not problem:
        problem = "torch.compile failed on another process"
    if not failed and (wrong := wrong_gradients(sums, env)):
        failed = True
        problem = f"gradients of {', '.join(wrong)} in compiled code are not those of eager code"
        if must_compile:
            raise ValueError(f"{problem}: {advice}")
    if failed:
        env.print(f"warning: {problem}; running eagerly")
        undo_compile_parts(model)
        model.runtime.flex_attention = False  # eager, it would keep all attention weights
        return model
    env.print(f"compiled in {time.time() - start:.0f} s")
    return compiled


def try_compiled(
    model: Transformer,
    compiled: Callable[..., Any],
    example: tuple[Tensor, ...],
    eval_only: bool,
    env: Env,
) -> dict[str, Tensor]:
    """Run compiled code in evaluation mode and, unless the run only evaluates, in training mode.
    Returns `gradient_errors`."""
    model.eval()
    with torch.no_grad():
        compiled(*example)
    model.train()
    if eval_only:
        return {}
    return gradient_errors(model, compiled, example, env.dtype)


def undo_compile_parts(model: Transformer) -> None:
    """Give each part its own method again."""
    for module, method in parts(model):
        vars(module).pop(method, None)
