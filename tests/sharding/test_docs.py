"""The Python of docs/parallel.md, run in order over eight devices, on a small model."""

from __future__ import annotations

import io
from pathlib import Path

import jax
import numpy as np
from code_blocks import code_blocks
from jax.sharding import Mesh
from tiny_models import tiny_llama_config
from transformers import AutoTokenizer, TextStreamer

import hfax
from hfax.demo import demo_folder


def test_the_page_on_parallelism(tmp_path: Path, monkeypatch) -> None:
    """The demo's six heads do not divide among four devices, so it is a model of the same tokenizer with eight."""
    monkeypatch.chdir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(demo_folder(), padding_side="left")
    config = tiny_llama_config(vocab_size=4096, num_attention_heads=8)
    name = tmp_path / "model"
    hfax.AutoModelForTPU.from_config(config, dtype="float32").save_pretrained(name)
    tokenizer.save_pretrained(name)
    monkeypatch.setattr("sys.stdin", io.StringIO("Return a new\n"))
    names = {
        **{"hfax": hfax, "AutoModelForTPU": hfax.AutoModelForTPU, "jax": jax, "sys": __import__("sys")},
        "name": name,
        "tokenizer": tokenizer,
        "streamer": TextStreamer(tokenizer),
        "texts": ["Return a new", "Raise an error"],
        "mesh": Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor")),
        "folder": tmp_path / "saved",
        "ids": np.array([[5, 6, 7, 8]] * 2, np.int32),
    }
    blocks = code_blocks("docs/parallel.md", "python")
    portable = [block for block in blocks if "hfax.portable" in block.text]  # a folder of `hfax export`, on one device
    for block in blocks:
        if block not in portable:
            block.run(names, {"max_new_tokens=64": "max_new_tokens=4"} if "max_new_tokens=64" in block.text else {})
    assert len(blocks) - len(portable) == 6
    assert len(names["results"]) == 2
    assert names["again"].mesh.shape["fsdp"] == 8
