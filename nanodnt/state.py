"""The progress of a run, as a checkpoint stores it beside tensors and configurations."""

import math
from dataclasses import MISSING, asdict, dataclass, field, fields

from nanodnt.checks import is_count, is_nested, is_number, is_row


def stored(check, may_lack=False, **default):
    """A field of a checkpoint. `check(value)` tells whether a value read from a file is valid. `may_lack`: checkpoints
    of earlier versions lack it, and the default is taken."""
    return field(metadata=dict(check=check, may_lack=may_lack), **default)


@dataclass
class RunState:
    step: int = stored(is_count, default=0)  # optimizer steps made
    tokens: int = stored(is_count, default=0)  # tokens trained on
    skipped: int = stored(is_count, default=0)  # steps whose gradient was not finite, which changed nothing
    # step of the last evaluation, -1 = none yet
    evaluated: int = stored(lambda v: is_count(v) or (type(v) is int and v == -1), default=-1)
    best_val_loss: float = stored(lambda v: type(v) in (int, float) and not math.isnan(v), default=math.inf)
    pending: dict = stored(  # the metrics row of an interrupted evaluation; row["track"] has dicts of dicts of lists
        lambda v: v == {} or (is_row(v) and is_nested(v, 4)), default_factory=dict
    )
    wandb_id: str | None = stored(lambda v: v is None or isinstance(v, str), default=None)
    recent: list = stored(  # logged losses that a spike is measured against
        lambda v: isinstance(v, list) and all(map(is_number, v)), may_lack=True, default_factory=list
    )
    shift: int = stored(is_count, may_lack=True, default=0)  # step s trains on batch s + shift
    rollbacks: int = stored(is_count, may_lack=True, default=0)  # roll-backs made

    @classmethod
    def checks(cls) -> dict:
        """{field: function that tells whether a value is valid}."""
        return {f.name: f.metadata["check"] for f in fields(cls)}

    @classmethod
    def optional(cls) -> dict:
        """{field that checkpoints of earlier versions lack: its default}."""
        optional = [f for f in fields(cls) if f.metadata["may_lack"]]
        return {f.name: f.default_factory() if f.default is MISSING else f.default for f in optional}

    @classmethod
    def of(cls, checkpoint: dict) -> "RunState":
        """The state that a checkpoint holds."""
        return cls(**{f.name: checkpoint[f.name] for f in fields(cls)})

    def as_dict(self) -> dict:
        return asdict(self)

    def open_row(self) -> dict:
        """A new row of metrics.jsonl for this step. It contains what an interrupted evaluation left pending."""
        row, self.pending = {"step": self.step, "tokens": self.tokens} | self.pending, {}
        return row

    def advance(self, tokens: int) -> None:
        """One more step, on so many tokens."""
        self.step, self.tokens = self.step + 1, self.tokens + tokens
