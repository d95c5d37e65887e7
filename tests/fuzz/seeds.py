#!/usr/bin/env python3
"""Writes initial inputs and a dictionary for each fuzz target.

    seeds.py DIRECTORY     writes DIRECTORY/TARGET/ and DIRECTORY/TARGET.dict
"""
import pathlib
import sys

SEEDS = {
    # 0 and edits (offset in two bytes, number of removed bytes, number of added bytes, added bytes), 1 and a file, or 2 and edits with
    # a valid CRC.
    "checkpoint": [b"\0", b"\0\x01\x00\x01\x01x", b"\0\x02\x00\x00\x04abcd", b"\0\x05\x00\x07\x00", b"\1", b"\2",
                   b"\1PK\x03\x04", b"\0\x10\x00\xff\x00", b"\2\x10\x00\xff\x00", b"\2\x01\x00\x01\x01x"],
    # The saved class, the loaded class, and decisions; a decision of 0 writes a valid part.
    "pickle": [bytes([i, second]) + bytes(300) for i in range(13) for second in (0, 7, 200)],
    "op_overrides": [b"# mine\nallow aten::softmax.int aten::exp\ndeny bmm\npromote aten::cat # so\nignore mv\n",
               b"deny binary_cross_entropy\nallow linear\r\n",
               b"fp32_append_dtype aten::norm.Scalar\n", b"deny aten::bmn\n"],
    # 0 and a file, 1, the number of bytes of data and a header, 2 and edits, or 3 and an index; edits are as for checkpoints.
    "safetensors": [b"\0\2\0\0\0\0\0\0\0{}", b'\1\4{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
                    b'\1\6{"__metadata__":{"a":"\\u00e9"},"x":{"shape":[3,1],"dtype":"BF16","data_offsets":[0,6]},'
                    b'"y":{"dtype":"BOOL","shape":[0],"data_offsets":[6,6],"z":[{}]}}',
                    b"\2", b"\6", b"\2\0\0\1\1x", b"\2\0\x20\0\1x",
                    b'\3{"metadata":{"total_size":1e3},"weight_map":{"bias":"x.safetensors","weight":"x.safetensors"}}'],
    "scaler_state": [bytes([way, 3, 0, 1, 140, 3, 2, 9, 5, 1, 120]) + bytes(range(40)) for way in range(8)],
    "flags": [b"\0params=float32,compute=bfloat16,output=float32", b"\0p=f32,c=bf16,o=f32", b"\0half", b"\1O2,128.0",
              b"\1O1_bf16,dynamic", b"\2\0auto", b"\2\1bf16", b"\2\0fp16", b"\2\0no", b"\3float16"],
}

WORDS = {
    "checkpoint": ["PK\x03\x04", "mezzo checkpoint, format 2", "\x80\x02"],
    "pickle": ["\xf4", "\xf5", "\xf6", "\xf7", "\xf8", "\xff"],
    "op_overrides": ["allow ", "deny ", "promote ", "ignore ", "fp32 ", "aten::", "softmax",
               ".int", "bmm", "cat", "add_", "binary_cross_entropy", "#"],
    "safetensors": ['"dtype":"', '"shape":[', '"data_offsets":[', '"__metadata__":{', '"weight_map":{', "F8_E4M3", "F16", "BOOL", "\\ud83d\\ude00",
                    "18446744073709551615", "x.safetensors", "\xc3\xa9"],
    "scaler_state": ["\x00\x7f\xf0"],
    "flags": ["params", "compute", "output", "float32", "bfloat16", "float64", "half", "O0", "O3", "_bf16", "dynamic",
              "1e38", "inf", "nan", "auto", "no", "fp16", "bf16", "65536", "2147483648", "9223372036854775807"],
}


def main():
    directory = pathlib.Path(sys.argv[1])
    for target, inputs in SEEDS.items():
        (directory / target).mkdir(parents=True, exist_ok=True)
        for i, data in enumerate(inputs):
            (directory / target / f"seed-{i}").write_bytes(data)
        lines = ['"' + "".join(f"\\x{byte:02x}" for byte in word.encode("latin-1")) + '"' for word in WORDS[target]]
        (directory / f"{target}.dict").write_text("".join(line + "\n" for line in lines))


main()
