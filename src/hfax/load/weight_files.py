"""Chooses a checkpoint's weight files by their names.

Selects one weight format from the file names of a folder or a Hub repository, preferring safetensors over PyTorch pickles
as transformers does, and GGUF last. It opens no files; it only parses index text passed to it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import re
from collections.abc import Collection, Iterable
from typing import Literal

from hfax.errors import CheckpointCorruptError, CheckpointNotFoundError

WeightFormat = Literal["safetensors", "orbax", "pytorch_bin", "flax", "gguf"]
BUNDLE_FILE = "bundle.json"
"""In the folders that `hfax export` writes."""
ORBAX_FOLDER = "orbax"
"""Subfolder of orbax weights saved by hfax; listed by name among the file names."""

_CANDIDATES: tuple[tuple[str, WeightFormat], ...] = (
    ("model.safetensors", "safetensors"),
    ("model.safetensors.index.json", "safetensors"),
    (ORBAX_FOLDER, "orbax"),
    ("pytorch_model.bin", "pytorch_bin"),
    ("pytorch_model.bin.index.json", "pytorch_bin"),
    ("flax_model.msgpack", "flax"),
    ("flax_model.msgpack.index.json", "flax"),
)
_OTHER_FORMATS = (
    ("flax_model-*-of-*.msgpack", "shards without their index", "Download flax_model.msgpack.index.json too"),
    ("tf_model*.h5", "TensorFlow", "Load it in transformers 4 with from_tf=True and call save_pretrained there"),
    ("*.ckpt*", "TensorFlow 1", "Convert it with the model's conversion script in transformers"),
    ("*.onnx", "ONNX", "Use the repository that the ONNX file was made from"),
    ("adapter_model.*", "an adapter (PEFT)", "Merge it into its base model with peft's merge_and_unload and save that"),
    ("consolidated*", "the author's own", "Use the author's transformers repository, often named with -hf"),
    ("model-*-of-*.safetensors", "shards without their index", "Download model.safetensors.index.json too"),
    ("pytorch_model-*-of-*.bin", "shards without their index", "Download pytorch_model.bin.index.json too"),
    ("*.safetensors", "safetensors under another name", "Rename it to model.safetensors if it is the whole model"),
)


_COMPANIONS = (
    *("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.spm", "*.bpe", "*.vocab", "*.codes"),
    "additional_chat_templates/*.jinja",
    "*_Pooling/config.json",
)
_NOT_COMPANIONS = ("*.index.json", "trainer_state.json", "*_results.json", "LICENSE*", "README*", "requirements*.txt")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightFiles:
    """The chosen format, and its weight file or shard index."""

    format: WeightFormat
    main: str
    is_index: bool


def choose_weight_files(names: Collection[str], where: str) -> WeightFiles:
    """Choose among the file names at a checkpoint's root; `where` is used only in messages.

    Raises:
        CheckpointNotFoundError: no weights, or only in formats that hfax does not read.
    """
    for main, weight_format in _CANDIDATES:
        if main in names:
            return WeightFiles(format=weight_format, main=main, is_index=main.endswith(".index.json"))
    for pattern, kind, fix in _OTHER_FORMATS:
        if found := sorted(name for name in names if fnmatch.fnmatchcase(name.rpartition("/")[2], pattern)):
            raise CheckpointNotFoundError(
                f"{where} has no weights that hfax reads; it has {found[0]}{' and more' if len(found) > 1 else ''}.",
                f"Its weights are in another format: {kind}. This version reads model.safetensors, pytorch_model.bin and "
                "flax_model.msgpack, whole or sharded.",
                f"{fix}.",
            )
    raise CheckpointNotFoundError(
        f"{where} has no weights.",
        f"None of {', '.join(main for main, _ in _CANDIDATES)} is there. It has: {listing(names)}.",
        "Check the name; or build the model with random weights with AutoModelForTPU.from_config.",
    )


def companions(names: Iterable[str], allow_code: bool) -> list[str]:
    """Configuration, tokenizer and chat template files, and Python code if allowed."""

    def is_wanted(name: str) -> bool:
        if name.endswith(".py"):
            return allow_code
        patterns = [pattern for pattern in _COMPANIONS if pattern.count("/") == name.count("/")]
        return _matches(name, patterns) and not _matches(name, _NOT_COMPANIONS)

    return sorted(filter(is_wanted, names))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def is_gguf(names: Collection[str]) -> bool:
    """Whether GGUF files are the only weights among the file names of a folder or a repository."""
    has_own = "config.json" in names and any(main in names for main, _ in _CANDIDATES)
    return not has_own and bool(_gguf_models(names))


def choose_gguf(names: Collection[str], wanted: str | None, where: str) -> tuple[str, ...]:
    """Choose a GGUF file: itself, or all files of a split one, in order.

    Args:
        names: file names, with their folders.
        wanted: a file's name, a part of it between punctuation such as "Q4_K_M", or None for the only one.
        where: used only in messages.

    Raises:
        CheckpointNotFoundError: there is no such file, or more than one.
        CheckpointCorruptError: a file of a split one is missing.
    """
    models = _gguf_models(names)
    if wanted is None:
        found = list(models)
    elif wanted.endswith(".gguf"):
        found = [stem for stem, files in models.items() if wanted in files]
    else:
        tag = re.compile(rf"(?:^|[-._/]){re.escape(wanted)}(?=[-._/]|$)", re.IGNORECASE)
        found = [stem for stem in models if tag.search(stem)]
    if len(found) != 1:
        kind = f"{wanted!r}" if wanted else "the model"
        raise CheckpointNotFoundError(
            f"{len(found)} GGUF files of {where} are {kind}.",
            f"It has: {listing(found or models)}.",
            "Name one: a local file's path, owner/repo/file.gguf, or what tells it from the others, owner/repo:Q4_K_M.",
        )
    files = models[found[0]]
    split = _SPLIT.fullmatch(files[0])
    expected = [f"{split[1]}-{i + 1:05d}-of-{split[3]}.gguf" for i in range(int(split[3]))] if split else files
    return check_shards({name: name for name in expected}, files, where)


_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def _gguf_models(names: Collection[str]) -> dict[str, list[str]]:
    """The GGUF files of each model, by the name without its ending; projectors of images, which llama.cpp keeps apart, are none."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(".gguf") and not name.rpartition("/")[2].startswith("mmproj"):
            split = _SPLIT.fullmatch(name)
            found.setdefault(split[1] if split else name.removesuffix(".gguf"), []).append(name)
    return found


def read_weight_map(text: str, where: str) -> dict[str, str]:
    """Parse an index file into tensor name to shard name; `where` is used only in messages.

    Raises:
        CheckpointCorruptError: not an index, or it names a shard outside its folder.
    """
    try:
        weight_map = json.loads(text)["weight_map"]
        names = {*weight_map.values()} if isinstance(weight_map, dict) else {None}
    except (ValueError, KeyError, TypeError) as error:
        raise _corrupt_index(where, f"{type(error).__name__}: {error}") from error
    for name in names:
        if not isinstance(name, str) or not name or name.startswith(("/", ".")) or "/../" in name or "\\" in name:
            raise _corrupt_index(where, f"its weight_map names the shard {name!r}")
    if not names:
        raise _corrupt_index(where, "its weight_map is empty")
    return weight_map


def check_shards(weight_map: dict[str, str], names: Collection[str], where: str) -> tuple[str, ...]:
    """The shards that an index names, in order; all must be in `names`.

    Raises:
        CheckpointCorruptError: a shard is missing.
    """
    shards = sorted(set(weight_map.values()))
    if missing := [shard for shard in shards if shard not in names]:
        raise CheckpointCorruptError(
            f"{len(missing)} of {len(shards)} shards that the index names are missing from {where}: {listing(missing)}.",
            "The checkpoint was not copied or uploaded completely, or shards were renamed.",
            "Download the missing files into the same folder, or save the checkpoint again.",
        )
    return tuple(shards)


def listing(names: Collection[str]) -> str:
    """At most eight names, for a message."""
    shown = sorted(names)[:8]
    return (", ".join(shown) + (", …" if len(names) > 8 else "")) or "nothing"


def _corrupt_index(where: str, found: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"{where} is not a shard index: {found}.",
        'An index is JSON with a "weight_map" from tensor names to file names in its folder.',
        "Download or save it again.",
    )
