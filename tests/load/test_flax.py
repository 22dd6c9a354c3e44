"""Checkpoints of transformers' last Flax classes: read to the same outputs, and written back to the same arrays.

`scripts/flax_reference.py` wrote what is under `flax/`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from hfax import AutoModelForTPU, CheckpointCorruptError
from hfax.load.flax_msgpack import read_flax_index, write_flax

FOLDER = Path(__file__).parent / "flax"
MODELS = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())


def reference(name):
    """Inputs and outputs."""
    stored = np.load(FOLDER / name / "reference.npz")
    outputs = {n.removeprefix("output."): stored[n] for n in stored if n.startswith("output.")}
    return {n: stored[n] for n in stored if not n.startswith("output.")}, outputs


def test_every_flax_class_that_hfax_promises_is_here():
    promised = [
        "bert",
        "roberta",
        "gpt2",
        "gpt_neo",
        "opt",
        "bart",
        "t5",
        "mt5",
        "llama",
        "mistral",
        "gemma",
        "whisper",
        "vit",
        "clip",
        "wav2vec2",
    ]
    assert set(promised) <= set(MODELS)
    assert len(MODELS) >= 30


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_the_flax_class(name):
    model = AutoModelForTPU.from_pretrained(FOLDER / name)
    inputs, outputs = reference(name)
    found = model(**inputs)
    assert outputs
    for key, expected in outputs.items():
        np.testing.assert_allclose(np.asarray(found[key]), expected, atol=1e-5, err_msg=f"{name} {key}")


@pytest.mark.parametrize("name", MODELS)
def test_weights_go_to_safetensors_and_back_bit_for_bit(name, tmp_path):
    from hfax.cli.app import run

    assert run(["convert", str(FOLDER / name), str(tmp_path / "torch")]) == 0
    assert (tmp_path / "torch" / "model.safetensors").is_file()
    assert run(["convert", str(tmp_path / "torch"), str(tmp_path / "flax"), "--to", "flax"]) == 0
    before = read_flax_index(FOLDER / name / "flax_model.msgpack")
    after = read_flax_index(tmp_path / "flax" / "flax_model.msgpack")
    assert set(before) == set(after)
    for path, stored in before.items():
        assert stored.dtype == after[path].dtype
        np.testing.assert_array_equal(stored.read(), after[path].read(), err_msg="/".join(path))


@pytest.mark.parametrize("name", ["bert", "whisper", "wav2vec2", "resnet"])
def test_plain_transformers_reads_what_was_converted(name, tmp_path):
    import torch
    import transformers

    from hfax.cli.app import run

    assert run(["convert", str(FOLDER / name), str(tmp_path)]) == 0
    cls = json.loads((tmp_path / "config.json").read_text())["architectures"][0]
    plain = getattr(transformers, cls).from_pretrained(tmp_path).eval()
    inputs, outputs = reference(name)
    with torch.no_grad():
        found = plain(**{n: torch.from_numpy(a) for n, a in inputs.items()})
    np.testing.assert_allclose(found.logits.numpy(), outputs["logits"], atol=1e-5)


def test_a_loaded_model_is_saved_as_flax(tmp_path):
    model = AutoModelForTPU.from_pretrained(FOLDER / "whisper")
    model.save_pretrained(tmp_path, format="flax")
    before = read_flax_index(FOLDER / "whisper" / "flax_model.msgpack")
    after = read_flax_index(tmp_path / "flax_model.msgpack")
    assert set(before) == set(after)
    for path, stored in before.items():
        np.testing.assert_array_equal(stored.read(), after[path].read())


def test_flax_itself_reads_and_writes_the_same_files(tmp_path):
    from flax import serialization
    from flax.traverse_util import flatten_dict

    rng = np.random.default_rng(0)
    tree = {
        ("a", "kernel"): rng.normal(size=(3, 5)).astype(np.float32),
        ("a", "scalar"): np.array(2.5, np.float32),
        ("a", "x" * 40): rng.integers(0, 9, (300,)),
        ("half",): rng.normal(size=(2, 2)).astype(ml_dtypes.bfloat16),
        **{(f"layer{i}", "w"): np.arange(i, dtype=np.float16) for i in range(20)},
    }
    ordered = ((path, a.shape, a.dtype, lambda a=a: a) for path, a in tree.items())
    write_flax(tmp_path / "own.msgpack", ordered)
    read = flatten_dict(serialization.msgpack_restore((tmp_path / "own.msgpack").read_bytes()))
    assert set(read) == set(tree)
    for path, array in tree.items():
        np.testing.assert_array_equal(read[path], array)
        assert read[path].dtype == array.dtype
    index = read_flax_index(tmp_path / "own.msgpack")
    for path, array in tree.items():
        np.testing.assert_array_equal(index[path].read(), array)


def test_arrays_in_chunks_are_one(tmp_path, monkeypatch):
    from flax import serialization

    monkeypatch.setattr("hfax.load.flax_msgpack._CHUNK_BYTES", 64)
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 64)
    array = np.arange(60, dtype=np.float32).reshape(3, 20)
    write_flax(tmp_path / "own.msgpack", [(("a", "b"), array.shape, array.dtype, lambda: array)])
    (tmp_path / "flax.msgpack").write_bytes(serialization.msgpack_serialize({"a": {"b": array}}))
    for name in ("own", "flax"):
        index = read_flax_index(tmp_path / f"{name}.msgpack")
        assert len(index["a", "b"].parts) > 1
        np.testing.assert_array_equal(index["a", "b"].read(), array)
    restored = serialization.msgpack_restore((tmp_path / "own.msgpack").read_bytes())
    np.testing.assert_array_equal(restored["a"]["b"], array)


def test_scanned_layers_and_shards_are_read(tmp_path):
    """Layers run by nn.scan are one array; shards have an index from paths with slashes to files."""
    shutil.copytree(FOLDER / "whisper", tmp_path / "scanned")
    index = read_flax_index(FOLDER / "whisper" / "flax_model.msgpack")
    stacked, plain = {}, {}
    for path, stored in index.items():
        if "layers" in path:
            at = path.index("layers")
            rest = (*path[: at + 1], "FlaxWhisperLayers", *path[at + 2 :])
            stacked.setdefault(rest, {})[int(path[at + 1])] = stored.read()
        else:
            plain[path] = stored.read()
    arrays = plain | {path: np.stack([parts[i] for i in range(len(parts))]) for path, parts in stacked.items()}
    names = sorted(arrays)
    weight_map = {}
    for number, own in enumerate((names[::2], names[1::2]), start=1):
        file = f"flax_model-0000{number}-of-00002.msgpack"
        write_flax(
            tmp_path / "scanned" / file, ((p, arrays[p].shape, arrays[p].dtype, lambda p=p: arrays[p]) for p in own)
        )
        weight_map |= {"/".join(path): file for path in own}
    (tmp_path / "scanned" / "flax_model.msgpack").unlink()
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (tmp_path / "scanned" / "flax_model.msgpack.index.json").write_text(text)
    model = AutoModelForTPU.from_pretrained(tmp_path / "scanned")
    inputs, outputs = reference("whisper")
    np.testing.assert_allclose(np.asarray(model(**inputs).logits), outputs["logits"], atol=1e-5)


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "head", "tail"])
def test_a_damaged_file_is_an_error(damage, tmp_path):
    shutil.copytree(FOLDER / "bert", tmp_path / "bert")
    path = tmp_path / "bert" / "flax_model.msgpack"
    content = path.read_bytes()
    path.write_bytes(
        {
            "cut": content[: len(content) // 2],
            "empty": b"",
            "text": b"version https://git-lfs.github.com/spec/v1\n",
            "head": b"\xc1" + content[1:],
            "tail": content + b"more",
        }[damage]
    )
    with pytest.raises(CheckpointCorruptError, match="Flax"):
        AutoModelForTPU.from_pretrained(tmp_path / "bert")


def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch):
    from hfax.cli.app import run

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    assert run(["convert", str(FOLDER / "bert"), str(tmp_path / "b"), "--to", "flax"]) == 1
    assert not list((tmp_path / "b").iterdir())
    assert run(["convert", str(FOLDER / "bert"), str(FOLDER / "bert")]) == 1
