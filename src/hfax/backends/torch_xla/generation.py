"""`generate` on torch_xla, as `host_loop` runs it: every step records the same program, which is compiled once.

Everything that changes from step to step is a tensor on the device: lengths, positions, the step index, pre-generated random
numbers. So all steps share one program, and another prompt in the same bucket does not recompile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from hfax.backends.torch_xla import runtime, sampling
from hfax.backends.torch_xla.cache_ops import XlaCacheOps
from hfax.errors import UnsupportedModelError, UnsupportedOptionError
from hfax.generation.generation_request import GenerationOptions, Prompts
from hfax.generation.host_loop import Progress
from hfax.generation.host_processors import HostProcessors, TextSoFar
from hfax.generation.processor_set import with_custom
from hfax.generation.sampling_config import make_sampling_spec
from hfax.kv_cache.cache import cache_arrays, make_cache
from hfax.patches import registry
from hfax.patches.masks import decoder_padding
from hfax.programs.buckets import Buckets
from hfax.tracing.encoders import EncoderOutputs, run_encoder
from hfax.tracing.traits import ModelTraits, unlike_general_loop

State = dict[str, Any]


class XlaGenerationLoop:
    """One call of `generate`: a `DecodingLoop`.

    Args:
        module: a torch module on the device.
        traits: traits of the module.
        prompts: checked and padded prompts.
        options: generation options.
        static: forward arguments that are not tensors.
        vocab_size: vocabulary size of the logits.
        buckets: how the cache capacity is rounded up.
        device: the torch_xla device.
        place: puts a tensor of the given name on the device, sharded if there are several.
        used: collects the names of the patches used.
    """

    unwatched_chunk = 16
    """Only the host notices that every sequence has ended, and to look it must wait for the device."""

    def __init__(
        self,
        module: Any,
        traits: ModelTraits,
        prompts: Prompts,
        options: GenerationOptions,
        *,
        static: Mapping[str, Any],
        vocab_size: int,
        buckets: Buckets,
        device: torch.device,
        place: Any,
        used: set[str],
    ) -> None:
        why = unlike_general_loop(module)
        if why is not None or not traits.has_usable_cache or traits.cache_argument == "state":
            raise UnsupportedModelError(
                f"generate() of the backend torch_xla does not support {type(module).__name__}.",
                why or "The model has no KV cache that this backend can use.",
                'Use backend="jax", or call the model directly.',
            )
        further = set(prompts.static) | set(prompts.inputs) - {"input_ids", "attention_mask", "position_ids"}
        if further and not traits.is_encoder_decoder:
            raise UnsupportedModelError(
                f"generate() of the backend torch_xla does not take {', '.join(sorted(further))}.",
                "For decoders, it does not support inputs that every step reads.",
                'Use backend="jax".',
            )
        if options.negative is not None:
            raise UnsupportedOptionError(
                "The backend torch_xla does not support guidance_scale.",
                "Its loop reads one text for each sequence.",
                'Pass guidance_scale=None, or use backend="jax".',
            )
        if options.cache_dtype is not None:
            raise UnsupportedOptionError(
                "The backend torch_xla does not support kv_cache_dtype.",
                "Its cache holds keys and values in the model's own dtype.",
                'Leave it out, or use backend="jax".',
            )
        self.module, self.traits, self.prompts, self.options = module, traits, prompts, options
        self.static, self.device, self.used = dict(static), device, used
        self.place = place
        self.repeats = options.config.num_return_sequences or 1
        self.spec, values = make_sampling_spec(
            options.config,
            vocab_size=vocab_size,
            prompt_length=prompts.padded_length,
            max_new_tokens=options.max_new_tokens,
            **options.extra_sampling,
        )
        self.vocab_size = vocab_size
        self.capacity = buckets.capacity(*prompts.padded_shape, prompts.padded_length + options.max_new_tokens)
        sampling.check_custom(options.custom)
        self.spec, values = with_custom(
            self.spec,
            values,
            options.custom,
            prompts=prompts.num_padded_rows,
            sequences=self.repeats,
            capacity=self.capacity,
            vocab_size=vocab_size,
            prompt_length=prompts.padded_length,
            max_new_tokens=options.max_new_tokens,
        )
        sampling.check_supported(self.spec)
        self.values: dict[str, Any] = {name: self._put(value) for name, value in values.items() if name != "custom"}
        self.values["custom"] = [{n: self._put(v) for n, v in held.items()} for held in values.get("custom", ())]
        self.host = None
        if options.custom.waits_for_host:
            text = TextSoFar(prompts.given, prompts.padded_length, self.repeats)
            self.host = HostProcessors(options.custom, text, self.repeats, vocab_size)
            self.unwatched_chunk = 1
        self.eos = self._put(np.asarray(options.eos_token_ids or (-1,), np.int64))
        self.pad = self._put(np.int64(options.pad_token_id))

    def _put(self, array: Any, name: str = "") -> Any:
        tensor = torch.as_tensor(np.asarray(array))
        if tensor.dtype in (torch.int32, torch.uint32):
            tensor = tensor.long()
        return self.place(tensor, name)

    def agree(self, value: Any) -> Any:
        """Implements `DecodingLoop`: one process drives all devices."""
        return value

    def read(self, state: State) -> Progress:
        """Implements `DecodingLoop`."""
        return Progress(
            num_steps=state["num_steps"],
            tokens=state["tokens"].cpu().numpy(),
            finished=state["finished"].cpu().numpy(),
        )

    def with_finished(self, state: State, finished: np.ndarray) -> State:
        """Implements `DecodingLoop`."""
        return state | {"finished": self._put(finished)}

    def record(self, state: State, name: str) -> np.ndarray | None:
        """Implements `DecodingLoop`."""
        return np.stack([kept[name] for kept in state["records"]]) if name in self.options.keep else None

    def start(self, inputs: Mapping[str, Any]) -> State:
        """Prefill the prompts and sample the first tokens."""
        traits, inputs = self.traits, {n: self._put(a, n) for n, a in inputs.items()}
        seq2seq = traits.is_encoder_decoder
        ids = inputs["decoder_input_ids" if seq2seq else "input_ids"]
        mask = inputs.get("attention_mask")
        prompt_mask = torch.ones_like(ids) if seq2seq else mask
        assert prompt_mask is not None
        if traits.takes_position_ids and not seq2seq and "position_ids" not in inputs:
            inputs["position_ids"] = (prompt_mask.cumsum(dim=1) - 1).clamp(min=0)
        positions = prompt_mask.sum(dim=1)
        if "position_ids" in inputs:
            positions = torch.movedim(inputs["position_ids"][..., -1], -1, 0) + 1
        arguments = dict(inputs)
        if not traits.takes_attention_mask:
            arguments.pop("attention_mask", None)
        with self._patched():
            encoded: dict[str, Any] = {}
            if seq2seq:
                outputs, arguments = run_encoder(self.module, arguments)
                encoded = {f"encoder.{n}": t for n, t in outputs.items() if isinstance(t, torch.Tensor)}
                arguments["encoder_outputs"] = outputs
            cache = self._cache(prompt_length=ids.shape[1])
            keep = {"logits_to_keep": 1} if traits.takes_logits_to_keep and ids.shape[1] > 1 else {}
            out = self.module(**arguments, **self.static, **self._with_cache(cache), **keep)
        logits = out.logits[:, -1].float()
        arrays = self._collect(cache) | encoded
        full = torch.nn.functional.pad(ids, (0, self.capacity - ids.shape[1]))
        if not seq2seq:
            mask = torch.nn.functional.pad(prompt_mask, (0, self.capacity - ids.shape[1]), value=1)
        rows = np.arange(self.prompts.num_padded_rows) >= len(self.prompts.given)
        state: State = {
            "tokens": full,
            "positions": positions,
            "finished": self._put(rows),
            "mask": mask,
            "cache": arrays,
        }
        if self.repeats > 1:
            again = lambda t: t.repeat_interleave(self.repeats, dim=0)  # noqa: E731
            state["cache"] = {name: again(tensor) for name, tensor in arrays.items()}
            for name in ("tokens", "positions", "finished", "mask"):
                state[name] = None if state[name] is None else again(state[name])
            logits, ids, prompt_mask = again(logits), again(ids), again(prompt_mask)
        first = prompt_mask.argmax(dim=1)
        state |= {
            "length": self._put(np.int64(ids.shape[1])),
            "step": self._put(np.int64(0)),
            "num_steps": 0,  # the same on the host, which it can read without waiting for the device
            "first": first,
            "prompt_lengths": ids.shape[1] - first,
            "memory": sampling.remember(self.spec, self.vocab_size, ids, prompt_mask),
            "records": [],
        }
        if self.spec.do_sample:
            steps = (
                -(-self.options.max_new_tokens // 128) * 128
            )  # rounded up to a bucket, so that lengths share programs
            numbers = sampling.uniform_numbers(self.options.seed, ids.shape[0], steps)
            state["uniform"] = self._put(numbers)
        state = self._draw(state, logits)
        runtime.sync()
        return state

    def advance(self, state: State, limit: int) -> State:
        """Generate tokens until `limit` exist."""
        while state["num_steps"] < limit:
            state = self._draw(*self._step(state))
            runtime.sync()
        return state

    def _step(self, state: State) -> tuple[State, Any]:
        """The state with the last token added to the cache, and the next logits."""
        traits, length = self.traits, state["length"]
        tokens = state["tokens"].index_select(1, length.reshape(1))
        index = torch.arange(self.capacity, device=self.device)
        is_written = (index <= length).long()
        inputs: dict[str, Any] = {}
        if traits.is_encoder_decoder:
            inputs["decoder_input_ids"] = tokens
            if state.get("mask") is not None:
                inputs["attention_mask"] = state["mask"]
            if traits.takes_decoder_mask:
                inputs["decoder_attention_mask"] = is_written[None].expand(tokens.shape[0], -1)
        else:
            inputs["input_ids"] = tokens
            if traits.takes_position_ids:
                inputs["position_ids"] = torch.movedim(state["positions"], 0, -1)[..., None]
            if traits.takes_attention_mask and not traits.has_recurrent_layers:
                inputs["attention_mask"] = state["mask"] * is_written
        held = {n: t for n, t in state["cache"].items() if not n.startswith("encoder.")}
        encoder = {n.removeprefix("encoder."): t for n, t in state["cache"].items() if n.startswith("encoder.")}
        padding = None if traits.is_encoder_decoder else state["mask"]
        with self._patched(), decoder_padding(padding):
            cache = self._cache(length=length, arrays=held)
            if encoder:
                inputs["encoder_outputs"] = EncoderOutputs(encoder)
            out = self.module(**inputs, **self.static, **self._with_cache(cache))
        changed = {
            "cache": state["cache"] | self._collect(cache),
            "length": length + 1,
            "positions": state["positions"] + 1,
        }
        return state | changed, out.logits[:, -1].float()

    def _draw(self, state: State, logits: Any) -> State:
        """Choose the next token of every sequence, and append it after the cached ones."""
        step = state["step"]
        at = {
            "tokens": state["tokens"],
            "step": step,
            "end": state["length"],
            "first": state["first"],
            "lengths": state["prompt_lengths"] + step,
            "prompt_lengths": state["prompt_lengths"],
            **state["memory"],
        }
        if self.host is not None:
            tokens = state["tokens"].cpu().numpy()
            found = self.host.values(tokens, state["num_steps"], len(tokens))
            self.values |= {name: self._put(array) for name, array in found.items()}
        scores = sampling.penalize(self.spec, self.values, at, logits)
        scores = scores if self.host is None or not self.spec.visits_host else self._on_host(state, scores)
        scores = sampling.warp(self.spec, self.values, at, scores)
        uniform = state["uniform"].index_select(1, step.reshape(1))[:, 0] if "uniform" in state else None
        token = torch.where(state["finished"], self.pad, sampling.choose(self.spec, scores, uniform))
        if self.options.keep:
            chosen = torch.log_softmax(logits, dim=-1).gather(1, token[:, None])[:, 0]
            records = {"scores": scores, "logits": logits, "log_probs": chosen}
            # moved off the device at once: tensors left there would change the program of the next step
            runtime.sync()
            state["records"].append({name: records[name].cpu().numpy() for name in self.options.keep})
        return state | {
            "tokens": state["tokens"].index_copy(1, state["length"].reshape(1), token[:, None]),
            "memory": sampling.remember_drawn(state["memory"], token),
            "finished": state["finished"] | (token[:, None] == self.eos[None]).any(dim=1),
            "step": step + 1,
            "num_steps": state["num_steps"] + 1,
        }

    def _on_host(self, state: State, scores: Any) -> Any:
        """The scores after the caller's processors."""
        assert self.host is not None
        runtime.sync()
        tokens = state["tokens"].cpu().numpy()
        return self._put(self.host.process(tokens, state["num_steps"], scores.cpu().numpy()))

    def _cache(self, **given: Any) -> Any:
        return make_cache(
            self.module.config, XlaCacheOps(), self.capacity, has_encoder=self.traits.is_encoder_decoder, **given
        )

    def _collect(self, cache: Any) -> dict[str, Any]:
        assert isinstance(cache, Cache) or hasattr(cache, "self_attention_cache")
        return {name: self.place(tensor, f"cache.{name}") for name, tensor in cache_arrays(cache).items()}

    def _with_cache(self, cache: Any) -> dict[str, Any]:
        assert self.traits.cache_argument is not None
        return {self.traits.cache_argument: cache, "use_cache": True, "return_dict": True}

    def _patched(self) -> Any:
        return patched(self.module, self.used)


@contextlib.contextmanager
def patched(module: Any, used: set[str]) -> Iterator[None]:
    """Apply the backend's patches and disable gradients; `used` collects the names of the patches used."""
    with registry.patched(module, "torch_xla") as ran, torch.no_grad():
        try:
            yield
        finally:
            used |= ran
