"""The progress of a run, as a checkpoint stores it beside tensors and configurations."""

import math
from dataclasses import asdict, dataclass, field, fields


@dataclass
class RunState:
    step: int = 0  # optimizer steps made
    tokens: int = 0  # tokens trained on
    skipped: int = 0  # steps whose gradient was not finite, which changed nothing
    evaluated: int = -1  # step of the last evaluation, -1 = none yet
    best_val_loss: float = math.inf
    pending: dict = field(default_factory=dict)  # the metrics row of an interrupted evaluation
    wandb_id: str | None = None
    recent: list = field(default_factory=list)  # logged losses that a spike is measured against
    shift: int = 0  # step s trains on batch s + shift
    rollbacks: int = 0  # roll-backs made

    @classmethod
    def of(cls, checkpoint: dict) -> "RunState":
        """The state that a checkpoint holds. ValueError for numbers that no run has."""
        state = cls(**{f.name: checkpoint[f.name] for f in fields(cls)})
        names = ("step", "tokens", "skipped", "shift", "rollbacks")
        if wrong := [f"{name}={checkpoint[name]}" for name in names if not is_count(checkpoint[name])]:
            raise ValueError(f"{', '.join(wrong)} cannot be")
        if not -1 <= state.evaluated <= state.step:
            raise ValueError(f"evaluated={state.evaluated} cannot be at step={state.step}")
        if state.pending and not (is_row(state.pending) and state.pending["step"] == state.step):
            raise ValueError(f"pending is not the metrics row of step={state.step}")
        return state

    def as_dict(self) -> dict:
        return asdict(self)

    def open_row(self) -> dict:
        """A new row of metrics.jsonl for this step. It contains what an interrupted evaluation left pending."""
        row, self.pending = {"step": self.step, "tokens": self.tokens} | self.pending, {}
        return row

    def advance(self, tokens: int) -> None:
        """One more step, on so many tokens."""
        self.step, self.tokens = self.step + 1, self.tokens + tokens


def is_row(value) -> bool:
    """Whether it is a row of metrics.jsonl: only the fields that this project reads back are checked."""
    if not isinstance(value, dict):
        return False
    counts = value.get("step"), value.get("tokens"), value.get("rollbacks", 0)
    losses = [value[name] for name in ("train_loss", "val_loss") if value.get(name) is not None]
    return all(map(is_count, counts)) and all(map(is_number, losses))


def is_count(value) -> bool:
    """Whether it is a number of steps or tokens that a run can have."""
    return type(value) is int and 0 <= value < 2**48


def is_number(value) -> bool:
    """Whether it is a finite int or float."""
    return type(value) in (int, float) and abs(value) < math.inf
