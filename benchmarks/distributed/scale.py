#!/usr/bin/env python3
"""What data parallel training and ZeRO-1 cost at 1 to 1,024 ranks, from a model of one step. Nothing here is measured
beyond 4 ranks.

usage: scale.py [--params 1.3e9] [--tokens 8192] [--bucket-mib 25]     # tables for GPU clusters
       scale.py --check RESULTS                      # what data_parallel_mpi_bench printed, beside what the model says
       scale.py --hosts HOSTS_BENCH                  # the same for 2 hosts of 2 ranks behind slow cables (root, iproute2)

A step is forward, backward, all-reduce of the gradients in buckets, and the update:

  ring all-reduce of S bytes over n ranks     2 (n - 1) latency + 2 (n - 1)/n S / bandwidth
  tree all-reduce (NCCL's for many ranks)     2 log2(n) latency + 2 S / bandwidth; the faster of the two is taken
  reduce-scatter or all-gather                (n - 1) latency + (n - 1)/n S / bandwidth

A bucket is sent when its gradients are there and the bucket before it has arrived. Backward gives its gradients at an even
rate. DataParallel sends all of them so; ZeRO-1 sends reduce-scatters so, updates 1/n of the weights, and then gathers the
weights, which nothing hides.
"""
import argparse
import dataclasses
import math
import pathlib
import re
import sys

RANKS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]


@dataclasses.dataclass
class Machine:
    """One rank's share of a machine. Bandwidths in bytes a second, both of one direction."""
    name: str
    source: str
    flops: float          # that training reaches
    memory_rate: float    # of the update
    memory: float         # bytes for weights, gradients and optimizer state
    a_node: int           # ranks of a node
    inside: float         # bandwidth between ranks of a node
    outside: float        # bandwidth of a ring's rank where it spans nodes
    latency_inside: float
    latency_outside: float

    def ring(self, ranks):
        """Latency of a hop, on average, and bandwidth."""
        if ranks <= self.a_node:
            return self.latency_inside, self.inside
        return ((self.a_node - 1) * self.latency_inside + self.latency_outside) / self.a_node, self.outside

    def tree_latency(self, ranks):
        within = min(ranks, self.a_node)
        return math.log2(within) * self.latency_inside + math.log2(ranks / within) * self.latency_outside


# Published: NVIDIA's data sheets of H100 SXM (989 TFLOP/s of dense bfloat16, 3.35 TB/s, 80 GB, NVLink 900 GB/s both ways
# together) and DGX H100 (8 GPUs, 8 adapters of 400 Gb/s). Assumed: 40 % of the peak in training, 80 % of links and memory,
# 60 GB of a GPU for what is not activations, 3 us a hop of NVLink and 10 us between nodes, kernel launches included.
H100 = Machine("8 x H100 SXM a node, 400 Gb/s a GPU", "data sheets, with the assumptions in scale.py", 0.4 * 989e12, 0.8 * 3.35e12,
               60e9, 8, 0.8 * 450e9, 0.8 * 8 * 50e9, 3e-6, 10e-6)
# The same with one adapter of 100 Gb/s a node, as in the cloud's cheaper offers.
SLOW = dataclasses.replace(H100, name="8 x H100 SXM a node, 100 Gb/s a node", outside=0.8 * 12.5e9, latency_outside=30e-6)


def all_reduce(bytes_, ranks, machine):
    if ranks == 1:
        return 0.0
    latency, bandwidth = machine.ring(ranks)
    ring = 2 * (ranks - 1) * latency + 2 * (ranks - 1) / ranks * bytes_ / bandwidth
    tree = 2 * machine.tree_latency(ranks) + 2 * bytes_ / bandwidth
    return min(ring, tree)


def half_of_all_reduce(bytes_, ranks, machine):
    if ranks == 1:
        return 0.0
    latency, bandwidth = machine.ring(ranks)
    return (ranks - 1) * latency + (ranks - 1) / ranks * bytes_ / bandwidth


def beyond_backward(gradient_bytes, bucket_bytes, backward, send):
    """Seconds by which the last bucket arrives after the end of backward."""
    end = 0.0
    sent = 0.0
    while sent < gradient_bytes:
        bucket = min(bucket_bytes, gradient_bytes - sent)
        sent += bucket
        end = max(end, backward * sent / gradient_bytes) + send(bucket)
    return end - backward


@dataclasses.dataclass
class Step:
    seconds: float
    compute: float
    exposed: float     # communication that nothing hides
    megabytes: float   # sent by a rank
    state: float       # bytes of weights, gradients, optimizer state

    def line(self, ranks):
        return (f"{ranks:>6}  {1e3 * self.seconds:>9.1f}  {1e3 * self.exposed:>9.1f}  {100 * self.compute / self.seconds:>9.0f} %"
                f"  {self.megabytes:>9.0f}  {self.state / 1e9:>8.1f}")


def step(params, tokens, bucket_bytes, ranks, machine, zero1):
    """bfloat16 weights with split masters: 2 bytes of weight, 2 of gradient, 10 of optimizer state."""
    compute = 6 * params * tokens / machine.flops
    backward = 2 / 3 * compute
    gradients = 2 * params
    share = 1 / ranks if zero1 else 1
    update = share * 28 * params / machine.memory_rate  # reads 14, writes 14 bytes a parameter
    state = params * (4 + 10 * share)
    if zero1:
        late = beyond_backward(gradients, bucket_bytes, backward, lambda b: half_of_all_reduce(b, ranks, machine))
        gather = half_of_all_reduce(2 * params, ranks, machine)
        exposed = max(0.0, late) + gather
    else:
        exposed = max(0.0, beyond_backward(gradients, bucket_bytes, backward, lambda b: all_reduce(b, ranks, machine)))
    sent = 2 * (ranks - 1) / ranks * gradients / 1e6
    return Step(compute + update + exposed, compute + update, exposed, sent, state)


def largest(machine, ranks, zero1):
    """Parameters whose state fits."""
    return machine.memory / (4 + 10 * (1 / ranks if zero1 else 1))


def tables(params, tokens, bucket_bytes):
    print(f"{params / 1e9:.2g} billion parameters in bfloat16 with split masters, {tokens} tokens a rank and step, buckets "
          f"of {bucket_bytes / 2**20:.0f} MiB. DERIVED, not measured.")
    for machine in (H100, SLOW):
        print(f"\n{machine.name} ({machine.source})")
        for name, zero1 in (("DataParallel", False), ("ZeRO-1", True)):
            print(f"\n{name}\n ranks    step ms  exposed ms  efficiency    MB sent  state GB")
            for ranks in RANKS:
                print(step(params, tokens, bucket_bytes, ranks, machine, zero1).line(ranks))
    print("\nlargest model whose weights, gradients and state fit in 60 GB, in billions of parameters")
    for ranks in (1, 8, 64, 1024):
        print(f"{ranks:>6} ranks   DataParallel {largest(H100, ranks, False) / 1e9:5.1f}   ZeRO-1 {largest(H100, ranks, True) / 1e9:5.1f}")
    print("Beyond ZeRO-1's column weights or gradients have to be split too: FSDP, which mezzo has not.")
    print("\nthe watchdog: seconds a round that rank 0 serves signs of life, at the 3 microseconds a sign that were measured")
    for ranks in (64, 256, 512, 1024):
        busy = 3e-6 * ranks**2
        print(f"{ranks:>6} ranks   {busy:6.2f} s; WatchdogOptions::interval at least {max(1, math.ceil(4 * busy))} s")


ROW = re.compile(r"^(no communication|one all-reduce a parameter|c10d::Reducer, mezzo::MpiBackend|mezzo, (?:averages|sums))[^0-9]*"
                 r"([0-9.]+)\s+([0-9.]+)\s+[0-9.]+(?:\s+([0-9]+)\s+([0-9.]+))?", re.M)


def check(path):
    """The time of a collective is taken from the loop with one all-reduce a parameter; the others are predicted by it.
    Ranks share cores and memory, so that nothing is hidden: what is sent is added to what is computed."""
    text = open(path).read()
    print("ranks  row                                   measured ms   predicted ms   off by")
    for block in re.split(r"(?m)^(?=\d+ ranks)", text):
        head = re.match(r"(\d+) ranks", block)
        rows = {m[1]: m for m in ROW.finditer(block)} if head else {}
        if not rows:
            continue
        ranks = int(head[1])
        alone = float(rows["no communication"][3])
        each = rows["one all-reduce a parameter"]
        rate = float(each[5]) / max(1e-9, float(each[3]) - alone) if each[5] else math.inf  # MB a ms
        for name, row in rows.items():
            if name in ("no communication", "one all-reduce a parameter"):
                continue
            sent = float(row[5]) if row[5] else float(each[5] or 0)
            predicted = alone + sent / rate
            measured = float(row[3])
            print(f"{ranks:>5}  {name:<36}  {measured:>11.1f}  {predicted:>13.1f}  {100 * (predicted / measured - 1):>+6.0f} %")


def hosts(bench):
    """Gloo's all-reduce is a ring. Its reduce-scatter is that all-reduce, of which each rank keeps its part, so that ZeRO-1
    sends half as much again as DataParallel. Of 1,514 bytes on the cable 1,448 are payload."""
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests/distributed/hosts"))
    from hosts import Hosts
    print("Mb/s  way           alone ms  measured ms  predicted ms   off by")
    for megabits in (50, 100, 200):
        with Hosts(2, megabits) as two:
            ranks = two.start([bench], ranks_a_host=2)
            line = ranks[0].wait_for("measured", 600)
        gradients, alone, *measured = map(float, line.split()[1:])
        cable = dataclasses.replace(H100, a_node=2, outside=1448 / 1514 * megabits * 1e6 / 8)
        whole, half = (send(gradients, 4, cable) * 1e3 for send in (all_reduce, half_of_all_reduce))
        for name, ms, sent in zip(("DataParallel", "ZeRO-1"), measured, (whole, whole + half)):
            print(f"{megabits:>4}  {name:<12}  {alone:>8.1f}  {ms:>11.1f}  {alone + sent:>12.1f}  {100 * ((alone + sent) / ms - 1):>+6.0f} %")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=1.3e9)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--bucket-mib", type=float, default=25, help="DataParallel's default is 25")
    parser.add_argument("--check", metavar="RESULTS")
    parser.add_argument("--hosts", metavar="HOSTS_BENCH")
    options = parser.parse_args()
    if options.check:
        check(options.check)
    elif options.hosts:
        hosts(options.hosts)
    else:
        tables(options.params, options.tokens, options.bucket_mib * 2**20)


if __name__ == "__main__":
    sys.exit(main())
