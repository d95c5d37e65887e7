"""Writes data/tiny_bert, a BERT of a few thousand parameters, and the outputs of Hugging Face's implementation.

    python3 make_bert_expectation.py

Needs torch, transformers and safetensors. The output is committed: parts_test.cpp compares with it, program_test.cpp trains it.
Logits and gradients are those of evaluation mode (no dropout).
"""

import pathlib

import torch
from safetensors.torch import save_file
from transformers import BertConfig, BertForTokenClassification

DATA = pathlib.Path(__file__).parent / "data"
LABELS = ["O", "B-person", "I-person", "B-place", "I-place"]
WORDS = """alice bob carol smith jones paris rome london new york lives in works at visits met and
from . , the a ##s ##ing ##ville old said""".split()
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def main():
    torch.manual_seed(20)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    vocabulary += ([c for c in LETTERS if c not in vocabulary] +
                   ["##" + c for c in LETTERS if "##" + c not in vocabulary])
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=24, max_position_embeddings=20, type_vocab_size=2, initializer_range=0.3,
        attn_implementation="eager", id2label=dict(enumerate(LABELS)),
        label2id={name: i for i, name in enumerate(LABELS)})
    model = BertForTokenClassification(config).eval()
    for name, parameter in model.named_parameters():
        # Biases and layer norms start at 0 and 1, which would hide a mix-up.
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)

    directory = DATA / "tiny_bert"
    directory.mkdir(exist_ok=True)
    model.save_pretrained(directory)
    (directory / "vocab.txt").write_text("".join(token + "\n" for token in vocabulary))

    ids = torch.randint(5, len(vocabulary), (3, 12))
    mask = torch.ones(3, 12, dtype=torch.long)
    for row, length in enumerate((12, 9, 4)):
        mask[row, length:] = 0
        ids[row, length:] = 0
    labels = torch.randint(0, len(LABELS), (3, 12)).masked_fill(mask == 0, -100)
    output = model(input_ids=ids, attention_mask=mask, labels=labels)
    output.loss.backward()
    with torch.no_grad():
        unpadded = model(input_ids=ids[:1]).logits
    tensors = {"ids": ids, "mask": mask.bool(), "labels": labels, "loss": output.loss.detach(),
               "logits": output.logits.detach(), "logits_unpadded": unpadded}
    tensors |= {"grad." + name: parameter.grad for name, parameter in model.named_parameters()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()},
              DATA / "tiny_bert_expectation.safetensors")


if __name__ == "__main__":
    main()
