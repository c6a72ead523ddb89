"""torch.compile: as one graph or in parts, and everything before the run begins."""

import time

import torch
import torch._functorch.config

from layers.sharding import local_shard
from nanodnt.files import reason_of

# then torch keeps compiled code of networks that have functions like `Normalise`: their bodies are
# part of its key
torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True

WRONG = 0.5  # relative error of a role's gradient beyond which it is no rounding: our choice
# from so many blocks, auto compiles them one by one: a graph grows with their number; our choice
DEEP = 36
MACHINE = 8  # GPUs between which messages are surely fast: our choice

# What a step under DDP loses, counted for H100s. By blocks, to write and read stream and norms
# between them, 5.5 ps for each token, block and channel: 1.65 ms for 32,768 tokens of 12 blocks of
# 768 channels. As one graph, to average all gradients after the backward pass, 19 ps for each
# parameter: 4 bytes go 2 · 7/8 times over NVLink.
COST_OF_ONE_GRAPH = 3.56  # for a parameter; by blocks it is 1 for a token, block and channel


def choose_blocks(config, model, parallel: str, processes: int) -> tuple:
    """(bool, reason): whether to compile each block by itself, and not the whole model as one
    graph. Under DDP the gradients then leave in buckets during the backward pass; if not, in one
    message after it."""
    n_layer, width = len(model.blocks), model.config.n_embd
    if parallel == "fsdp":
        return True, "between which FSDP gathers weights and reduces gradients"
    if config.compile != "auto":
        return config.compile == "blocks", "as asked"
    if parallel != "ddp" or processes == 1 or n_layer >= DEEP:
        return n_layer >= DEEP, f"auto: {n_layer} layers"
    if processes > MACHINE:
        return True, "auto: gradients leave during the backward pass, since a network may be slow"
    tokens = config.batch_size * model.config.block_size / processes
    few = tokens * n_layer * width < COST_OF_ONE_GRAPH * model.num_params()
    return (
        few,
        f"auto: {tokens:,.0f} tokens of a process in a step are {'few' if few else 'many'} for one message",
    )


def compile_parts(model, **how):
    """Compile the embedding, each block and the loss, in place; returns the model. Blocks of a kind
    share a graph. The methods inside the modules' hooks are replaced, so all parameter names stay
    as they are. `how`: of torch.compile."""
    for module, name in parts(model):
        setattr(module, name, torch.compile(getattr(module, name), dynamic=False, **how))
    return model


def parts(model) -> list:
    """(module, name of the method) of each part that `compile_parts` compiles."""
    return [(model, "embed"), *((block, "forward") for block in model.blocks), (model, "loss")]


def can_use_flex(model_config, config, env) -> bool:
    """Whether it keeps documents apart by FlexAttention: on GPUs, heads of 16 channels or more,
    without dropout."""
    possible = (
        env.device.type == "cuda" and not model_config.dropout and model_config.head_dim >= 16
    )
    return config.doc_mask and possible


def gradient_errors(model, compiled, example: tuple, dtype) -> dict:
    """{role: (sum of the squared errors of compiled code's gradients in this process, of the
    squared gradients of eager code)}; {} with dropout, which draws other numbers. Eager code gets
    one row, compiled code as many copies of it as a micro batch has rows."""
    found, flex, sums, roles = {}, model.runtime.flex_attention, {}, model.roles()
    scale = 2.0**16 if dtype == torch.float16 else 1.0  # small gradients are 0 in fp16
    (scale * compiled(*(t[:1].expand_as(t).contiguous() for t in example))[1]).backward()
    if model.config.dropout or model.config.drop_path:
        return {}
    # on the host: there may be no room for all gradients twice
    for name, p in model.named_parameters():
        found[name], p.grad = p.grad is not None and local_shard(p.grad).cpu(), None
    model.runtime.flex_attention = False  # eager, it keeps all attention weights
    try:
        with torch.compiler.set_stance("force_eager"):
            (scale * model(*(t[:1] for t in example))[1]).backward()
    finally:
        model.runtime.flex_attention = flex
    for name, p in model.named_parameters():
        if p.grad is not None and roles[name] != "balance":  # counts of tokens, not means
            wanted = local_shard(p.grad).float()
            error = wanted - found[name].to(wanted) if found[name] is not False else wanted
            sums[roles[name]] = sums.get(roles[name], 0) + torch.stack(
                [t.square().sum() for t in (error, wanted)]
            )
    return sums


def wrong_gradients(sums: dict, env) -> list:
    """The roles whose gradients are others than eager code's, beyond rounding: torch 2.11 once made
    them zero without a word. `sums`: of `gradient_errors`. All ranks must call this."""
    if not sums:
        return []
    errors, squares = env.sum(torch.stack(list(sums.values()))).T
    # a gradient that is zero but for rounding may differ
    limits = WRONG**2 * squares + 1e-6 * squares.sum()
    wrong = [role for role, more in zip(sums, (~(errors <= limits)).tolist(), strict=True) if more]
    return wrong if squares.isfinite().all() else []


def compile_model(model, config, example: tuple, env):
    """The model compiled, whole or in parts (then in place), and tried on one `example` micro batch
    (idx, targets) in evaluation and in training mode, so that nothing compiles, or fails to, during
    the run. If it fails on a CPU with compile=auto, there is one warning and the model runs
    eagerly, on all processes. On a GPU, where that would be slow for days, with another setting,
    and under FSDP, it is a ValueError. All ranks must call this."""
    t0, problem, sums, gpu = time.time(), "", {}, env.device.type == "cuda"
    # whose others wait for this one's weights
    must = gpu or config.compile != "auto" or env.parallel == "fsdp"
    model.runtime.flex_attention = can_use_flex(model.config, config, env)
    blocks, why = choose_blocks(config, model, env.parallel, env.world_size)
    fix = "use --compile=False, or another torch"
    how = {}
    if gpu and config.kernels != "off":
        how = dict(options={"combo_kernels": True})  # small kernels that could run together are one
        fix = f"try --kernels=off first; else {fix}"
    env.print(
        f"compiling {'embedding, blocks and loss by themselves' if blocks else 'the model as one graph'} ({why})"
    )
    try:
        compiled = (
            compile_parts(model, **how) if blocks else torch.compile(model, dynamic=False, **how)
        )
        model.eval()
        with torch.no_grad():
            compiled(*example)
        model.train()
        if not config.eval_only:
            sums = gradient_errors(model, compiled, example, env.dtype)
    except Exception as e:  # whatever torch.compile, or the compiler that it calls, raises
        # eager needs even more
        if isinstance(e, torch.OutOfMemoryError) or "out of memory" in str(e).lower():
            raise torch.OutOfMemoryError(str(e)) from e
        problem = f"torch.compile failed ({reason_of(e)[:200]}); it needs a C compiler, on a GPU Python.h, too"
        if must:
            raise ValueError(f"{problem} (on Debian: apt install gcc python3-dev): {fix}") from e
    finally:
        model.train().zero_grad(set_to_none=True)
    failed = env.any_rank(problem != "")
    if not failed and (wrong := wrong_gradients(sums, env)):
        failed = True
        problem = f"gradients of {', '.join(wrong)} in compiled code are not those of eager code"
        if must:
            raise ValueError(f"{problem}: {fix}")
    if failed:
        env.print(
            f"warning: {problem or 'torch.compile failed on another process'}; running eagerly"
        )
        for module, name in parts(model):  # undo compile_parts
            vars(module).pop(name, None)
        model.runtime.flex_attention = False  # eager, it would keep all attention weights
        return model
    env.print(f"compiled in {time.time() - t0:.0f} s")
    return compiled
