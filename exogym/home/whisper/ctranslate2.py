"""Read Whisper's weights from CTranslate2's file model.bin, and give them the names that transformers uses.

All numbers in model.bin are little-endian. The file begins with the version (u32, 6 here), the name of the model's
kind, the revision (u32) and the number of variables (u32). Each variable has a name, a rank (u8), a size for each axis
(u32 each), a type (u8), a number of bytes (u32) and these bytes. At the end come the number of aliases (u32) and two
names for each alias. A name is a length (u16) and this number of bytes; the last byte is 0.

| CTranslate2 | transformers, under `model.` |
| --- | --- |
| encoder/conv1, conv2 (weight, bias) | encoder.conv1, conv2 |
| encoder, decoder/position_encodings/encodings | embed_positions.weight |
| decoder/embeddings/weight | decoder.embed_tokens.weight, and proj_out.weight |
| layer_norm (gamma, beta) | layer_norm (weight, bias); in layers as below |
| layer_i/self_attention/layer_norm | layers.i.self_attn_layer_norm |
| layer_i/self_attention/linear_0: rows of q, then k, then v | self_attn.q_proj, k_proj, v_proj; k has no bias |
| layer_i/self_attention/linear_1 | self_attn.out_proj |
| decoder/layer_i/attention/layer_norm | encoder_attn_layer_norm |
| decoder/layer_i/attention/linear_0; linear_1: k, v | encoder_attn.q_proj; k_proj, v_proj |
| decoder/layer_i/attention/linear_2 | encoder_attn.out_proj |
| layer_i/ffn/layer_norm, linear_0, linear_1 | final_layer_norm, fc1, fc2 |
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exogym.errors import DataError
from exogym.files import opened_regular

VERSION, KIND = 6, "WhisperSpec"
TYPES: dict[int, np.dtype[Any]] = {i: np.dtype(t) for i, t in enumerate(("<f4", "i1", "<i2", "<i4", "<f2"))}
LAYER = {
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
PARTS = {
    "conv1": "conv1",
    "conv2": "conv2",
    "layer_norm": "layer_norm",
    "embeddings": "embed_tokens",
    "position_encodings": "embed_positions",
}
ENDINGS = {"gamma": "weight", "beta": "bias", "encodings": "weight", "weight": "weight", "bias": "bias"}
NO_BIAS = ("self_attn.k_proj", "encoder_attn.k_proj")


def read_variables(path: Path) -> dict[str, np.ndarray]:
    """Return the variables in CTranslate2's file model.bin, by name.

    Raises:
        DataError: the file cannot be read, is incomplete, has another version, or has a model of another kind.
    """
    try:
        with opened_regular(path) as file:
            data = file.read()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error})") from error
    reader = _Bytes(data)
    try:
        version = reader.number("I")
        if version != VERSION:
            raise DataError(f"{path} has version {version} of CTranslate2's format, but must have version {VERSION}")
        if (kind := reader.name()) != KIND:
            raise DataError(f"{path} has a model of kind {kind!r}, but must have kind {KIND!r}")
        reader.number("I")
        found = {}
        for _ in range(reader.number("I")):
            name = reader.name()
            shape = [reader.number("I") for _ in range(reader.number("B"))]
            kind_of, size = reader.number("B"), reader.number("I")
            if kind_of not in TYPES or math.prod(shape) * TYPES[kind_of].itemsize != size:
                raise DataError(
                    f"{path} is damaged: its variable {name} has {size} bytes, which is wrong for shape {shape} and "
                    f"type {kind_of}"
                )
            found[name] = np.frombuffer(reader.take(size), TYPES[kind_of]).reshape(shape)
        for _ in range(reader.number("I")):
            alias, name = reader.name(), reader.name()
            found[alias] = found[name]
    except (struct.error, UnicodeDecodeError, KeyError) as error:
        raise DataError(f"{path} is incomplete, or not a model of CTranslate2: {error}") from error
    if reader.at != len(data):
        raise DataError(f"{path} has {len(data) - reader.at} bytes too many, so it is damaged: copy the file again")
    return found


class _Bytes:
    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        if self.at + size > len(self.data):
            raise struct.error(f"the file ends at byte {len(self.data)}")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, kind: str) -> int:
        return int(struct.unpack("<" + kind, self.take(struct.calcsize(kind)))[0])

    def name(self) -> str:
        return self.take(self.number("H")).rstrip(b"\0").decode("ascii")


def named_for_transformers(variables: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Return a state dict, in fp32, for transformers' `WhisperForConditionalGeneration`.

    Raises:
        DataError: a variable has no counterpart in transformers' model.
    """
    state: dict[str, Tensor] = {}
    for name, values in variables.items():
        if values.ndim and name != "decoder/alignment_heads":
            for new, part in _mapped(name, values):
                state[new] = torch.from_numpy(part.astype(np.float32))
    return state


def _mapped(name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    half, *middle, ending = name.split("/")
    place, ending = "/".join(middle), ENDINGS.get(ending, ending)
    if (half, place) == ("decoder", "projection"):
        yield "proj_out.weight", values
        return
    match = re.fullmatch(r"layer_(\d+)/(.+)", place)
    if match and match[2] in LAYER:
        parts = LAYER[match[2]]
        for part, piece in zip(parts, np.split(values, len(parts)), strict=True):
            if ending != "bias" or part not in NO_BIAS:
                yield f"model.{half}.layers.{match[1]}.{part}.{ending}", piece
    elif place in PARTS:
        yield f"model.{half}.{PARTS[place]}.{ending}", values
    else:
        raise DataError(f"variable {name!r} of shape {values.shape} does not belong to a Whisper model")


def sizes(variables: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the model's sizes as arguments for transformers' `WhisperConfig`."""
    state = {name: values.shape for name, values in variables.items()}

    def layers(half: str) -> int:
        return len({name.split("/")[1] for name in state if name.startswith(f"{half}/layer_")} - {"layer_norm"})

    return {
        "vocab_size": state["decoder/embeddings/weight"][0],
        "num_mel_bins": state["encoder/conv1/weight"][1],
        "d_model": state["encoder/conv1/weight"][0],
        "encoder_layers": layers("encoder"),
        "decoder_layers": layers("decoder"),
        "encoder_attention_heads": int(variables["encoder/num_heads"]),
        "decoder_attention_heads": int(variables["decoder/num_heads"]),
        "encoder_ffn_dim": state["encoder/layer_0/ffn/linear_0/weight"][0],
        "decoder_ffn_dim": state["decoder/layer_0/ffn/linear_0/weight"][0],
        "max_source_positions": state["encoder/position_encodings/encodings"][0],
        "max_target_positions": state["decoder/position_encodings/encodings"][0],
    }
