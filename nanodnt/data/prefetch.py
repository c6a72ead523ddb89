"""The next batch is read while the device works on this one."""

from concurrent.futures import ThreadPoolExecutor


class Prefetch:
    """Call it with a step for the result of fetch(step); a thread then already works on that of the next step.

    An exception in fetch is raised by the call for its step."""

    def __init__(self, fetch):
        self.fetch, self.pool, self.next = fetch, ThreadPoolExecutor(1), {}

    def __call__(self, step: int):
        future = self.next.pop(step, None) or self.pool.submit(self.fetch, step)
        try:
            return future.result()
        finally:
            self.next = {step + 1: self.pool.submit(self.fetch, step + 1)}
