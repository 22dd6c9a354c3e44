"""Forward calls of many sizes with few programs: inputs are padded at the end of each axis to the end of their size class.

Decides which inputs are padded, and with what; whether that leaves the outputs as they are is proved from the model's trace
(`hfax.tracing.padding_proof`) once for each program, before it is compiled. A program on disk has been proved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from hfax.backends.jax.results import cut
from hfax.kernels.target import plainly
from hfax.programs.buckets import length_class, size_class
from hfax.tracing.geometry import GRIDS, HostArray
from hfax.tracing.padding_proof import Cuts, Padded, prove
from hfax.tracing.prefixes import Fill, Mask, UnprovenError
from hfax.tracing.structure import Node, Static, Structure, flatten, is_array
from hfax.tracing.traits import ModelTraits

if TYPE_CHECKING:
    from hfax.tracing.traced_model import TracedModel

_PER_TOKEN = {
    "input_ids": None, "inputs_embeds": 0, "attention_mask": 0, "token_type_ids": 0, "position_ids": 0, "bbox": 0,
    "special_tokens_mask": 0, "langs": 0, "mm_token_type_ids": 0,
}  # fmt: skip
"""Inputs with an entry for each token, [rows, length, …], and what pads them; None: the padding token."""
_PER_DECODER_TOKEN = {
    "decoder_input_ids": None, "decoder_inputs_embeds": 0, "decoder_attention_mask": 0, "decoder_position_ids": 0,
}  # fmt: skip
_IMAGES = frozenset(GRIDS) | frozenset(GRIDS.values())
"""Inputs that have a size class of their own (`hfax.generation.image_classes`)."""
_IGNORED = -100
Lengths = tuple[tuple[tuple[int, ...], str, int], ...]
"""Numbers in a structure that are lengths: the place of each, the role of the size, and by how much it is more than that."""
_MASKS = ("attention_mask", "decoder_attention_mask")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaddedCall:
    """A forward call with padding.

    Args:
        inputs: by name, padded.
        roles: for each array among them, the name of the size of each axis.
        fills: what pads them.
        sizes: for each role, the given and the padded size.
        proved: for each role, the sizes between which the proof compares.
        mask: `attention_mask` is the caller's ("given"), and maybe without padding ("full"); or it is the last input, not the
            caller's ("added").
    """

    inputs: dict[str, Any]
    roles: dict[str, tuple[str | None, ...]]
    fills: dict[str, int]
    sizes: dict[str, tuple[int, int]]
    proved: dict[str, tuple[int, int]]
    mask: str

    @property
    def key(self) -> tuple[Any, ...]:
        """What its program depends on besides the shapes."""
        return "padded", sorted(self.roles.items()), sorted(self.fills.items()), self.mask

    @property
    def kind(self) -> str:
        """Equal for calls of which all or none can be padded: names and options of the call."""
        return repr((flatten(self.inputs, is_array)[1], self.mask))

    def prove(self, model: TracedModel, weights: Mapping[str, Any]) -> tuple[list[Cuts], Lengths]:
        """The axes of each output, flattened, and the numbers among the outputs that are lengths.

        Raises:
            UnprovenError: an output may depend on padding.
        """
        try:
            with plainly():
                return self._prove(model, weights)
        except UnprovenError:
            raise
        except Exception as error:  # a size that the model does not take; the call itself then says so, if it fails too
            raise UnprovenError(
                f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
            ) from error

    def _prove(self, model: TracedModel, weights: Mapping[str, Any]) -> tuple[list[Cuts], Lengths]:
        names = [n for n, v in self.inputs.items() if is_array(v)]
        structures: list[Structure] = []
        abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), dict(weights))

        def trace(which: int, names: list[str]) -> Any:
            given = {n: v for n, v in self.inputs.items() if n in names or not is_array(v)}
            arrays = [self._shaped(name, which) for name in names]

            def forward(params: Any, arrays: list[jax.Array]) -> Any:
                places = dict(zip(names, arrays, strict=True))
                result = model.apply_checked(params, (), {n: places.get(n, v) for n, v in given.items()})
                outputs, structure = flatten(result, is_array)
                structures.append(structure)
                return outputs

            return jax.make_jaxpr(forward)(abstract, arrays)

        exact = trace(0, names[:-1] if self.mask == "added" else names)
        padded = trace(1, names)
        lengths = tuple(_lengths(structures[0], structures[1], self.proved))
        leaves = [(jax.tree_util.keystr(path), None) for path, _ in jax.tree_util.tree_leaves_with_path(abstract)]
        return prove(exact, padded, [*leaves, *((n, self._padding(n)) for n in names)], self.proved), lengths

    def _shaped(self, name: str, which: int) -> jax.ShapeDtypeStruct:
        """An input of the proof, without (0) or with padding (1)."""
        array = self.inputs[name]
        shape = [n if r is None else self.proved[r][which] for n, r in zip(array.shape, self.roles[name], strict=True)]
        return jax.ShapeDtypeStruct(shape, array.dtype)

    def _padding(self, name: str) -> Padded:
        roles = self.roles[name]
        is_mask = name in _MASKS
        fills: list[Fill] = [None if r is None or (is_mask and r == "rows") else self.fills[name] for r in roles]
        if is_mask:
            fills[1] = Mask(0, 1)  # see _are_on_the_right
        low = 0.0 if "ids" in name or is_mask else -np.inf
        known = None
        if self.mask != "given" and name == "attention_mask":
            exact = np.ones(self._shaped(name, 0).shape, np.int32)
            padded = np.zeros(self._shaped(name, 1).shape, np.int32)
            padded[:, : exact.shape[-1]] = 1
            known = exact, padded
        return Padded(roles=roles, fills=tuple(fills), low=low, known=known)

    def structure(self, structure: Structure, lengths: Lengths) -> Structure:
        """The outputs' structure with the lengths of the call in place of the padded program's."""
        for place, role, more in lengths:
            structure = _replaced(structure, place, Static(self.sizes[role][0] + more))
        return structure

    def cut(self, outputs: list[Any], cuts: list[Cuts]) -> list[Any]:
        """The outputs in the sizes of the call."""
        return [self._cut(a, c) for a, c in zip(outputs, cuts, strict=True)]

    def _cut(self, array: Any, cuts: Cuts) -> Any:
        whole = [c.size + (self.sizes[c.role][1] if c.role else 0) for axis in cuts for c in axis]
        kept = [c.size + (self.sizes[c.role][0] if c.role else 0) for axis in cuts for c in axis]
        if whole == kept:
            return array
        rest = iter(kept)
        shape = [int(np.prod([next(rest) for _ in axis])) for axis in cuts]
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, array.dtype)
        places = tuple(slice(n) for n in kept)
        return cut(array, lambda a: a.reshape(whole)[places].reshape(shape))


def _lengths(
    exact: Structure, padded: Structure, sizes: Mapping[str, tuple[int, int]], place: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], str, int]]:
    """The numbers that exceed a size by the same number without and with padding.

    Raises:
        UnprovenError: something else differs.
    """
    if isinstance(exact, Node) and isinstance(padded, Node):
        if (exact.cls, exact.keys, len(exact.children)) == (padded.cls, padded.keys, len(padded.children)):
            for index, (one, other) in enumerate(zip(exact.children, padded.children, strict=True)):
                yield from _lengths(one, other, sizes, (*place, index))
            return
    elif repr(exact) == repr(padded):
        return
    elif isinstance(exact, Static) and isinstance(padded, Static) and type(exact.value) is type(padded.value) is int:
        more = {role: exact.value - n for role, (n, m) in sizes.items() if exact.value - n == padded.value - m}
        if len(more) == 1:
            ((role, number),) = more.items()
            yield place, role, number
            return
    raise UnprovenError("an output has another structure with padding")


def _replaced(structure: Structure, place: tuple[int, ...], by: Structure) -> Structure:
    if not place:
        return by
    assert isinstance(structure, Node)
    children = list(structure.children)
    children[place[0]] = _replaced(children[place[0]], place[1:], by)
    return dataclasses.replace(structure, children=tuple(children))


class SizeClasses:
    """Pads the forward calls of one model.

    Args:
        pad_token_id: pads ids.
        limit: most tokens of a call; None: unbounded.
        takes_mask: forward has `attention_mask`.
        is_encoder_decoder: `labels` belong to the decoder.
    """

    def __init__(self, *, pad_token_id: int, limit: int | None, takes_mask: bool, is_encoder_decoder: bool) -> None:
        self.settings = {
            "pad_token_id": pad_token_id,
            "limit": limit,
            "takes_mask": takes_mask,
            "is_encoder_decoder": is_encoder_decoder,
        }
        """The arguments."""
        self._pad, self._limit = pad_token_id, limit
        self._takes_mask, self._is_encoder_decoder = takes_mask, is_encoder_decoder
        self.refused: dict[str, str] = {}
        """Kinds of calls that are compiled for each size, and why."""

    def calls(self, inputs: Mapping[str, Any]) -> Iterator[PaddedCall]:
        """Ways to pad a call that have not been refused: with a mask of hfax's if it has none, then without.

        Args:
            inputs: prepared inputs by name.
        """
        sizes = self._sizes(inputs)
        if sizes is None or (roles := self._roles(inputs, sizes)) is None or not _are_on_the_right(inputs):
            return
        for mask in self._masks(inputs, sizes):
            call = self._padded(inputs, roles, sizes, mask)
            if call.kind not in self.refused:
                yield call

    def _masks(self, inputs: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Where the mask may come from, see `PaddedCall`."""
        if (mask := inputs.get("attention_mask")) is None:
            return ("added", "given") if self._takes_mask and "length" in sizes else ("given",)
        is_full = not isinstance(mask, jax.ShapeDtypeStruct) and bool(np.asarray(mask).all())
        return ("given", "full") if is_full else ("given",)

    def refuse(self, call: PaddedCall, why: str) -> None:
        """Compile calls of this kind for each size from now on."""
        self.refused[call.kind] = why

    def _sizes(self, inputs: Mapping[str, Any]) -> dict[str, int] | None:
        """The sizes to pad; None if the call has other arrays than those of tokens."""
        found: dict[str, int] = {}
        for role, names in (("length", _PER_TOKEN), ("decoder_length", _PER_DECODER_TOKEN)):
            others = ["labels"] if role == "decoder_length" and self._is_encoder_decoder else []
            main = next((inputs[n] for n in [*list(names)[:2], *others] if is_array(inputs.get(n))), None)
            if main is None:
                continue
            if (
                main.ndim < 2
                or min(main.shape[0], main.shape[1] - 1) < 1
                or found.get("rows", main.shape[0]) != main.shape[0]
            ):
                return None
            found |= {"rows": main.shape[0], role: main.shape[1]}
        is_bounded = self._limit is None or all(n <= self._limit for r, n in found.items() if r != "rows")
        return found if found and is_bounded else None

    def _roles(self, inputs: Mapping[str, Any], sizes: dict[str, int]) -> dict[str, tuple[str | None, ...]] | None:
        found = {}
        of_labels = "decoder_length" if self._is_encoder_decoder else "length"
        for name, value in inputs.items():
            if isinstance(value, HostArray):
                return None
            if not is_array(value):
                if flatten(value, is_array)[0]:
                    return None
                continue
            role = "length" if name in _PER_TOKEN else "decoder_length" if name in _PER_DECODER_TOKEN else None
            role = of_labels if name == "labels" and np.dtype(value.dtype).kind == "i" else role
            if name in _IMAGES:
                found[name] = (None,) * value.ndim
                continue
            if role is None or (role not in sizes and value.ndim > 1):
                return None
            wanted = ("rows", role)[: value.ndim]
            if name == "position_ids" and value.ndim == 3:  # of several kinds, [kinds, rows, length]
                wanted = (None, *wanted)
            own = tuple(r if r and n == sizes[r] else None for r, n in zip(wanted, value.shape, strict=False))
            if (
                any(w and r is None and n != 1 for w, r, n in zip(wanted, own, value.shape, strict=False))
                or value.ndim < 1
            ):
                return None
            found[name] = (*own, *(None,) * (value.ndim - len(own)))
        return found

    def _padded(
        self,
        inputs: Mapping[str, Any],
        roles: dict[str, tuple[str | None, ...]],
        sizes: dict[str, int],
        mask: str,
    ) -> PaddedCall:
        classes = {r: size_class(n) if r == "rows" else length_class(n, self._limit) for r, n in sizes.items()}
        given = dict(inputs)
        if mask == "added":
            given["attention_mask"] = np.ones((sizes["rows"], sizes["length"]), np.int32)
            roles = {**roles, "attention_mask": ("rows", "length")}
        fills = {n: self._fill(n) for n in roles if n not in _IMAGES}
        padded = {r: (n, classes[r][1]) for r, n in sizes.items()}
        proved = {r: (max(low, 2), high) for r, (low, high) in classes.items() if r != "rows"}
        return PaddedCall(
            inputs={n: _pad(n, v, roles[n], fills[n], padded) if n in fills else v for n, v in given.items()},
            roles=roles,
            fills=fills,
            sizes=padded,
            proved={**proved, "rows": (1, 1) if padded["rows"][1] == 1 else (2, 3)},
            mask=mask,
        )

    def _fill(self, name: str) -> int:
        if name == "labels":
            return _IGNORED
        return (
            {**_PER_TOKEN, **_PER_DECODER_TOKEN}[name] if name not in ("input_ids", "decoder_input_ids") else self._pad
        )  # pyright: ignore[reportReturnType]


def size_classes_of(module: Any, traits: ModelTraits) -> SizeClasses:
    """The size classes of a transformers model's forward calls."""
    config: Any = module.config.get_text_config()
    pad, limit = getattr(config, "pad_token_id", None), getattr(config, "max_position_embeddings", None)
    return SizeClasses(
        pad_token_id=pad if isinstance(pad, int) and pad >= 0 else 0,
        limit=limit if isinstance(limit, int) and limit > 0 else None,
        takes_mask=traits.takes_attention_mask,
        is_encoder_decoder=traits.is_encoder_decoder,
    )


def _are_on_the_right(inputs: Mapping[str, Any]) -> bool:
    """Whether masks hold truth values and each row begins with a token, so that no query is left without keys."""
    for mask in (inputs.get(name) for name in _MASKS):
        if mask is None or isinstance(mask, jax.ShapeDtypeStruct):
            continue
        host = np.asarray(mask)
        if host.ndim != 2 or not host[:, 0].all() or not ((host == 0) | (host == 1)).all():
            return False
    return True


def _pad(name: str, value: Any, roles: tuple[str | None, ...], fill: int, sizes: Mapping[str, tuple[int, int]]) -> Any:
    """The array with padding; further rows of a mask have one token."""
    shape = tuple(n if r is None else sizes[r][1] for n, r in zip(value.shape, roles, strict=True))
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, value.dtype)
    host = np.asarray(value)
    if shape == host.shape:
        return host
    padded = np.full(shape, fill, host.dtype)
    padded[tuple(slice(n) for n in host.shape)] = host
    if name in _MASKS:
        padded[len(host) :, 0] = 1
    return padded
