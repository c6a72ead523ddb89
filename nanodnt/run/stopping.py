"""Stopping a run so that it can be resumed."""

import os
import signal


class Stop:
    """SIGINT and SIGTERM ask the run to save and exit. So does the death of torchrun, which its processes survive.
    Without torchrun a second Ctrl-C ends the run at once.

    (With torchrun it does not: torchrun passes the terminal's Ctrl-C on, so every process gets it twice.)
    """

    def __init__(self, env):
        self.env, self.signal, self.stopped = env, 0, False
        self.agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None  # torchrun's process

    def __enter__(self):
        self.previous = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_):
        for signum, handler in self.previous.items():
            signal.signal(signum, handler)

    def _handle(self, signum, frame):
        if self.signal and signum == signal.SIGINT and not self.env.distributed:
            raise KeyboardInterrupt
        self.signal = signum  # nothing else: a handler may run in the middle of a print

    def agreed(self) -> bool:
        """Whether any rank was asked to stop. All ranks must call it at the same point."""
        if self.agent not in (None, os.getppid()):
            self.signal = self.signal or signal.SIGTERM
        if not self.stopped and self.env.any_rank(bool(self.signal)):
            self.stopped = True
            self.env.print(f"{signal.Signals(self.signal or signal.SIGTERM).name}: saving, then exiting")
        return self.stopped

    def exit_code(self) -> int:
        """0, or 128 + the signal's number as shells report it."""
        return 128 + (self.signal or signal.SIGTERM) if self.stopped else 0
