#!/usr/bin/env python3
"""Records seqeval's scores of random tag sequences, for entity_scores_test.cpp.

  pip install seqeval==1.2.2 && make_entity_score_expectation.py > data/entity_scores.jsonl

A line a case: truth and prediction as lists of sentences of blank-separated tags, then
[precision, recall, f1] over all, then [precision, recall, f1, support] of each type.
"""
import json
import random
import warnings

from seqeval.metrics import classification_report, f1_score, precision_score, recall_score

TYPES = ["person", "geo-loc", "LOC", "O"]


def random_tag(source, inside):
    return source.choice(["O"] * 3 + ["B-", "I-"] + ["I-"] * inside)


def random_sentence(source, length):
    tags = []
    for _ in range(length):
        tag = random_tag(source, 2 * bool(tags and tags[-1] != "O"))
        if tag != "O":
            follows = tags and tags[-1] != "O" and source.random() < 0.7
            tag += tags[-1][2:] if follows else source.choice(TYPES)
        tags.append(tag)
    return tags


def disturbed(source, tags, rate):
    return [tag if source.random() > rate else random_sentence(source, 1)[0] for tag in tags]


def as_floats(values):
    return [float(value) for value in values]


def record(truth, predicted):
    report = classification_report(truth, predicted, output_dict=True)
    fields = ("precision", "recall", "f1-score", "support")
    by_type = {name: as_floats(row[field] for field in fields)
               for name, row in report.items() if not name.endswith(" avg")}
    overall = as_floats(score(truth, predicted)
                           for score in (precision_score, recall_score, f1_score))
    print(json.dumps([[" ".join(tags) for tags in truth], [" ".join(tags) for tags in predicted],
                      overall, by_type], separators=(",", ":")))


def main():
    warnings.simplefilter("ignore")  # of ratios without a denominator
    source = random.Random(2011)
    record([["O", "O"]], [["B-LOC", "I-LOC"]])
    record([["B-LOC", "O"]], [["O", "O"]])
    for case in range(38):
        truth = [random_sentence(source, source.randint(1, 12)) for _ in range(1 + case % 5)]
        rate = source.choice([0, 0.1, 0.3, 0.6])
        record(truth, [disturbed(source, tags, rate) for tags in truth])


if __name__ == "__main__":
    main()
