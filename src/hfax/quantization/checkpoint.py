"""`hfax.quantize`: a checkpoint to one with 4- or 8-bit weights, calibrated on texts, with one layer in memory at a time.

The texts go through the layers one after the other. At each, the moments of what its linear modules read are summed up, their
weights are rounded so that products with such inputs change least, and the texts go on through the quantized layer. Finished layers
are on the disk, so an interrupted quantization goes on where it was. The result is in compressed-tensors' format, which hfax,
transformers and vLLM load.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hfax.errors import InvalidInputError, UnsupportedModelError
from hfax.launch.cluster import default_device
from hfax.load.config import read_config, read_generation_config
from hfax.load.convert import LazyTensor, check_other_folder, copy_companions
from hfax.load.folder import write_configs
from hfax.load.formats import find_weights, is_quantized_by_hfax
from hfax.load.host_arrays import to_numpy
from hfax.load.quantize import experts_weights, transposed_weights, weights_to_quantize
from hfax.load.save import save_safetensors
from hfax.load.save_compressed import Scheme, compress_part, quantization_config
from hfax.load.save_pretrained import as_host_tensor
from hfax.load.skeleton import Skeleton
from hfax.load.source import CheckpointSource, resolve_checkpoint
from hfax.load.store import open_store
from hfax.load.weights import Weight
from hfax.quantization.awq import scale_channels
from hfax.quantization.calibration import make_blocks, read_rows
from hfax.quantization.layer_steps import LayerSteps, has_observed_experts
from hfax.quantization.parts import Parts, digest_of
from hfax.quantization.rounding import Method, Rounding
from hfax.quantization.texts import Texts
from hfax.quantization.weight_reader import WeightReader, plain
from hfax.sharding.layout import Layout
from hfax.tracing.abstract import open_skeleton
from hfax.tracing.traced_model import TracedModel

Progress = Callable[[str, int, int], None]
"""Is called with what is done, and how many of how many layers are."""
_TOKENS_AT_A_TIME = 4096
_UNLIMITED = 1 << 60
_HELD_OUT = 8
"""One in so many rows of the data is used to measure the perplexity and not to calibrate."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizationReport:
    """What became of a checkpoint.

    Args:
        folder: of the quantized checkpoint.
        perplexity_before: of the held-out tokens, with the checkpoint's own weights.
        perplexity: of the same tokens, with the quantized weights.
        tokens: number of held-out tokens that were predicted.
        num_quantized: matrices that were quantized.
        num_uncalibrated: those of them that were rounded without calibration: those of experts without a gate; by "rtn", all.
    """

    folder: Path
    perplexity_before: float
    perplexity: float
    tokens: int
    num_quantized: int
    num_uncalibrated: int


def quantize(
    pretrained_model_name_or_path: str | Path,
    save_directory: str | Path,
    *,
    data: str | Path | Iterable[Mapping[str, Any]],
    method: Method = "gptq",
    bits: int = 4,
    group_size: int = 128,
    num_samples: int = 128,
    max_length: int = 2048,
    damping: float = 0.01,
    ignore: Sequence[str] = (),
    dtype: str = "auto",
    revision: str | None = None,
    token: str | None = None,
    local_files_only: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> QuantizationReport:
    """Quantize a decoder's linear layers with calibration data, and save it in compressed-tensors' format.

    Memory of the device holds the embedding table, the output head and one layer, with its second moments. An interrupted call
    goes on with the first unfinished layer if it is repeated. Embeddings, norms, the output head and matrices with fewer than 32
    rows are not quantized; nor are those whose rows do not divide into groups of 32 columns, nor experts that are stored as
    [experts, in, out]. Groups are smaller where rows do not divide into larger ones; rows of fewer than 96 columns have 8 bits.

    Args:
        pretrained_model_name_or_path: as in `AutoModelForTPU.from_pretrained`; a quantized checkpoint is dequantized first.
        save_directory: written folder; created if missing.
        data: calibration data: a UTF-8 text file, a .jsonl file, or rows: `{"text": …}`, `{"messages": […]}` and the other formats
            of supervised fine-tuning. One row in eight is held out, to measure the perplexity.
        method: "gptq" (Frantar et al., arXiv:2210.17323), "awq" (Lin et al., arXiv:2306.00978), or "rtn": round to nearest, which
            uses the data for the perplexity only.
        bits: of a weight: 4 or 8.
        group_size: columns that share a scale: 128, 64 or 32.
        num_samples: rows of tokens, at most.
        max_length: tokens of a row; at most the model's context.
        damping: share of the mean second moment that is added to each, so that inputs that the data lacks keep some weight.
        ignore: patterns of module names that are not quantized, such as "*.down_proj".
        dtype: of the weights that are not quantized, and of the computation; "auto": the checkpoint's.
        revision: as in `from_pretrained`.
        token: as in `from_pretrained`.
        local_files_only: as in `from_pretrained`.
        trust_remote_code: as in `from_pretrained`.
        progress: is called after each layer.

    Raises:
        InvalidInputError: an option is out of range, there is too little data, or the folder is the checkpoint's own.
        UnsupportedModelError: the model is no decoder with a list of layers, or none of its layers can be quantized.
        HfaxError: the folder cannot be written, or the disk is full.
    """
    rounding = Rounding(method=method, bits=bits, group_size=group_size, damping=damping)
    if num_samples < 2 or max_length < 2:
        raise InvalidInputError(
            f"num_samples={num_samples} and max_length={max_length} leave nothing to calibrate with.",
            "Two rows of two tokens are the least: one to calibrate with, one to measure the perplexity.",
            "Pass larger ones.",
        )
    source = resolve_checkpoint(
        pretrained_model_name_or_path,
        revision=revision,
        token=token,
        local_files_only=local_files_only,
        allow_code=trust_remote_code,
    )
    folder = Path(save_directory)
    check_other_folder(source, folder)
    rows = read_rows(Path(data)) if isinstance(data, (str, Path)) else data
    run = _Run(source, folder, rounding, tuple(ignore), dtype, trust_remote_code)
    ids = make_blocks(rows, run.tokenizer, count=num_samples, length=min(max_length, run.context or max_length))
    return run.quantize(ids, progress or (lambda what, done, total: None))


class _Run:
    """One quantization of a checkpoint; see `quantize` for the arguments."""

    def __init__(
        self,
        source: CheckpointSource,
        folder: Path,
        rounding: Rounding,
        ignore: tuple[str, ...],
        dtype: str,
        trust_remote_code: bool,
    ) -> None:
        config = read_config(source, trust_remote_code=trust_remote_code)
        if is_quantized_by_hfax(config) or source.format in ("orbax", "gguf"):
            raise InvalidInputError(
                f"{source.name} is a checkpoint of hfax's own quantized format, orbax or GGUF.",
                "To quantize, layers are read one at a time from safetensors, PyTorch or Flax files.",
                "Convert it first: hfax convert SRC DST --dtype bfloat16.",
            )
        code = str(source.folder) if trust_remote_code else None
        store = find_weights(config, open_store(source))
        self._source, self._folder, self._rounding, self._ignore = source, folder, rounding, ignore
        self._skeleton: Skeleton = open_skeleton(config, dtype=dtype, stored_dtype=store.float_dtype, code_folder=code)
        self._device = default_device()
        self._layout = Layout.on(self._device)
        buffers = self._layout.put({name: to_numpy(b) for name, b in self._skeleton.buffers.items()})
        traced = TracedModel(self._skeleton, self._skeleton.tied, buffers)
        self._steps = LayerSteps(traced, self._device)
        self._reader = WeightReader(self._skeleton, store, self._layout, self._steps.layer_of)
        self._trusts = trust_remote_code
        self._chosen = self._choose()

    @property
    def context(self) -> int | None:
        """The model's context, in tokens."""
        return getattr(self._skeleton.module.config.get_text_config(decoder=True), "max_position_embeddings", None)

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer."""
        from hfax.backends.protocol import LoadOptions
        from hfax.checkpoint import Checkpoint

        options = LoadOptions(trust_remote_code=self._trusts)
        found = Checkpoint(source=self._source, options=options, backend="jax").load_tokenizer()
        found.model_max_length = _UNLIMITED  # texts are cut into rows afterwards; longer ones would be warned of
        return found

    def quantize(self, ids: np.ndarray, progress: Progress) -> QuantizationReport:
        """Quantize every layer, and write the checkpoint.

        Args:
            ids: [rows, length] int32, the calibration data.
            progress: see `quantize`.
        """
        parts = Parts(self._folder, self._settings(ids))
        at_a_time = min(max(1, _TOKENS_AT_A_TIME // ids.shape[1]), len(ids) // 2)
        batches = [jax.device_put(ids[i : i + at_a_time]) for i in range(0, len(ids) - at_a_time + 1, at_a_time)]
        held = max(1, len(batches) // _HELD_OUT)
        texts = Texts(self._steps, batches, held)
        outside: Any = self._reader.read(None)
        names = [*self._steps.layers]
        uncalibrated = 0
        for number, name in enumerate(names):
            own = {**outside, **plain(self._reader.read(name))}
            if not parts.has(number):
                parts.write(number, *compress_part(self._skeleton, self._quantized(name, own, texts), as_host_tensor))
            packed = self._read_part(parts, number, name)
            uncalibrated += self._count_unobserved(name)
            texts.advance(name, own, {**outside, **packed})
            progress(name, number + 1, len(names))
        before, after = texts.perplexities(outside)
        self._write(parts, outside, len(names))
        return QuantizationReport(
            folder=self._folder,
            perplexity_before=before,
            perplexity=after,
            tokens=held * at_a_time * (ids.shape[1] - 1),
            num_quantized=len(self._chosen),
            num_uncalibrated=uncalibrated if self._rounding.method != "rtn" else len(self._chosen),
        )

    def _count_unobserved(self, name: str) -> int:
        """How many of a layer's quantized weights are of experts whose inputs are not observed."""
        weights = experts_weights(self._steps.layers[name])
        return sum(f"{name}.{n}" in self._chosen for n, module in weights if not has_observed_experts(module))

    def _choose(self) -> set[str]:
        """The names of the weights that are quantized."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self._skeleton.shapes.items()}
        linear = weights_to_quantize(self._skeleton.module, self._skeleton.shapes, self._skeleton.tied)
        linear -= transposed_weights(self._skeleton.module)  # no format of other libraries has them
        found = {
            name
            for name in linear
            if self._steps.layer_of(name) is not None
            and self._rounding.kind_of(shapes[name]) is not None
            and not any(fnmatch.fnmatchcase(name.removesuffix(".weight"), pattern) for pattern in self._ignore)
        }
        if not found:
            raise UnsupportedModelError(
                f"{type(self._skeleton.module).__name__} has no matrix to quantize.",
                f"Of {len(linear)} matrices of linear layers, none is in a decoder layer, divides into groups, and is not ignored.",
                "Pass another group_size or bits=8, or check ignore.",
            )
        return found

    def _quantized(self, name: str, weights: Mapping[str, jax.Array], texts: Texts) -> dict[str, Weight]:
        """A layer's weights, those that were chosen quantized.

        Args:
            name: of the layer.
            weights: of its programs.
            texts: at the layer.
        """
        moments = {} if self._rounding.method == "rtn" else texts.moments(name, weights)
        own = {n: weight for n, weight in weights.items() if self._steps.layer_of(n) == name}
        if self._rounding.method == "awq":
            own, moments = scale_channels(
                self._steps.layers[name],
                name,
                own,
                moments,
                lambda n: self._rounding.kind_of(own[n].shape) if n in self._chosen else None,
                lambda scaled: texts.first_output(name, {**weights, **scaled}),
            )
        of_module = {module: moment for modules, moment in moments.items() for module in modules}
        return {
            n: self._rounding.round(weight, of_module.get(n.removesuffix(".weight"))) if n in self._chosen else weight
            for n, weight in own.items()
        }

    def _read_part(self, parts: Parts, number: int, name: str) -> dict[str, Weight]:
        """The weights of a finished layer, as they were written."""
        config = copy.deepcopy(self._skeleton.module.config)
        schemes = parts.schemes(number)
        if schemes:
            config.quantization_config = quantization_config(self._skeleton, {}, schemes)
        store = find_weights(config, parts.store(number))
        return WeightReader(self._skeleton, store, self._layout, self._steps.layer_of).read(name)

    def _settings(self, ids: np.ndarray) -> dict[str, Any]:
        """Everything that a part's numbers depend on."""
        files = [*self._source.weight_files, self._source.folder / "config.json"]
        states: list[tuple[str, int, Any]] = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
        states += [(file.name, file.size, file.version) for file in self._source.remote_files]
        return {
            "checkpoint": digest_of(json.dumps(states).encode()),
            "calibration data": digest_of(ids.tobytes(), str(ids.shape).encode()),
            "dtype": str(self._skeleton.dtype),
            "ignore": list(self._ignore),
            **dataclasses.asdict(self._rounding),
        }

    def _write(self, parts: Parts, outside: Mapping[str, Weight], count: int) -> None:
        """Write the whole checkpoint: the finished layers, what is outside of them, the config and the other files."""
        tensors: dict[str, Any] = dict(compress_part(self._skeleton, outside, as_host_tensor)[0])
        schemes: dict[str, Scheme] = {}
        for number in range(count):
            store = parts.store(number)
            tensors |= {name: LazyTensor(store, name) for name in store.names}
            schemes |= parts.schemes(number)
        config = copy.deepcopy(self._skeleton.module.config)
        config.quantization_config = quantization_config(self._skeleton, tensors, schemes)
        save_safetensors(self._folder, tensors)
        copy_companions(self._source.folder, self._folder, without=("config.json", "generation_config.json"))
        module = self._skeleton.module
        write_configs(self._folder, module, config, read_generation_config(self._source.folder, module))
        parts.remove()
