"""Any torch.optim.Optimizer class: --optimizer=MODULE:CLASS, with its own --optimizer_args.

The class updates the parameters of our groups: it gets their learning rates and weight decays as
`lr` and `weight_decay` of its groups, and clipped gradients. Its state is part of our checkpoints.
Only the balance rule stays ours. docs/optimizers.md has what the class must do.
"""

import ast
import inspect
import sys
import traceback
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from layers.sharding import is_sharded
from nanodnt.optim.optimizer import Optimizer
from nanodnt.optim.registry import (
    OPTIMIZERS,
    RULES,
    Group,
    Rule,
    Work,
    divide_gradients,
    refuse,
)

# Values in nested dicts and lists that checkpoints hold: they are loaded with weights_only.
SAVABLE = {Tensor, torch.nn.Parameter, torch.dtype, int, float, bool, str, type(None)}

AnyState = dict[str, Any]  # state of one parameter under a class that is not ours


def register_class(name: str, arguments: str) -> Rule:
    """The rule of --optimizer=`name`, MODULE:CLASS, also as RULES[name]. Neither default is the
    class's: a learning rate must be given, and weight decay is 0 since many classes have none.
    ValueError where class or arguments cannot be read."""
    load_class(name)  # here for their refusals only: Adapter reads both again
    parse_arguments(arguments)
    RULES[name] = Rule(
        options=lambda config, role, model: Group(),
        state=lambda p, group: {},
        step=None,  # Adapter has it
        defaults=dict(learning_rate=None, weight_decay=0.0),
    )
    return RULES[name]


def load_class(name: str) -> type[torch.optim.Optimizer]:
    """The class that `name`, MODULE:CLASS, names."""
    module_name, _, class_name = name.partition(":")
    cls = None
    problem = f"{module_name} has no subclass of torch.optim.Optimizer named {class_name}"
    try:
        cls = getattr(import_module(module_name), class_name, None)
    except ModuleNotFoundError as error:
        fix = "install its package, or put its file beside train.py"
        if module_name.endswith(".py"):
            fix = "leave .py out"
        problem = f"no module {error.name!r} in this environment: {fix}"
    except (Exception, SystemExit) as error:  # a file that is not ours can raise anything
        problem = f"importing {module_name} fails: {in_one_line(error)}"
    if "/" in module_name or "" in (module_name, class_name):
        problem = "it must be MODULE:CLASS, as in from MODULE import CLASS"
    if not (inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)):
        refuse(f"optimizer={name}: {problem}")
    return cls


def parse_arguments(text: str) -> dict[str, Any]:
    """{name: value} of Python keyword arguments with plain values, which are parsed, not run."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        names = {keyword.arg for keyword in call.keywords if keyword.arg}
        if call.args or len(names) < len(call.keywords):
            raise SyntaxError
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, AttributeError):
        allowed = "keyword arguments, each once, with plain values, as in betas=(0.9,0.95),eps=1e-8"
        refuse(f"optimizer_args={text} must be {allowed}")
    if arguments.keys() & {"lr", "weight_decay"}:
        refuse(f"optimizer_args={text}: use --learning_rate and --weight_decay for lr and decay")
    return arguments


class Adapter(Optimizer):
    """Our optimizer around one of another class. They share the groups and the state: the class
    works on the dicts that we save."""

    def __init__(
        self, groups: list[Group], name: str, arguments: str, learning_rate: float
    ) -> None:
        super().__init__(groups)
        self.name = name
        self.given = parse_arguments(arguments)
        # keys of the groups that a checkpoint must not overwrite
        self.configured_keys = set(self.given)
        for group in self.param_groups:
            self.configured_keys |= group.keys()
        self.is_checked = False  # whether its state is known to fit into a checkpoint
        groups = [group for group in self.param_groups if group["rule"] == self.name]
        if any(is_sharded(p) for group in groups for p in group["params"]):
            ours = ", ".join(OPTIMIZERS)
            fix = f"set --parallel=ddp, or choose one of {ours}"
            refuse(f"optimizer={self.name} cannot update the shards of FSDP: {fix}")
        for group in groups:
            group["lr"] = group["base_lr"] * group["lr_ratio"]  # some classes refuse 0
        self.inner = self.make_inner(groups, learning_rate)
        self.state.update(self.inner.state)  # which some classes make now, most in the first step
        self.inner.state = self.state
        self.drop_empty_states()
        if all(p.is_meta for p in self.named_parameters().values()):
            self.make_state_on_meta()

    def make_inner(self, groups: list[Group], learning_rate: float) -> torch.optim.Optimizer:
        """An instance of the class on these groups. ValueError where it refuses them, or cannot be
        driven from here."""
        cls = load_class(self.name)
        try:
            inner = cls(groups, lr=learning_rate, **self.given)
        except (Exception, SystemExit) as error:
            refuse(f"optimizer={self.name} refuses its settings: {in_one_line(error)}")
        inner_groups = getattr(inner, "param_groups", [])
        if list(map(id, inner_groups)) != list(map(id, groups)):
            fix = "learning rates would not reach groups of its own"
            refuse(f"optimizer={self.name} must hand its groups to super().__init__: {fix}")
        if "lr" not in inner.defaults:
            refuse(f"optimizer={self.name} has no lr in its groups: it would ignore the schedule")
        if "weight_decay" not in inner.defaults and any(g["weight_decay"] for g in groups):
            refuse(f"optimizer={self.name} has no weight_decay: leave --weight_decay out")
        closure = inspect.signature(inner.step).parameters.get("closure")
        if closure and closure.default is inspect.Parameter.empty:
            refuse(f"optimizer={self.name} needs a closure, which a training step does not have")
        return inner

    def drop_empty_states(self) -> None:
        """A parameter without state has no entry, as in the class alone: many classes make their
        state where it is missing."""
        for p in self.named_parameters().values():
            if not self.state[p]:
                del self.state[p]

    @torch.no_grad()
    def make_state_on_meta(self) -> None:
        """One step on tensors without contents, so that the bytes of the state can be counted."""
        params = [p for group in self.inner.param_groups for p in group["params"]]
        for p in params:
            p.grad = torch.zeros_like(p)
        try:
            self.inner.step()
        except (Exception, SystemExit) as error:  # it reads numbers, say
            text = f"the state of {self.name} is not counted ({in_one_line(error)})"
            print_note(f"{text}: leave room for it in --micro_batch_size")
        for p in params:
            p.grad = None

    def apply_rule(self, rule: str, work: list[Work], found_inf: Tensor | None) -> None:
        if rule != self.name:
            return super().apply_rule(rule, work, found_inf)
        if work[0].params[0].is_meta:
            return
        for part in work:
            divide_gradients(part.grads, self.grad_scale)
        # The class cannot skip a step on the device, so the host waits here for the gradients.
        if found_inf is not None and found_inf.item():
            return
        self.drop_empty_states()
        self.step_inner()
        if not self.is_checked:
            self.state_dict()
            self.is_checked = True

    def step_inner(self) -> None:
        """The step of the class. ValueError, in one line, for what it raises."""
        try:
            self.inner.step()
        except (torch.OutOfMemoryError, MemoryError):
            raise  # it has a line of its own
        except (Exception, SystemExit) as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(last.filename).name}, line {last.lineno}"
            text = f"optimizer={self.name} failed in its step ({place}): {in_one_line(error)}"
            raise ValueError(text) from error

    def state_dict(self) -> dict[str, Any]:
        """ValueError for a state that a checkpoint cannot hold."""
        saved = super().state_dict()
        problem = ""
        values = tree_leaves(saved, is_leaf=lambda value: type(value) not in (dict, list, tuple))
        for kind in {type(value) for value in values} - SAVABLE:
            problem = f"holds a {kind.__name__}"
        if not all(type(key) is int for key in saved["state"]):
            problem = "is not kept by parameter"
        if problem:
            refuse(f"optimizer={self.name} cannot be saved: its state {problem}")
        return saved

    def fits(self, saved: dict[str, AnyState], step: int) -> bool:
        """The class decides which parameters have which state, and when."""
        has_names = saved.keys() <= self.named_parameters().keys()
        return has_names and all(type(state) is dict for state in saved.values())

    def load(self, saved: dict[str, AnyState], groups: list[dict[str, Any]]) -> None:
        """Take over the state with its dtypes, and what the class keeps in its groups (a count of
        steps, say); LR, decay and --optimizer_args stay as configured."""
        group_of = {name: group for group in groups for name in group["param_names"]}
        for group in self.inner.param_groups:
            old = group_of[group["param_names"][0]]
            # torch's rule: a tensor named step is on the CPU, unless a kernel reads it
            step_on_device = bool(group.get("capturable") or group.get("fused"))
            kept = {key: old[key] for key in old.keys() - self.configured_keys}
            group |= copy_state(kept, group["params"][0].device, step_on_device)
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if name in saved:
                    self.state[p] = copy_state(saved[name], p.device, step_on_device)


def copy_state(state: AnyState, device: torch.device, step_on_device: bool) -> AnyState:
    """Copies on `device` of the tensors in a nested state, with their dtypes and strides."""

    def copy(value: Any, key: str) -> Any:
        if not torch.is_tensor(value):
            return value
        place = torch.device("cpu") if key == "step" and not step_on_device else device
        return torch.empty_like(value, device=place).copy_(value)

    return {key: tree_map(partial(copy, key=key), value) for key, value in state.items()}


@cache
def print_note(text: str) -> None:
    """Print a note once: a start may count the state several times."""
    print(f"note: {text}", file=sys.stderr)


def in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
