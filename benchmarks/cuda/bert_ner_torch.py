#!/usr/bin/env python3
"""The BERT NER example in Python's torch.amp, from the same initial weights, on the same batches, with equal lr, schedule and clipping.

    bert_ner_torch.py MODEL CONLL [--precision fp32|tf32|fp16|bf16] [--device cuda|cpu] [--batch-size N] [--max-steps N]

The defaults are those of the example. Prints a line of JSON. Needs a Python with torch only.
"""
import argparse
import json
import math
import pathlib
import re
import struct
import time
import unicodedata

import torch
import torch.nn.functional as F
from torch import nn

CLASS, SEPARATOR, UNKNOWN, IGNORED = 101, 102, 100, -100


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("conll", type=pathlib.Path)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "tf32", "fp16", "bf16"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--warmup", type=float, default=0.0)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


# --- Random numbers of the example; the C++ standard defines them ---------------------------------------------------------------------


def seed_sequence(seeds, count):
    """std::seed_seq(seeds).generate, for at least 623 numbers of 32 bits."""
    mask, lag, size = 0xFFFFFFFF, 11, len(seeds)
    middle = (count - lag) // 2
    words = [0x8B8B8B8B] * count
    mix = lambda x: x ^ (x >> 27)
    for k in range(max(size + 1, count)):
        i, p, q = k % count, (k + middle) % count, (k + middle + lag) % count
        r1 = 1664525 * mix(words[i] ^ words[p] ^ words[k - 1 if k else count - 1]) & mask
        r2 = r1 + (size if k == 0 else k + seeds[k - 1] if k <= size else k) & mask
        words[p], words[q], words[i] = words[p] + r1 & mask, words[q] + r2 & mask, r2
    for k in range(max(size + 1, count), max(size + 1, count) + count):
        i, p, q = k % count, (k + middle) % count, (k + middle + lag) % count
        r3 = 1566083941 * mix(words[i] + words[p] + words[(k - 1) % count] & mask) & mask
        r4 = r3 - i & mask
        words[p], words[q], words[i] = words[p] ^ r3, words[q] ^ r4, r4
    return words


class Mt19937_64:
    """std::mt19937_64, from a number or from a seed sequence of 32-bit numbers."""

    def __init__(self, seed):
        mask = 2**64 - 1
        if isinstance(seed, int):
            self.state = [seed]
            for i in range(1, 312):
                self.state.append(6364136223846793005 * (self.state[-1] ^ self.state[-1] >> 62) + i & mask)
        else:
            words = seed_sequence(seed, 624)
            self.state = [words[2 * i] | words[2 * i + 1] << 32 for i in range(312)]
        self.next = 312

    def __call__(self):
        if self.next == 312:
            self.next = 0
            for i in range(312):
                x = self.state[i] & 0xFFFFFFFF80000000 | self.state[(i + 1) % 312] & 0x7FFFFFFF
                self.state[i] = self.state[(i + 156) % 312] ^ x >> 1 ^ (x & 1) * 0xB5026F5AA96619E9
        x = self.state[self.next]
        self.next += 1
        x ^= x >> 29 & 0x5555555555555555
        x ^= x << 17 & 0x71D67FFFEDA60000
        x ^= x << 37 & 0xFFF7EEE000000000
        return x ^ x >> 43


def shuffled_indices(count, generator):
    """shuffled_indices of examples/bert_ner/dataset.h."""
    indices = list(range(count))
    for last in range(count, 1, -1):
        number = generator()
        while number >= 2**64 // last * last:
            number = generator()
        indices[last - 1], indices[number % last] = indices[number % last], indices[last - 1]
    return indices


def shuffle_batches(count, seed, epoch):
    """shuffle_batches of examples/bert_ner/batches.h: the longest batch, which is the last, comes first."""
    order = shuffled_indices(count, Mt19937_64([seed, 0, epoch]))
    longest = order.index(count - 1)
    order[0], order[longest] = order[longest], order[0]
    return order


# --- Data ---------------------------------------------------------------------------------------------------------------


def read_conll(path):
    sentences, words, tags = [], [], []
    for line in [*path.read_text(encoding="utf-8").splitlines(), ""]:
        columns = line.split()
        if columns:
            words.append(columns[0])
            tags.append(columns[-1])
        elif words:
            sentences.append((words, tags))
            words, tags = [], []
    return sentences


class WordPieceTokenizer:
    """BERT's uncased tokenizer, for words that are split already."""

    def __init__(self, vocabulary):
        self.ids = {word: i for i, word in enumerate(vocabulary.read_text(encoding="utf-8").splitlines())}

    def split(self, word):
        """Lower case without accents, punctuation by itself."""
        bare = "".join(c for c in unicodedata.normalize("NFD", word.lower()) if unicodedata.category(c) != "Mn")
        is_mark = lambda c: unicodedata.category(c).startswith("P") or c in "$+<=>^`|~"
        return re.split("\x00", "".join(f"\x00{c}\x00" if is_mark(c) else c for c in bare))

    def encode(self, word):
        pieces = []
        for part in filter(None, self.split(word)):
            begin, own = 0, []
            while begin < len(part):
                for end in range(len(part), begin, -1):
                    piece = ("##" if begin else "") + part[begin:end]
                    if piece in self.ids:
                        own.append(self.ids[piece])
                        break
                else:
                    own, end = [UNKNOWN], len(part)
                begin = end
            pieces += own
        return pieces or [UNKNOWN]


def encode(sentence, tokenizer, number):
    ids, tags = [CLASS], [IGNORED]
    for word, tag in zip(*sentence):
        pieces = tokenizer.encode(word)
        ids += pieces
        tags += [number[tag]] + [IGNORED] * (len(pieces) - 1)
    return ids[:511] + [SEPARATOR], tags[:511] + [IGNORED]


def batches_of(examples, size):
    examples = sorted(examples, key=lambda example: len(example[0]))
    return [examples[i: i + size] for i in range(0, len(examples), size)]


def collate(batch, device):
    length = (max(len(ids) for ids, _ in batch) + 7) // 8 * 8
    ids = torch.zeros(len(batch), length, dtype=torch.long)
    tags = torch.full((len(batch), length), IGNORED)
    mask = torch.zeros(len(batch), length, dtype=torch.bool)
    for i, (own, own_tags) in enumerate(batch):
        ids[i, :len(own)] = torch.tensor(own)
        tags[i, :len(own)] = torch.tensor(own_tags)
        mask[i, :len(own)] = True
    tokens = sum(len(own) for own, _ in batch)
    keep = mask.to(device, non_blocking=True)[:, None, None] if tokens < mask.numel() else None
    return ids.to(device, non_blocking=True), tags.to(device, non_blocking=True), keep, tokens


def entities(tags):
    found, first = set(), 0
    while first < len(tags):
        last = first + 1
        if tags[first] != "O":
            while last < len(tags) and tags[last] == "I-" + tags[first][2:]:
                last += 1
            found.add((tags[first][2:], first, last))
        first = last
    return found


# --- Model --------------------------------------------------------------------------------------------------------------


def read_safetensors(path):
    """Returns the tensors of a file, as float."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    tensors = {}
    for name, entry in json.loads(data[8:8 + length]).items():
        if name == "__metadata__" or entry["dtype"] not in dtypes:
            continue
        begin, end = entry["data_offsets"]
        memory = bytearray(data[8 + length + begin:8 + length + end])
        tensors[name.removeprefix("bert.")] = torch.frombuffer(memory, dtype=dtypes[entry["dtype"]]).view(entry["shape"]).float()
    return tensors


class Layer(nn.Module):
    def __init__(self, hidden, heads, inner):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(hidden, 1e-12), nn.LayerNorm(hidden, 1e-12)
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x, mask):
        split = lambda y: y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(split(self.q(x)), split(self.k(x)), split(self.v(x)), attn_mask=mask)
        x = self.norm1(x + self.o(y.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    def __init__(self, config, labels):
        super().__init__()
        hidden = config["hidden_size"]
        self.words = nn.Embedding(config["vocab_size"], hidden)
        self.positions = nn.Embedding(config["max_position_embeddings"], hidden)
        self.segments = nn.Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden, 1e-12)
        self.layers = nn.ModuleList(Layer(hidden, config["num_attention_heads"], config["intermediate_size"])
                                    for _ in range(config["num_hidden_layers"]))
        self.classifier = nn.Linear(hidden, labels)
        nn.init.normal_(self.classifier.weight, 0.0, 0.02)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, ids, mask):
        x = self.norm(self.words(ids) + self.positions.weight[:ids.shape[1]] + self.segments.weight[0])
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        for layer in self.layers:
            x = layer(x, mask)
        return self.classifier(x)

    def load(self, weights):
        places = {"words": "embeddings.word_embeddings", "positions": "embeddings.position_embeddings",
                  "segments": "embeddings.token_type_embeddings", "norm": "embeddings.LayerNorm"}
        of_a_layer = {"q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
                      "o": "attention.output.dense", "norm1": "attention.output.LayerNorm",
                      "up": "intermediate.dense", "down": "output.dense", "norm2": "output.LayerNorm"}
        for i in range(len(self.layers)):
            places.update({f"layers.{i}.{own}": f"encoder.layer.{i}.{theirs}" for own, theirs in of_a_layer.items()})
        with torch.no_grad():
            for own, theirs in places.items():
                module = self.get_submodule(own)
                module.weight.copy_(weights[theirs + ".weight"])
                if getattr(module, "bias", None) is not None:
                    module.bias.copy_(weights[theirs + ".bias"])


# --- Training -----------------------------------------------------------------------------------------------------------


def main():
    options = arguments()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("bert_ner_torch.py: torch sees no CUDA device; nothing was trained")
        return 77
    torch.backends.cuda.matmul.allow_tf32 = options.precision == "tf32"
    config = json.loads((options.model / "config.json").read_text())
    data = read_conll(options.conll)
    labels = ["O"] + sorted({tag for _, tags in data for tag in tags} - {"O"})
    number = {label: i for i, label in enumerate(labels)}
    held_out = set(shuffled_indices(len(data), Mt19937_64(options.seed))[:round(0.2 * len(data))])
    tokenizer = WordPieceTokenizer(options.model / "vocab.txt")
    encoded = [encode(sentence, tokenizer, number) for sentence in data]
    torch.manual_seed(options.seed)
    net = Bert(config, len(labels))
    net.load(read_safetensors(options.model / "model.safetensors"))
    net.to(options.device)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.precision)
    autocast = lambda: torch.autocast(options.device, dtype=dtype, enabled=dtype is not None)
    pretrained = [p for name, p in net.named_parameters() if not name.startswith("classifier.")]
    groups = [{"params": [p for p in pretrained if p.dim() > 1], "weight_decay": 0.01, "lr_factor": 1},
              {"params": [p for p in pretrained if p.dim() <= 1], "weight_decay": 0.0, "lr_factor": 1},
              {"params": list(net.classifier.parameters()), "weight_decay": 0.0, "lr_factor": 20}]
    optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, fused=True)
    scaler = torch.amp.GradScaler(options.device, enabled=dtype is not None)
    wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None

    batches = batches_of([example for i, example in enumerate(encoded) if i not in held_out], options.batch_size)
    order = [i for epoch in range(options.epochs) for i in shuffle_batches(len(batches), options.seed, epoch)]
    total, warmup = len(order), math.floor(options.warmup * len(order) + 0.5)
    tokens, began = 0, time.perf_counter()
    for step, position in enumerate(order[:options.max_steps]):
        factor = (step + 1) / (warmup + 1) if step < warmup else (total - step) / (total - warmup)
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * group["lr_factor"] * factor
        ids, tags, mask, count = collate(batches[position], options.device)
        with autocast():
            loss = F.cross_entropy(net(ids, mask).flatten(0, 1).float(), tags.flatten(), ignore_index=IGNORED)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        tokens += count
    wait()
    seconds = time.perf_counter() - began

    net.eval()
    right = guessed = wanted = 0
    with torch.no_grad(), autocast():
        for batch in batches_of([encoded[i] for i in sorted(held_out)], 32):
            ids, tags, mask, _ = collate(batch, options.device)
            best = net(ids, mask).argmax(-1).cpu()
            for own, truth in zip(best, tags.cpu()):
                kept = truth != IGNORED
                predicted, true = (entities([labels[i] for i in numbers[kept]]) for numbers in (own, truth))
                right, guessed, wanted = right + len(predicted & true), guessed + len(predicted), wanted + len(true)
    memory = torch.cuda.max_memory_allocated() if options.device == "cuda" else None
    print(json.dumps({"what": f"BERT NER, {options.precision}", "peer": "Python torch.amp",
                      "f1": round(2 * right / max(1, guessed + wanted), 4), "tokens_per_second": round(tokens / seconds), "loss": loss.item(),
                      "peak_memory_bytes": memory}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
