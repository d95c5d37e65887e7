"""The baseline of bert_ner's speed: the same fine-tuning with torch.amp in Python, with the same batch size and number of threads.

    python3 reference.py --model DIRECTORY --data FILE [--precision fp32|amp-no-scale|amp]
                         [--threads N] [--max-steps N]

Needs torch and transformers. Prints one line of JSON.
"""

import argparse
import contextlib
import json
import random
import time

import torch
from transformers import (AutoTokenizer, BertForTokenClassification, DataCollatorForTokenClassification,
                          get_linear_schedule_with_warmup)


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


def encode(words, tags, tokenizer, labels):
    """Ids as the model reads them. The first piece of a word has its label, what the loss ignores has -100."""
    encoded = tokenizer(words, is_split_into_words=True)
    word_of = encoded.word_ids()
    encoded["labels"] = [-100 if word is None or word == before else labels.index(tags[word])
                         for before, word in zip([None, *word_of], word_of)]
    return encoded


def train(model, batches, options, collate, autocast, scaler):
    optimizer = torch.optim.AdamW(decay_groups(model), lr=4e-4, fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, len(batches))
    tokens = 0
    model.train()
    began = time.perf_counter()
    for batch in batches[: options.max_steps or None]:
        inputs = collate(batch)
        with autocast():
            loss = model(**inputs).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        tokens += int(inputs["attention_mask"].sum())
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
    return parser.parse_args()


def main():
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    random.seed(1)
    sentences = read_conll(options.data)
    labels = ["O"] + sorted({tag for _, tags in sentences for tag in tags} - {"O"})
    random.shuffle(sentences)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    examples = [encode(*sentence, tokenizer, labels) for sentence in sentences[round(0.2 * len(sentences)):]]
    examples.sort(key=lambda example: len(example["input_ids"]))  # batches of similar length
    batches = [examples[i : i + 8] for i in range(0, len(examples), 8)]
    random.shuffle(batches)
    model = BertForTokenClassification.from_pretrained(
        options.model, num_labels=len(labels), hidden_dropout_prob=0, attention_probs_dropout_prob=0)

    def autocast():
        if options.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast("cpu", dtype=torch.bfloat16)

    scaler = torch.amp.GradScaler("cpu", enabled=options.precision == "amp")
    tokens, seconds = train(model, batches, options, DataCollatorForTokenClassification(tokenizer),
                            autocast, scaler)
    print(json.dumps({"precision": options.precision, "threads": options.threads,
                      "tokens_per_second": tokens / seconds}))


if __name__ == "__main__":
    main()
