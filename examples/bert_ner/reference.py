"""The same fine-tuning in Python's torch.amp, to compare speed and scores with.

The batches have the same size, the threads are as many.

    python3 reference.py --model FOLDER --data FILE [--precision fp32|amp-no-scale|amp]
                         [--threads N] [--max-steps N]

needs torch, transformers and seqeval. Prints one line of JSON.
"""

import argparse
import contextlib
import json
import random
import time

import torch
from seqeval.metrics import f1_score, precision_score, recall_score
from transformers import AutoTokenizer, BertForTokenClassification, get_linear_schedule_with_warmup


def read_conll(path):
    sentences, words, tags = [], [], []
    for line in [*open(path, encoding="utf-8"), ""]:
        columns = line.split()
        if columns:
            words.append(columns[0])
            tags.append(columns[-1])
        elif words:
            sentences.append((words, tags))
            words, tags = [], []
    return sentences


def encode(sentences, tokenizer, labels):
    examples = []
    for words, tags in sentences:
        ids, firsts = [tokenizer.cls_token_id], []
        for word in words:
            firsts.append(len(ids))
            ids += tokenizer.encode(word, add_special_tokens=False) or [tokenizer.unk_token_id]
        ids.append(tokenizer.sep_token_id)
        examples.append((ids, firsts, [labels.index(tag) for tag in tags]))
    return examples


def collate(examples, pad_id):
    length = max(len(ids) for ids, _, _ in examples)
    batch = torch.full((len(examples), length), pad_id)
    labels = torch.full((len(examples), length), -100)
    mask = torch.zeros((len(examples), length), dtype=torch.long)
    for row, (ids, firsts, tags) in enumerate(examples):
        batch[row, : len(ids)] = torch.tensor(ids)
        mask[row, : len(ids)] = 1
        labels[row, torch.tensor(firsts)] = torch.tensor(tags)
    return batch, mask, labels, int(mask.sum())


def length_sorted(examples, size):
    examples = sorted(examples, key=lambda example: len(example[0]))
    return [examples[i : i + size] for i in range(0, len(examples), size)]


def tag(model, examples, pad_id, labels, autocast):
    model.eval()
    truth, answers = [], []
    for batch in length_sorted(examples, 32):
        ids, mask, _, _ = collate(batch, pad_id)
        with torch.no_grad(), autocast():
            best = model(input_ids=ids, attention_mask=mask).logits.argmax(-1)
        for row, (_, firsts, tags) in enumerate(batch):
            truth.append([labels[i] for i in tags])
            answers.append([labels[best[row, first]] for first in firsts])
    return truth, answers


def train(model, batches, options, pad_id, autocast, scaler):
    optimizer = torch.optim.AdamW(decay_groups(model), lr=options.learning_rate, fused=True)
    steps = options.epochs * len(batches)
    schedule = get_linear_schedule_with_warmup(optimizer, round(options.warmup * steps), steps)
    tokens = step = 0
    model.train()
    began = time.perf_counter()
    for _ in range(options.epochs):
        random.shuffle(batches)
        for batch in batches:
            ids, mask, labels, real = collate(batch, pad_id)
            with autocast():
                logits = model(input_ids=ids, attention_mask=mask).logits
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad()
            tokens += real
            step += 1
            if step == options.max_steps:
                return tokens, time.perf_counter() - began
    return tokens, time.perf_counter() - began


def decay_groups(model):
    parameters = list(model.parameters())
    return [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.01},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0}]


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--precision", choices=["fp32", "amp-no-scale", "amp"], default="fp32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--max-steps", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=4e-4)
    parser.add_argument("--warmup", type=float, default=0.0)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main():
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    sentences = read_conll(options.data)
    labels = ["O"] + sorted({tag for _, tags in sentences for tag in tags} - {"O"})
    random.shuffle(sentences)
    held_out = round(0.2 * len(sentences))
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    valid = encode(sentences[:held_out], tokenizer, labels)
    rest = encode(sentences[held_out:], tokenizer, labels)
    model = BertForTokenClassification.from_pretrained(
        options.model, num_labels=len(labels), hidden_dropout_prob=options.dropout,
        attention_probs_dropout_prob=options.dropout)

    def autocast():
        if options.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast("cpu", dtype=torch.bfloat16)

    scaler = torch.amp.GradScaler("cpu", enabled=options.precision == "amp")
    tokens, seconds = train(model, length_sorted(rest, options.batch_size), options,
                            tokenizer.pad_token_id, autocast, scaler)
    truth, answers = tag(model, valid, tokenizer.pad_token_id, labels, autocast)
    print(json.dumps({"precision": options.precision, "threads": options.threads,
                      "f1": f1_score(truth, answers), "p": precision_score(truth, answers),
                      "r": recall_score(truth, answers),
                      "tokens_per_second": tokens / seconds}))


if __name__ == "__main__":
    main()
