"""The inputs of a verification: prompts, or random images, audio and ids, and what forward passes over them need besides.

Turns a prompt or a model into a `Call`, and calls into one padded batch or into a longer text.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from hfax.errors import UnsupportedModelError
from hfax.evaluation.reference import Inputs, as_dtype
from hfax.synthetic.inputs import make_inputs

_BESIDE_TEXT = {"pixel_values", "input_features", "input_values"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Inputs of a forward pass, and those of `generate`.

    Args:
        label: the prompt; for random inputs their names and shapes.
        forward: inputs of a forward pass.
        generate: inputs of `generate`.
    """

    label: str
    forward: Inputs
    generate: Inputs

    @property
    def num_tokens(self) -> int:
        """Length of the text; 0 without text."""
        return self.forward["input_ids"].shape[1] if "input_ids" in self.forward else 0


def beside_text(model_class: Any) -> set[str]:
    """The inputs of images and audio that a transformers class takes."""
    return _BESIDE_TEXT & set(inspect.signature(model_class.forward).parameters)


def encode(tokenizer: Any, plain: Any, prompt: str) -> Call:
    """The inputs of a prompt for a transformers model."""
    inputs = dict(tokenizer(prompt, return_tensors="pt"))
    given = {n: v for n, v in inputs.items() if n in ("input_ids", "attention_mask")}
    return Call(label=prompt, forward=_with_start(plain, given), generate=given)


def _with_start(plain: Any, inputs: Inputs) -> Inputs:
    """The inputs of an encoder-decoder with the decoder's first token."""
    if not plain.config.is_encoder_decoder or "decoder_input_ids" not in inspect.signature(plain.forward).parameters:
        return inputs
    config = getattr(plain, "generation_config", None)
    start = getattr(config, "decoder_start_token_id", None)
    start = getattr(config, "bos_token_id", None) if start is None else start
    rows = len(next(iter(inputs.values())))
    return {**inputs, "decoder_input_ids": torch.full((rows, 1), 0 if start is None else start)}


def random_call(plain: Any) -> Call:
    """Random inputs of the sizes in the model's config: two rows, with images or audio if it takes them.

    Raises:
        UnsupportedModelError: hfax has no rule for one of its inputs.
    """
    names = inspect.signature(plain.forward).parameters
    is_beside_text = {"input_ids", "pixel_values"} <= set(names) and not plain.config.is_encoder_decoder
    generates = plain.can_generate()
    mapping = "base" if not generates else "image-text-to-text" if is_beside_text else "speech-seq2seq"
    try:
        made = make_inputs(plain, mapping)
    except Exception as error:
        raise UnsupportedModelError(
            f"No random inputs can be made for {type(plain).__name__}.",
            f"{type(error).__name__}: {error}",
            "Run hfax doctor MODEL --check to compare a small copy with plain transformers.",
        ) from error
    if missing := beside_text(type(plain)) - set(made.forward):
        raise UnsupportedModelError(
            f"No random inputs can be made for {type(plain).__name__}.",
            f"hfax has no rule for {', '.join(sorted(missing))}.",
            "Run hfax doctor MODEL --check to compare a small copy with plain transformers.",
        )
    forward = {n: as_dtype(v, plain.dtype) for n, v in made.forward.items() if n != "decoder_input_ids"}
    shapes = ", ".join(f"{n} {tuple(v.shape)}" for n, v in forward.items() if isinstance(v, torch.Tensor))
    generate = {n: as_dtype(v, plain.dtype) for n, v in made.generate.items()}
    return Call(label=f"random {shapes}", forward=_with_start(plain, forward), generate=generate)


def left_padded(rows: Sequence[Inputs]) -> Inputs:
    """Prompts of different lengths as one left-padded batch."""
    width = max(row["input_ids"].shape[1] for row in rows)
    pads = [width - row["input_ids"].shape[1] for row in rows]
    ids = [torch.nn.functional.pad(row["input_ids"], (pad, 0)) for row, pad in zip(rows, pads, strict=True)]
    mask = torch.stack([(torch.arange(width) >= pad).long() for pad in pads])
    return {"input_ids": torch.cat(ids), "attention_mask": mask}


def with_positions(plain: Any, inputs: Inputs) -> Inputs:
    """Add position ids that skip padding; plain forward passes do not compute them."""
    if "position_ids" not in inspect.signature(plain.forward).parameters or plain.config.is_encoder_decoder:
        return inputs
    mask = inputs.get("attention_mask")
    if mask is None or bool(mask.all()):
        return inputs
    return {**inputs, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def extended(forward: Inputs, text: torch.Tensor) -> Inputs:
    """The inputs of a forward pass over a prompt and what was generated so far."""
    name = "decoder_input_ids" if "decoder_input_ids" in forward else "input_ids"
    if name == "decoder_input_ids" or "attention_mask" not in forward:
        return {**forward, name: text}
    mask = forward["attention_mask"]
    return {
        **forward,
        name: text,
        "attention_mask": torch.nn.functional.pad(mask, (0, text.shape[1] - mask.shape[1]), value=1),
    }
