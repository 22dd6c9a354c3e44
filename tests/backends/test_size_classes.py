"""Calls of many sizes share programs where the trace proves that padding changes no output; others are compiled for their size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from tiny_models import SIZES, save, tiny_llama_config
from torch import nn

import hfax
from hfax import AutoModelForTPU
from hfax.tracing.padding_proof import Padded, prove
from hfax.tracing.prefixes import Mask, UnprovenError

_SMALL: dict[str, Any] = {n: v for n, v in SIZES.items() if n not in ("num_key_value_heads", "eos_token_id")}
_SIZES = ((3, 5), (3, 11), (2, 19), (2, 31))
"""Rows and tokens of the calls: two classes of rows, and two of tokens."""
_CLASSES = 2
_SEQ2SEQ: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 97, "init_std": 0.2,
}  # fmt: skip
_T5: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 97}
_DEBERTA: dict[str, Any] = {
    "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False, "position_buckets": 16,
}  # fmt: skip
_MIXTURE: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
_MODERN: dict[str, Any] = {"eos_token_id": 1, "cls_token_id": 1, "sep_token_id": 1, "local_attention": 8}


def _load(folder: Path, name: str, config: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    theirs = getattr(transformers, name)(config).eval()
    return theirs, AutoModelForTPU.from_pretrained(save(folder, theirs))


def _inputs(rows: int, length: int, *, has_mask: bool, others: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, 96, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, length // 2 :] = 0
    made = {"input_ids": ids, **({"attention_mask": mask} if has_mask else {})}
    for name in others:
        made[name] = ids[:, : length // 2 + 1].clone() if name == "decoder_input_ids" else torch.zeros_like(ids)
        if name == "labels":
            made[name] = ids.where(mask == 1, -100)
    return made


def _compare(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, torch.Tensor):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
    elif isinstance(theirs, (tuple, list)):
        for a, b in zip(ours, theirs, strict=True):
            _compare(a, b)


def _check(
    ours: Any, theirs: Any, *, sizes: Any = _SIZES, has_mask: bool = True, others: tuple[str, ...] = (), **options: Any
) -> int:
    """Compare all outputs with torch's for each size; returns the number of programs."""
    for rows, length in sizes:
        given = _inputs(rows, length, has_mask=has_mask, others=others)
        with torch.no_grad():
            expected = theirs(**given, **options)
        found = ours(**given, **options)
        for name, value in expected.items():
            _compare(found[name], value)
    return len(ours.parts.programs.made)


def _config(name: str, **fields: Any) -> Any:
    return getattr(transformers, f"{name}Config")(**fields)


_PADDED = [
    ("BertModel", _config("Bert", **_SMALL), {}),
    ("BertModel", _config("Bert", **_SMALL), {"has_mask": False}),
    ("BertModel", _config("Bert", **_SMALL), {"output_hidden_states": True, "output_attentions": True}),
    ("BertForMaskedLM", _config("Bert", **_SMALL), {"others": ("labels", "token_type_ids")}),
    (
        "GPT2ForSequenceClassification",
        _config("GPT2", n_embd=32, n_layer=1, n_head=4, vocab_size=97, pad_token_id=0),
        {},
    ),
    ("LlamaForCausalLM", tiny_llama_config(), {"has_mask": False}),
    ("T5EncoderModel", _config("T5", **_T5), {}),
    ("BartModel", _config("Bart", **_SEQ2SEQ), {"others": ("decoder_input_ids",)}),
    ("ModernBertModel", _config("ModernBert", **_SMALL, **_MODERN), {}),
    ("MixtralForCausalLM", _config("Mixtral", **SIZES, num_local_experts=4), {}),
]
"""Models whose outputs do not depend on padding, and arguments of the call."""

_PADDED_TOO = [
    ("RobertaModel", _config("Roberta", **_SMALL), {}),
    ("RobertaForTokenClassification", _config("Roberta", **_SMALL), {"others": ("token_type_ids",)}),
    ("XLMRobertaForSequenceClassification", _config("XLMRoberta", **_SMALL), {}),
    ("DistilBertModel", _config("DistilBert", dim=32, n_layers=1, n_heads=4, hidden_dim=64, vocab_size=97), {}),
    ("MPNetModel", _config("MPNet", **_SMALL), {}),
    ("AlbertModel", _config("Albert", **_SMALL, embedding_size=16), {}),
    ("ElectraModel", _config("Electra", **_SMALL, embedding_size=16), {}),
    ("SqueezeBertModel", _config("SqueezeBert", **_SMALL, embedding_size=64), {}),
    ("DebertaV2Model", _config("DebertaV2", **_SMALL, **_DEBERTA), {"has_mask": False}),
    ("CLIPTextModelWithProjection", _config("CLIPText", **{**_SMALL, "eos_token_id": 96}, projection_dim=16), {}),
    ("T5ForConditionalGeneration", _config("T5", **_T5), {"others": ("decoder_input_ids",)}),
    ("GPT2LMHeadModel", _config("GPT2", n_embd=32, n_layer=1, n_head=4, vocab_size=97), {}),
    ("LlamaForCausalLM", tiny_llama_config(), {"others": ("labels",)}),
    ("Qwen3ForCausalLM", _config("Qwen3", **{**SIZES, "head_dim": 16}), {}),
    ("MistralForCausalLM", _config("Mistral", **{**SIZES, "sliding_window": 8}), {"use_cache": False}),
    (
        "DeepseekV3ForCausalLM",
        _config("DeepseekV3", **{**SIZES, "num_key_value_heads": 4}, **_MIXTURE, n_group=2, topk_group=1, **_LATENT),
        {},
    ),
    ("Glm4MoeForCausalLM", _config("Glm4Moe", **SIZES, **_MIXTURE, head_dim=8), {"has_mask": False}),
    ("Qwen3MoeForCausalLM", _config("Qwen3Moe", **SIZES, **_MIXTURE, num_experts=8), {}),
    ("PhimoeForCausalLM", _config("Phimoe", **SIZES, num_local_experts=4), {}),
    ("GptOssForCausalLM", _config("GptOss", **SIZES, num_local_experts=4, head_dim=16), {}),
]

_EXACT = [
    ("FNetModel", _config("FNet", **_SMALL), {"has_mask": False}, "fft"),
    ("DebertaV2Model", _config("DebertaV2", **_SMALL, **_DEBERTA), {}, "reduce_max reads padding"),
]
"""Models that read padding (hidden queries of DeBERTa's attend to all keys alike), and what says so."""

_EXACT_TOO = [
    (
        "FunnelModel",
        _config("Funnel", d_model=32, n_head=4, d_head=8, d_inner=64, block_sizes=[1, 1], vocab_size=97),
        {},
        "",
    ),
    ("MambaModel", _config("Mamba", hidden_size=32, num_hidden_layers=1, vocab_size=97), {}, ""),
    ("NystromformerModel", _config("Nystromformer", **_SMALL), {}, "convolution"),
    ("ConvBertModel", _config("ConvBert", **_SMALL), {}, ""),
    ("XLNetModel", _config("XLNet", d_model=32, n_layer=1, n_head=4, d_inner=64, vocab_size=97), {}, ""),
]


@pytest.mark.parametrize(("name", "config", "call"), _PADDED, ids=lambda v: v if isinstance(v, str) else "")
def test_sizes_of_a_class_share_a_program(tmp_path: Path, name: str, config: Any, call: dict[str, Any]) -> None:
    theirs, ours = _load(tmp_path, name, config)
    if call.get("output_attentions"):
        theirs.set_attn_implementation("eager")  # torch's sdpa returns none
    assert _check(ours, theirs, **call) == _CLASSES
    assert ours.why_not_padded == ()


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "config", "call"), _PADDED_TOO, ids=lambda v: v if isinstance(v, str) else "")
def test_sizes_of_a_class_share_a_program_in_more_models(
    tmp_path: Path, name: str, config: Any, call: dict[str, Any]
) -> None:
    test_sizes_of_a_class_share_a_program(tmp_path, name, config, call)


@pytest.mark.parametrize(("name", "config", "call", "why"), _EXACT, ids=lambda v: v if isinstance(v, str) else "")
def test_a_model_that_reads_padding_has_a_program_for_each_size(
    tmp_path: Path, name: str, config: Any, call: dict[str, Any], why: str
) -> None:
    theirs, ours = _load(tmp_path, name, config)
    assert _check(ours, theirs, **call) == len(_SIZES)
    assert why in ours.why_not_padded[0]


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "config", "call", "why"), _EXACT_TOO, ids=lambda v: v if isinstance(v, str) else "")
def test_more_models_that_read_padding_have_a_program_for_each_size(
    tmp_path: Path, name: str, config: Any, call: dict[str, Any], why: str
) -> None:
    test_a_model_that_reads_padding_has_a_program_for_each_size(tmp_path, name, config, call, why)


class _Pooled(transformers.BertModel):
    """A mean over all positions, of whatever is there."""

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:  # type: ignore[override]
        return {"mean": super().forward(input_ids, attention_mask=attention_mask).last_hidden_state.mean(1)}


class _Unmasked(transformers.BertModel):
    """Attention that ignores its mask."""

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:  # type: ignore[override]
        return {
            "last": super().forward(input_ids, attention_mask=None).last_hidden_state + 0 * attention_mask[..., None]
        }


class _Divided(transformers.BertModel):
    """A masked sum over the number of positions, not of tokens: no derivative by padding shows it."""

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:  # type: ignore[override]
        hidden = super().forward(input_ids, attention_mask=attention_mask).last_hidden_state
        return {"mean": (hidden * attention_mask[..., None]).sum(1) / input_ids.shape[1]}


class _Normed(transformers.BertModel):
    """A norm over the rows of the batch."""

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:  # type: ignore[override]
        hidden = super().forward(input_ids, attention_mask=attention_mask).last_hidden_state
        return {"last": nn.functional.layer_norm(hidden[:, 0].T, (len(hidden),)).T}


class _Last(transformers.BertModel):
    """The last position, padding or not."""

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:  # type: ignore[override]
        return {"last": super().forward(input_ids, attention_mask=attention_mask).last_hidden_state[:, -1]}


class _Masked(transformers.BertModel):
    """A mean over tokens, which padding does not change."""

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:  # type: ignore[override]
        hidden = super().forward(input_ids, attention_mask=attention_mask).last_hidden_state
        return {"mean": (hidden * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)}


class _Pairs(transformers.BertModel):
    """Pairs of numbers stacked, and written to parts of an axis without padding, with and without steps."""

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:  # type: ignore[override]
        hidden = super().forward(input_ids, attention_mask=attention_mask).last_hidden_state
        rotated = torch.stack([-hidden[..., 1::2], hidden[..., ::2]], dim=-1).flatten(-2)
        rotated[..., 1:20:3] = hidden[..., :7]
        rotated[..., 30:] = 2 * rotated[..., 30:]
        return {"last": rotated}


class _Written(transformers.BertModel):
    """A write to all tokens but the last, padding or not."""

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:  # type: ignore[override]
        hidden = super().forward(input_ids, attention_mask=attention_mask).last_hidden_state.clone()
        hidden[:, :-1] = 0
        return {"last": hidden}


class _Placed(transformers.BertModel):
    """Features in the places of some tokens of all rows, in their order."""

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:  # type: ignore[override]
        hidden = super().forward(input_ids, attention_mask=attention_mask).last_hidden_state
        features, places = self.embeddings.word_embeddings.weight, (input_ids % 3 == 1) & (attention_mask == 1)
        placed = hidden.masked_scatter(places.unsqueeze(-1).expand_as(hidden), features)
        placed[places, :] = placed[places, :] * 2
        return {"last": placed}


@pytest.mark.parametrize(
    ("cls", "is_padded"),
    [
        *[(_Pooled, False), (_Unmasked, False), (_Divided, False), (_Normed, False), (_Last, False), (_Masked, True)],
        *[(_Pairs, True), (_Written, False), (_Placed, True)],
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_a_module_of_ones_own_is_padded_only_where_it_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cls: Any, is_padded: bool
) -> None:
    monkeypatch.setenv("HFAX_PROGRAM_CACHE", "0")  # its programs have the name of BertModel's
    theirs, ours = _load(tmp_path, "BertModel", _config("Bert", **{**_SMALL, "num_hidden_layers": 1}))
    theirs.__class__ = cls
    ours.module.__class__ = cls
    assert _check(ours, theirs) == (_CLASSES if is_padded else len(_SIZES))


def test_the_doctor_says_whether_sizes_share_programs() -> None:
    assert hfax.diagnose(_config("Bert", **_SMALL)).why_not_padded is None
    assert "fft" in (hfax.diagnose(_config("FNet", **_SMALL)).why_not_padded or "")


def test_lengths_among_the_outputs_are_those_of_the_call(tmp_path: Path) -> None:
    """A layer with a window counts the tokens that it has seen, in a number that is not an array."""
    config = _config("Mistral", **SIZES, sliding_window=24)
    theirs, ours = _load(tmp_path, "MistralForCausalLM", config)
    for length in (5, 11, 9, 31):
        given = _inputs(2, length, has_mask=True)
        with torch.no_grad():
            expected = theirs(**given).past_key_values.layers[0]
        found = ours(**given).past_key_values.layers[0]
        assert type(found) is type(expected)
        assert found.cumulative_length == expected.cumulative_length == length
        _compare((found.keys, found.values), (expected.keys, expected.values))
    assert len(ours.parts.programs.made) == 2  # longer texts than the window are not proved: their last keys are kept


def test_padding_can_be_turned_off(tmp_path: Path) -> None:
    theirs, ours = _load(tmp_path, "BertModel", _config("Bert", **_SMALL))
    ours.pads_inputs = False
    assert _check(ours, theirs) == len(_SIZES)


def test_rows_that_begin_with_padding_are_compiled_for_their_size(tmp_path: Path) -> None:
    """A query that sees no key averages over all of the row, padding too."""
    theirs, ours = _load(tmp_path, "LlamaForCausalLM", tiny_llama_config())
    given = _inputs(2, 7, has_mask=True)
    given["attention_mask"] = given["attention_mask"].flip(1)
    with torch.no_grad():
        expected = theirs(**given).logits
    _compare(ours(**given).logits[:1], expected[:1])
    assert [p.name for p in ours.parts.programs.made.values()] == ["forward [2, 7], [2, 7]"]


def test_outputs_keep_the_kind_of_array(tmp_path: Path) -> None:
    _, ours = _load(tmp_path, "BertModel", _config("Bert", **_SMALL))
    found = ours(input_ids=np.full((3, 5), 7)).last_hidden_state
    assert isinstance(found, jax.Array)
    assert found.shape == (3, 5, 64)
    assert ours(input_ids=torch.full((3, 5), 7)).last_hidden_state.is_contiguous()


def test_a_proof_tells_the_axes_of_each_output() -> None:
    def program(mask: jax.Array, x: jax.Array) -> list[jax.Array]:
        return [x[:, 1:], (x * mask[..., None]).sum(1), x.reshape(-1, 4)]

    def trace(rows: int, length: int) -> Any:
        shapes = [jax.ShapeDtypeStruct((rows, length, *rest), np.float32) for rest in ((), (4,))]
        return jax.make_jaxpr(program)(*shapes)

    inputs = [
        ("mask", Padded(roles=("rows", "length"), fills=(None, Mask(0, 1)))),
        ("x", Padded(roles=("rows", "length", None), fills=(None, None, None))),
    ]
    sizes = {"rows": (2, 3), "length": (5, 8)}
    found = prove(trace(2, 5), trace(3, 8), inputs, sizes)
    assert [[[(c.role, c.size) for c in axis] for axis in output] for output in found] == [
        [[("rows", 0)], [("length", -1)], [(None, 4)]],
        [[("rows", 0)], [(None, 4)]],
        [[("rows", 0), ("length", 0)], [(None, 4)]],
    ]
    with pytest.raises(UnprovenError, match="reads padding"):
        prove(
            trace(2, 5),
            trace(3, 8),
            [inputs[1], inputs[1]][:0] + [(n, Padded(roles=p.roles, fills=(None,) * len(p.roles))) for n, p in inputs],
            sizes,
        )
