"""python docs/scripts/simulate_scaling.py: step time on 8 to 1,024 H100s, by a model of messages, not measured.

A message of S bytes over N processes takes α · hops + (N − 1)/N · S/β, an all-reduce twice that. One stream of messages
in the order of the run, one of computation; a block waits for its weights, the end of a step for all messages."""

import math
from dataclasses import dataclass

PEAK, MFU, RATE = 989e12, 0.43, 2.5e12  # FLOP/s; of computation alone (docs/results/speed.md); bytes/s of memory
LINK, HOP, NET_HOP = 360e9, 3e-6, 12e-6  # bytes/s within a machine; seconds a hop, between GPUs and machines
NETWORKS = {"8 × 400 Gb/s": 360e9, "1 × 400 Gb/s": 45e9}  # of a machine: what all its GPUs together reach


@dataclass
class Model:
    name: str
    blocks: int
    matrices: float  # entries of a block
    rest: float  # of embedding and gains
    head: float  # of a head of its own
    context: int
    width: int
    batch: int  # sequences of a step
    micro: int  # at most
    parallel: str

    @property
    def block_flops(self):  # of a sequence, forward
        return 2 * self.context * self.matrices + 4 * self.context**2 * self.width

    @property
    def head_flops(self):
        return 2 * self.context * (self.head or self.rest)


def entries(blocks, width, ffn, vocab, kv=1.0, n_ff=2, tied=True):
    return blocks, (2 + 2 * kv) * width**2 + n_ff * width * ffn, vocab * width, 0 if tied else vocab * width


MODELS = [
    Model("124M", *entries(12, 768, 3072, 50304), 1024, 768, 512, 32, "ddp"),
    Model("1.4B", *entries(48, 1536, 6144, 50304), 1024, 1536, 512, 8, "ddp"),
    Model("1.4B", *entries(48, 1536, 6144, 50304), 1024, 1536, 512, 16, "fsdp"),
    Model("1.4B", *entries(48, 1536, 6144, 50304), 1024, 1536, 512, 16, "hsdp"),
    Model("7B", *entries(32, 4096, 11008, 32000, 1, 3, False), 4096, 4096, 1024, 4, "fsdp"),
    Model("7B", *entries(32, 4096, 11008, 32000, 1, 3, False), 4096, 4096, 1024, 4, "hsdp"),
    Model("70B", *entries(80, 8192, 28672, 32000, 1 / 8, 3, False), 4096, 8192, 1024, 4, "fsdp"),
]


def bandwidth(n, network, per_machine=8):
    """(bytes/s, seconds of hops) of a ring over n GPUs, `per_machine` of them in each machine."""
    if n <= per_machine:
        return LINK, (n - 1) * HOP
    machines = n // per_machine
    return min(LINK, NETWORKS[network] * per_machine / 8), machines * NET_HOP + (n - machines) * HOP


class Clock:
    """Two streams: messages and computation."""

    def __init__(self):
        self.compute = self.message = 0.0

    def send(self, seconds, after=0.0):
        self.message = max(self.message, after) + seconds
        return self.message

    def run(self, seconds, ready=0.0):
        self.compute = max(self.compute, ready) + seconds
        return self.compute


def step(m, n, network):
    """(seconds, seconds of them without computation, what is waited for most), or None if n GPUs have no sequence."""
    sequences = m.batch / n
    state = 16 * (m.blocks * m.matrices + m.rest + m.head) / {"ddp": 1, "fsdp": n, "hsdp": min(n, 8)}[m.parallel]
    if sequences < 1 or state > 60e9:
        return None
    micro = min(m.micro, sequences)
    micros = round(sequences / micro)
    speed, waits = PEAK * MFU, {}
    forward, head = micro * m.block_flops / speed, micro * m.head_flops / speed
    total = m.blocks * m.matrices + m.rest + m.head
    shards = {"ddp": 1, "fsdp": n, "hsdp": min(n, 8)}[m.parallel]
    kept = m.parallel != "ddp" and 6 * total + 16 * total / shards < 40e9
    recompute = 1 if m.name == "70B" else 0
    copies = n // shards if m.parallel == "hsdp" else 1
    clock, ideal = Clock(), 0.0

    def message(size, group, rings=1):
        rate, hops = bandwidth(group, network, 8 if group == shards or m.parallel == "ddp" else 1)
        if rings == 2 and group > 8:  # a tree over the machines
            hops = math.log2(group / 8) * NET_HOP + 7 * HOP
        return rings * (hops + (group - 1) / group * size / rate) if group > 1 else 0.0

    def wait(what, ready):
        gap = ready - clock.compute
        if gap > 0:
            waits[what] = waits.get(what, 0) + gap

    def reduce(size):
        if m.parallel == "ddp":
            clock.send(message(size, n, 2), clock.compute)
        else:
            clock.send(message(size, shards) + message(size / shards, copies, 2), clock.compute)

    for i in range(micros):
        sharded, first, last = m.parallel != "ddp", i == 0, i == micros - 1
        gathers = sharded and (first or not kept)
        root = clock.send(message(4 * m.rest, shards)) if sharded and first else 0.0
        wait("embedding", root)
        clock.run(0, root)
        for _ in range(m.blocks):
            ready = clock.send(message(2 * m.matrices, shards), clock.compute - forward) if gathers else 0.0
            wait("weights of blocks", ready)
            clock.run(forward, ready)
        ready = clock.send(message(2 * m.head, shards)) if gathers and first and m.head else 0.0
        wait("head", ready)
        clock.run(3 * head, ready)
        if last and m.head:
            reduce(4 * m.head)
        again = message(2 * m.matrices, shards) if sharded and not kept else 0.0
        ready = clock.send(again, clock.compute - head) if again else 0.0
        for _ in range(m.blocks):
            wait("weights of blocks", ready)
            begin = max(clock.compute, ready)
            clock.run((2 + recompute) * forward, ready)
            ready = clock.send(again, begin) if again else 0.0  # of the next block, before the gradients of this one
            if last or (sharded and not kept):
                reduce(4 * m.matrices)
        ideal += (3 + recompute) * m.blocks * forward + 3 * head
    before = clock.message
    reduce(4 * m.rest)
    wait("gradients of blocks", before)
    clock.run(0, before)
    wait("gradient of the embedding", clock.message)
    clock.run(0, clock.message)
    update = 28 * total / shards / RATE
    clock.run(update)
    waits["optimizer"] = update
    most = max(waits, key=waits.get)
    return clock.compute, clock.compute - ideal - update, ideal, f"{most}, {100 * waits[most] / clock.compute:.0f}%"


if __name__ == "__main__":
    for network in NETWORKS:
        print(f"\nnetwork of a machine: {network}\n")
        print("| | 8 GPUs | 32 | 128 | 512 | 1,024 | waits most for |\n|---|---|---|---|---|---|---|")
        for m in MODELS:
            cells = []
            for n in (8, 32, 128, 512, 1024):
                found = step(m, n, network)
                if found is None:
                    cells.append("–")
                    continue
                seconds, exposed, ideal, most = found
                cells.append(f"{1000 * seconds:,.0f}, {1000 * exposed:,.0f}, {100 * ideal / seconds:.0f}%")
            print(f"| {m.name}, {m.parallel.upper()} | {' | '.join(cells)} | {most} |")
