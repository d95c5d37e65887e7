#!/usr/bin/env python3
"""What fuzzing begins with: small good inputs of each target, and the words that its reader knows.

  seeds.py FOLDER     writes FOLDER/TARGET/ and FOLDER/TARGET.dict
"""
import json
import pathlib
import struct
import sys


def safetensors(entries, metadata=None, sizes={"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U8": 1}):
    header, offset = ({"__metadata__": metadata} if metadata else {}), 0
    for name, dtype, shape in entries:
        size = sizes[dtype]
        for extent in shape:
            size *= extent
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(i % 61 for i in range(offset))


def bert(layers=1, hidden=2, inner=3, vocabulary=5, positions=4, types=2):
    """A config.json, and the entries of a file that fits it."""
    config = {"model_type": "bert", "vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": layers,
              "num_attention_heads": 1, "intermediate_size": inner, "max_position_embeddings": positions,
              "type_vocab_size": types, "layer_norm_eps": 1e-12, "hidden_dropout_prob": 0.1,
              "attention_probs_dropout_prob": 0.1, "initializer_range": 0.02, "hidden_act": "gelu",
              "id2label": {"0": "O", "1": "B-a"}}
    entries = [("embeddings.word_embeddings.weight", [vocabulary, hidden]),
               ("embeddings.position_embeddings.weight", [positions, hidden]),
               ("embeddings.token_type_embeddings.weight", [types, hidden])]
    entries += [(f"embeddings.LayerNorm.{part}", [hidden]) for part in ("weight", "bias")]
    for layer in range(layers):
        for name, rows, columns in (("attention.self.query", hidden, hidden), ("attention.self.key", hidden, hidden),
                                    ("attention.self.value", hidden, hidden),
                                    ("attention.output.dense", hidden, hidden),
                                    ("intermediate.dense", inner, hidden), ("output.dense", hidden, inner)):
            name = f"encoder.layer.{layer}.{name}"
            entries += [(name + ".weight", [rows, columns]), (name + ".bias", [rows])]
        for name in ("attention.output", "output"):
            entries += [(f"encoder.layer.{layer}.{name}.LayerNorm.{part}", [hidden]) for part in ("weight", "bias")]
    return json.dumps(config).encode(), [(name, "F32", shape) for name, shape in entries]


def seeds():
    config, entries = bert()
    prefixed = [("bert." + name, dtype, shape) for name, dtype, shape in entries]
    twos, entries_of_twos = bert(2, 2, 2, 2, 2, 2)  # the target finetune has no other sizes
    vocabulary = b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\n##s\na\n##b\n,\n\xe4\xb8\xad\n"
    columns = b"-DOCSTART-\n\nEU\tB-ORG\nrejects\tO\n\nthe\tB-a\nab\tI-a\n\na O\n\nb I-x\n\nc\tO\n\nd\tO\n\ne\tO\n\n"
    return {
        "safetensors": [safetensors([("a", "F32", [2, 3]), ("b", "U8", [3]), ("c", "I64", [])], {"format": "pt"}),
                        safetensors([("empty", "F16", [0, 7])]), safetensors([]), b"PK\x03\x04zip", b"\x80\x02pickle",
                        b"version https://git-lfs.github.com/spec/v1\n"],
        "wordpiece": [vocabulary + b"\0\0The abs, [MASK] \xe4\xb8\xad\xc3\xa9e\xcc\x81 \xe2\x80\x8b",
                      vocabulary + b'\0{"do_lower_case": false, "strip_accents": null, "unk_token": "[UNK]", '
                      b'"tokenizer_class": "BertTokenizer"}\0The a' + b"b" * 120],
        "conll": [columns, b"\xef\xbb\xbfEU NNP B-NP B-ORG\r\n . . O O\r\n\t\r\nx\tO\n"],
        "model_config": [config + b"\0" + safetensors(entries), config + b"\0" + safetensors(prefixed)],
        "finetune": [vocabulary + b"\0" + columns + b"\0" + twos + b"\0" + safetensors(entries_of_twos),
                     vocabulary + b"\0" + columns + b"\0" + config + b"\0" + safetensors(entries)],
        # Edits: an offset in two bytes, how many bytes go, how many come. 1: a whole file. 2: with a new CRC.
        "checkpoint": [b"\0", b"\0\x01\x00\x01\x01x", b"\0\x02\x00\x00\x04abcd", b"\0\x05\x00\x07\x00", b"\1", b"\2",
                       b"\1PK\x03\x04", b"\0\x10\x00\xff\x00", b"\2\x10\x00\xff\x00", b"\2\x01\x00\x01\x01x"],
        "policy": [b"# mine\nallow aten::softmax.int aten::exp\ndeny bmm\npromote aten::cat # so\nignore mv\n",
                   b"deny binary_cross_entropy\nallow linear\r\n",
                   b"fp32_append_dtype aten::norm.Scalar\n", b"deny aten::bmn\n"],
        "scaler_state": [bytes([way, 3, 0, 1, 140, 3, 2, 9, 5, 1, 120]) + bytes(range(40)) for way in range(8)],
        "words": [b"\0params=float32,compute=bfloat16,output=float32", b"\0p=f32,c=bf16,o=f32", b"\0half", b"\1O2,128.0",
                  b"\1O1_bf16,dynamic", b"\2\0auto", b"\2\1bf16", b"\2\0fp16", b"\2\0off",
                  b"\3float16",
                  b"\4RANK=1\nWORLD_SIZE=2\nLOCAL_RANK=1\nMASTER_ADDR=localhost\nMASTER_PORT=29500\n",
                  b"\4OMPI_COMM_WORLD_RANK=0\nOMPI_COMM_WORLD_SIZE=4\nOMPI_COMM_WORLD_LOCAL_RANK=0\nMASTER_ADDR=a\n"
                  b"MASTER_PORT=1\n",
                  b"\4SLURM_PROCID=3\nSLURM_NTASKS=4\nSLURM_LOCALID=1\nSLURM_JOB_NODELIST=node[3,5-7],b\n"
                  b"SLURM_JOB_ID=7\n"],
    }


WORDS = {
    "safetensors": ['"dtype"', '"shape"', '"data_offsets"', '"__metadata__"', '"F32"', '"BOOL"', '[0,0]',
                    '18446744073709551615', '9223372036854775808'],
    "wordpiece": ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "##", '"do_lower_case"', '"strip_accents"',
                  '"tokenize_chinese_chars"', '"never_split"', "\xc4\xb0", "\xe2\x80\x8b", "\xcc\x81"],
    "conll": ["-DOCSTART-", "\tO\n", "\tB-", "\tI-", "\r\n"],
    "model_config": ['"hidden_size"', '"num_hidden_layers"', '"id2label"', "2147483647", "-1", "1e300", "null",
                     "bert.encoder.layer.1.intermediate.dense.weight", "LayerNorm.gamma", "classifier.weight"],
    "checkpoint": ["PK\x03\x04", "mezzo checkpoint, format 1", "\x80\x02"],
    "policy": ["allow ", "deny ", "promote ", "ignore ", "fp32 ", "aten::", "softmax",
               ".int", "bmm", "cat", "add_", "binary_cross_entropy", "#"],
    "scaler_state": ["\x00\x7f\xf0"],
    "words": ["params", "compute", "output", "float32", "bfloat16", "float64", "half", "O0", "O3", "_bf16", "dynamic",
              "1e38", "inf", "nan", "auto", "RANK=", "WORLD_SIZE=", "LOCAL_RANK=", "MASTER_ADDR=", "MASTER_PORT=",
              "OMPI_COMM_WORLD_RANK=", "PMIX_SERVER_URI", "SLURM_PROCID=", "SLURM_NTASKS=", "SLURM_JOB_NODELIST=",
              "SLURM_JOB_ID=", "SLURM_STEP_NODELIST=", "65536", "2147483648", "9223372036854775807"],
}


def main():
    folder = pathlib.Path(sys.argv[1])
    for target, inputs in seeds().items():
        (folder / target).mkdir(parents=True, exist_ok=True)
        for i, one in enumerate(inputs):
            (folder / target / f"seed-{i}").write_bytes(one)
        words = WORDS.get(target, WORDS["model_config"] + WORDS["conll"])
        lines = ['"' + "".join(f"\\x{byte:02x}" for byte in word.encode("latin-1")) + '"' for word in words]
        (folder / f"{target}.dict").write_text("".join(line + "\n" for line in lines))


main()
