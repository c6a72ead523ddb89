"""Data as a function of the step: batches, validation rows.

`batch(step)` depends on (dataset, block_size, seed, batch_size, step) and on nothing else: not on
the number of processes, the micro batch, the evaluation settings, or whether the run was resumed. A
checkpoint saves one number: the rows read so far, from which a run that is resumed with another
batch_size goes on.

    python -m nanodnt.data pystdlib      # check its checksums and print its meta.json
"""

from nanodnt.data.meta import folder_of, load_meta, sha256
from nanodnt.data.prepared import Prefetch, PreparedData

__all__ = ["Prefetch", "PreparedData", "folder_of", "load_meta", "sha256"]
