"""Records random sequences of calls of torch.amp.GradScaler for torch_parity_test.cpp.

    python record_torch_sequences.py > torch_sequences.txt      (torch 2.11)

The recording is text with one call per line, after a table of error messages:

    error NUMBER TEXT
    sequence INIT GROWTH BACKOFF INTERVAL ENABLED
    CALL ARGUMENTS... [> RESULT...] | SCALE TRACKER

Each line ends with the scale (the bits of a float) and the growth tracker after the call. RESULT is
`!NUMBER` for an error. Floating-point values are hexadecimal bits: 8 digits for float32, 16 for float64.

There are four SGD optimizers with lr 0.25 over these parameters, which start at zero:
    0: float32[2]   1: float32[3], bfloat16[2]   2: float64[1], float32[3, 1] with sparse gradients   3: float16[1]
No product of a gradient and 1 / scale overflows: torch checks gradients before the multiplication, mezzo
after it.

The recording contains every pair of consecutive calls and outcomes of the first 1,000 random sequences. It
consists of prefixes of 40,000 sequences, chosen greedily by new pairs per line; half of the sequences call
any method in any order.
"""

import heapq
import math
import pickle
import random
import struct
import sys

import torch

SEQUENCES = 40000
WANTED = 1000
SEED = 20260
LR = 0.25


def float_bits(value):
    return struct.pack(">f", value).hex()


def double_bits(value):
    return struct.pack(">d", value).hex()


def tensor_bits(tensor):
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    bits = double_bits if tensor.dtype == torch.float64 else float_bits
    return [bits(value) for value in tensor.reshape(-1).tolist()]


class Sequence:
    def __init__(self, rng, errors):
        self.rng = rng
        self.errors = errors
        self.lines = []
        self.saved = {}
        self.options = dict(
            init_scale=rng.choice([1.0, 4.0, 65536.0, 1e-3, 3.3, 2.0**24, 1e30, 1e38]),
            growth_factor=rng.choice([2.0, 1.5, 4.0, 1.1, 16.0]),
            backoff_factor=rng.choice([0.5, 0.25, 0.9, 0.3]),
            growth_interval=rng.choice([1, 2, 3, 5]),
            enabled=rng.random() > 0.06,
        )
        shapes = [
            [((2,), torch.float32)],
            [((3,), torch.float32), ((2,), torch.bfloat16)],
            [((1,), torch.float64), ((3, 1), torch.float32)],
            [((1,), torch.float16)],
        ]
        self.parameters = [
            [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape, dtype in group]
            for group in shapes
        ]
        self.optimizers = [torch.optim.SGD(group, lr=LR) for group in self.parameters]
        self.scaler = self.new_scaler()
        o = self.options
        self.lines.append(
            "sequence %s %s %s %d %d"
            % (
                double_bits(o["init_scale"]),
                double_bits(o["growth_factor"]),
                double_bits(o["backoff_factor"]),
                o["growth_interval"],
                o["enabled"],
            )
        )

    def new_scaler(self):
        return torch.amp.GradScaler(device="cpu", **self.options)

    def call(self, name, arguments, function):
        """Calls `function` and records it; it returns the fields of the result, or None."""
        try:
            result = function()
        except (RuntimeError, AssertionError, ValueError) as error:
            number = self.errors.setdefault(str(error), len(self.errors))
            result = ["!%d" % number]
        line = " ".join([name] + arguments + ([">"] + result if result else []))
        state = "%s %d" % (float_bits(self.scaler.get_scale()), self.scaler._get_growth_tracker())
        self.lines.append(line + " | " + state)

    def gradient_value(self):
        dice = self.rng.random()
        if dice < 0.04:
            return float("inf") * self.rng.choice([-1, 1])
        if dice < 0.055:
            return float("nan")
        return self.rng.choice([-1, 1]) * 10 ** self.rng.uniform(-3, 6)

    def set_gradients(self, index):
        words = []
        for position, parameter in enumerate(self.parameters[index]):
            if self.rng.random() < 0.1:
                parameter.grad = None
                words.append("none")
                continue
            values = torch.tensor(
                [self.gradient_value() for _ in range(parameter.numel())], dtype=parameter.dtype
            ).reshape(parameter.shape)
            words += tensor_bits(values)
            if (index, position) == (2, 1):
                indices = torch.arange(parameter.shape[0]).unsqueeze(0)
                values = torch.sparse_coo_tensor(indices, values, parameter.shape)
            parameter.grad = values
        self.call("gradients", [str(index)] + words, lambda: None)

    def gradients(self, index):
        return [
            word
            for parameter in self.parameters[index]
            for word in (["none"] if parameter.grad is None else tensor_bits(parameter.grad))
        ]

    def unscale(self, index):
        def function():
            self.scaler.unscale_(self.optimizers[index])
            return self.gradients(index)

        self.call("unscale", [str(index)], function)

    def step(self, index):
        def function():
            calls = []
            optimizer = self.optimizers[index]
            hook = optimizer.register_step_post_hook(lambda *_: calls.append(1))
            try:
                self.scaler.step(optimizer)
            finally:
                hook.remove()
            values = [word for p in self.parameters[index] for word in tensor_bits(p.detach())]
            return [str(len(calls))] + values

        self.call("step", [str(index)], function)

    def step_with_closure(self, index):
        self.call(
            "closure",
            [str(index)],
            lambda: self.scaler.step(self.optimizers[index], closure=lambda: None) and None,
        )

    def scale(self):
        value = self.rng.uniform(-10, 10)
        outputs = torch.tensor(value)
        self.call(
            "scale", [float_bits(outputs.item())], lambda: tensor_bits(self.scaler.scale(outputs))
        )

    def new_scale(self):
        return 10 ** self.rng.uniform(-10, 30)

    def update(self):
        kind = self.rng.random()
        if kind < 0.88:
            self.call("update", [], lambda: self.scaler.update())
        elif kind < 0.93:
            value = self.new_scale()
            self.call("update_to", [double_bits(value)], lambda: self.scaler.update(value))
        elif kind < 0.97:
            value = torch.tensor(self.new_scale())  # torch's copy_ throws for the shape [1]
            self.call("update_to_tensor", tensor_bits(value), lambda: self.scaler.update(value))
        elif kind < 0.985:
            self.call("update_to_two", [], lambda: self.scaler.update(torch.ones(2)))
        else:
            value = torch.ones(1, requires_grad=True)
            self.call("update_to_variable", [], lambda: self.scaler.update(value))

    def setter(self):
        if not self.options["enabled"]:
            return
        kind = self.rng.randrange(3)
        if kind == 0:
            value = self.rng.choice([2.0, 3.0, 1.25])
            self.call(
                "growth_factor", [double_bits(value)], lambda: self.scaler.set_growth_factor(value)
            )
        elif kind == 1:
            value = self.rng.choice([0.5, 0.125, 0.75])
            self.call(
                "backoff_factor", [double_bits(value)], lambda: self.scaler.set_backoff_factor(value)
            )
        else:
            value = self.rng.choice([1, 2, 4])
            self.call(
                "growth_interval", [str(value)], lambda: self.scaler.set_growth_interval(value)
            )

    def save(self):
        def function():
            self.saved[0] = self.scaler.state_dict()
            state = self.saved[0]
            if not state:
                return ["empty"]
            return [
                double_bits(state["growth_factor"]),
                double_bits(state["backoff_factor"]),
                str(state["growth_interval"]),
            ]

        self.call("save", [], function)

    def load(self):
        if self.rng.random() < 0.1:
            self.call("load_empty", [], lambda: self.scaler.load_state_dict({}))
        elif 0 in self.saved:
            self.call("load", [], lambda: self.scaler.load_state_dict(self.saved[0]))

    def renew(self):
        def function():
            self.scaler = self.new_scaler()

        self.call("renew", [], function)

    def archive(self):
        def function():
            self.scaler = pickle.loads(pickle.dumps(self.scaler))

        self.call("archive", [], function)

    def iteration(self):
        """Mostly the usual order of calls, sometimes any call."""
        if self.rng.random() < 0.95:
            self.scale()
        index = self.rng.choice([0, 0, 1, 2])
        used = {index}
        if self.rng.random() < 0.25:
            used.add(self.rng.choice([0, 1, 2, 2, 3]))
        for optimizer in sorted(used):
            if self.rng.random() < 0.97:
                self.set_gradients(optimizer)
            if self.rng.random() < 0.3:
                self.unscale(optimizer)
            if self.rng.random() < 0.93:
                self.step(optimizer)
            if self.rng.random() < 0.04:
                self.step_with_closure(optimizer)
        if self.rng.random() < 0.15:
            self.rng.choice([self.unscale, self.step])(self.rng.choice([0, 1, 2, 3]))
        if self.rng.random() < 0.12:
            self.rng.choice([self.setter, self.save, self.load, self.archive, self.renew])()
        if self.rng.random() < 0.95:
            self.update()
        if self.rng.random() < 0.25:
            self.rng.choice([self.setter, self.save, self.load, self.load, self.archive])()

    def anything(self):
        """A random call."""
        index = self.rng.choice([0, 0, 1, 2, 2, 3])
        calls = [self.scale, self.update, self.setter, self.save, self.load, self.archive, self.renew]
        for call in (self.set_gradients, self.set_gradients, self.unscale, self.step, self.step_with_closure):
            calls.append(lambda call=call: call(index))
        self.rng.choice(calls)()


def float_words(line):
    """Returns call, arguments, results and scale of a line."""
    body, state = line.split(" | ")
    call, _, result = body.partition(" > ")
    return call.split(), result.split(), struct.unpack(">f", bytes.fromhex(state.split()[0]))[0]


def is_broken(words):
    numbers = [bytes.fromhex(word) for word in words if word != "none"]
    values = [struct.unpack(">d" if len(number) == 8 else ">f", number)[0] for number in numbers]
    return not all(map(math.isfinite, values))


def name_value_pairs(lines):
    """Returns for each line the call and outcome of the previous line and of this line."""
    pairs, last, before = [], ("sequence", lines[0].split()[5]), None
    for line in lines[1:]:
        (name, *arguments), result, scale = float_words(line)
        outcome = ""
        if result and result[0].startswith("!"):
            outcome = result[0]
        elif name == "step":
            outcome = result[0]
        elif name == "gradients":
            outcome = "broken" if is_broken(arguments[1:]) else "finite"
        elif name == "update" and before is not None:
            outcome = "up" if scale > before else "down" if scale < before else "same"
        pairs.append((last, (name, outcome)))
        last, before = pairs[-1][1], scale
    return pairs


def best_beginning(pairs, missing):
    """Returns the maximum of missing pairs per line over all prefixes, and the pairs of that prefix."""
    found, best = set(), (0, [])
    for number, pair in enumerate(pairs, start=1):
        found |= {pair} & missing
        best = max(best, (len(found) / (number + 1), pairs[:number]), key=lambda one: one[0])
    return best


def cover(sequences):
    """Chooses prefixes that contain all wanted pairs, greedily by new pairs per line."""
    pairs = [name_value_pairs(lines) for lines in sequences]
    missing = set().union(*pairs[:WANTED])
    lengths = {}
    heap = [(-1.0, i) for i in range(len(sequences))]
    while missing:
        worth, i = heapq.heappop(heap)
        share, beginning = best_beginning(pairs[i], missing)
        if -share > worth:  # other prefixes contain its pairs by now
            heapq.heappush(heap, (-share, i))
            continue
        missing -= set(beginning)
        lengths[i] = max(lengths.get(i, 0), len(beginning))
        heapq.heappush(heap, (-1.0, i))
    return [sequences[i][: length + 1] for i, length in lengths.items()]


def main():
    torch.set_num_threads(1)
    rng = random.Random(SEED)
    errors = {}
    sequences = []
    for number in range(SEQUENCES):
        sequence = Sequence(rng, errors)
        if number < WANTED or number % 2:
            for _ in range(rng.randint(1, 6)):
                sequence.iteration()
        else:
            sequence.scale()
            for _ in range(rng.randint(2, 12)):
                sequence.anything()
        sequences.append(sequence.lines)
    sys.stdout.write("# Made by record_torch_sequences.py with torch %s\n" % torch.__version__)
    for text, number in errors.items():
        sys.stdout.write("error %d %s\n" % (number, text))
    for lines in cover(sequences):
        sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
