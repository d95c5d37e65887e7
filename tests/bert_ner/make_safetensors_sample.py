#!/usr/bin/env python3
"""Writes data/sample.safetensors with Hugging Face's own writer, for safetensors_test.cpp.

  pip install safetensors==0.8.0 && make_safetensors_sample.py data/sample.safetensors
"""
import ctypes
import pathlib
import struct
import sys

from safetensors import TensorSpec, serialize

BUFFERS = []


def tensor(dtype, shape, data):
    buffer = ctypes.create_string_buffer(data, max(1, len(data)))
    BUFFERS.append(buffer)  # the specification holds its address alone
    return TensorSpec(dtype=dtype, shape=shape, data_ptr=ctypes.addressof(buffer),
                      data_len=len(data))


TENSORS = {
    "weight": tensor("float32", [2, 3], struct.pack("<6f", 0, 1, 2, 3, 4, 5)),
    "bias": tensor("float32", [3], struct.pack("<3f", -1, 0.5, 1e30)),
    "half": tensor("float16", [2], struct.pack("<2e", 1.5, -2)),
    "brain": tensor("bfloat16", [1], b"\x80\x3f"),
    "double": tensor("float64", [1, 1], struct.pack("<d", 0.1)),
    "ids": tensor("int64", [2], struct.pack("<2q", -1, 1 << 40)),
    "count": tensor("int32", [], struct.pack("<i", 7)),
    "short": tensor("int16", [1], struct.pack("<h", -2)),
    "small": tensor("int8", [3], struct.pack("<3b", -1, 0, 1)),
    "byte": tensor("uint8", [1], b"\xff"),
    "mask": tensor("bool", [3], b"\x01\x00\x01"),
    "empty": tensor("float32", [0, 4], b""),
    "名 \"quoted\"\\": tensor("uint8", [2], b"\x01\x02"),
}

if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).write_bytes(serialize(TENSORS, {"format": "pt"}))
