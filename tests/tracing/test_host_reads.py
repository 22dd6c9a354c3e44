"""Forward passes and training steps that read values of tensors, beside torch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers
from traced import traced, traced_between_reads

import hfax
from hfax import phases
from hfax.backends.jax.forward import MOST_READS
from hfax.errors import UnsupportedModelError
from hfax.tracing.trace_tensor import ValueReadError

_NUMBERS = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
_COUNTS = np.array([2, 0, 1, 3, 0, 1])


def _written_among_other_indices(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[n > 0, 1] = torch.arange(4.0)
    return x


def _padded(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    rows = [row[: int(count)] for row, count in zip(x, n, strict=True)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


_READERS: dict[str, tuple[Callable[..., Any], int]] = {
    "a branch": (lambda x, n: -x if n.sum() > 5 else x, 1),
    "a range": (lambda x, n: torch.arange(n.max()) + x[0, 0], 1),
    "a size": (lambda x, n: torch.zeros((2, n.max())) + x[0, 0], 1),
    "a slice": (lambda x, n: x[: n.sum() - 3], 1),
    "a mask": (lambda x, n: x[n > 0] @ x.T, 1),
    "a mask among other indices": (lambda x, n: x[n > 0, 1:3], 1),
    "a mask as an index of a mask's places": (lambda x, n: x[torch.arange(6)[n > 0]], 1),
    "a selection in a function": (lambda x, n: torch.cat([x[n > 1], x[n > 2]]), 2),
    "a selection's length": (lambda x, n: x * len(x[n > 0]), 1),
    "masked_select": (lambda x, n: torch.masked_select(x, x > 0).sort().values, 1),
    "nonzero": (lambda x, n: torch.nonzero(n), 1),
    "places": (lambda x, n: torch.where(n > 0)[0] * 2, 1),
    "repeats": (lambda x, n: x.repeat_interleave(n, dim=0), 1),
    "distinct values": (lambda x, n: torch.unique(n), 1),
    "runs": (lambda x, n: torch.unique_consecutive(n > 0).int() * 2, 1),
    "a list": (lambda x, n: x[n.tolist()], 1),
    "a write of several values": (_written_among_other_indices, 1),
    "a loop": (_padded, 6),
}


@pytest.mark.parametrize("name", _READERS)
def test_values_are_read_between_programs(name: str) -> None:
    function, reads = _READERS[name]
    expected = function(torch.from_numpy(_NUMBERS), torch.from_numpy(_COUNTS))
    found, num_reads = traced_between_reads(function, _NUMBERS, _COUNTS)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6, atol=1e-6)
    assert num_reads == reads


@pytest.mark.parametrize("name", ["a branch", "a range", "a mask among other indices", "nonzero", "repeats", "runs"])
def test_values_cannot_be_read_in_one_program(name: str) -> None:
    with pytest.raises((ValueReadError, UnsupportedModelError, jax.errors.JAXTypeError)):
        traced(_READERS[name][0], _NUMBERS, _COUNTS)


def test_a_value_that_is_read_twice_is_read_once() -> None:
    found, num_reads = traced_between_reads(lambda n: n * int(n[0]) + int(n[0]), _COUNTS)
    assert num_reads == 2  # each n[0] is a tensor of its own
    assert found.tolist() == (_COUNTS * 2 + 2).tolist()

    def same(n: torch.Tensor) -> torch.Tensor:
        first = n[0]
        return n * int(first) + int(first)

    assert traced_between_reads(same, _COUNTS)[1] == 1


_CODE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput


class StretchConfig(PretrainedConfig):
    model_type = "stretch"
    hidden_size = 8
    vocab_size = 11
    num_reads = 1


class StretchModel(PreTrainedModel):
    config_class = StretchConfig

    def __init__(self, config):
        super().__init__(config)
        self.table = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.mix = torch.nn.Linear(config.hidden_size, config.hidden_size)
        self.post_init()

    def forward(self, input_ids, **kwargs):
        x = self.mix(self.table(input_ids[0]))
        for _ in range(self.config.num_reads):
            x = torch.tanh(x.repeat_interleave(input_ids[0] % 3, dim=0)) + x.mean(0)
            x = x[: len(input_ids[0])]
        return BaseModelOutput(last_hidden_state=x)
"""


@pytest.fixture
def stretching(tmp_path: Path) -> Callable[[int], tuple[Any, hfax.JaxModel]]:
    """Makes a model that repeats each token as its id says, in plain transformers and in hfax."""

    def make(num_reads: int) -> tuple[Any, hfax.JaxModel]:
        (tmp_path / "modeling_stretch.py").write_text(_CODE)
        auto_map = {"AutoConfig": "modeling_stretch.StretchConfig", "AutoModel": "modeling_stretch.StretchModel"}
        config = {"model_type": "stretch", "architectures": ["StretchModel"], "auto_map": auto_map}
        (tmp_path / "config.json").write_text(json.dumps({**config, "num_reads": num_reads}))
        settings = transformers.AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
        torch.manual_seed(0)
        plain: Any = transformers.AutoModel.from_config(settings, trust_remote_code=True)
        plain.save_pretrained(tmp_path)
        (tmp_path / "modeling_stretch.py").write_text(_CODE)
        model = hfax.AutoModelForTPU.from_pretrained(tmp_path, trust_remote_code=True)
        return plain.eval(), model

    return make


def _ids(*numbers: int) -> torch.Tensor:
    return torch.tensor([numbers])


def test_a_forward_pass_is_compiled_up_to_each_value_and_programs_are_shared(
    stretching: Callable[[int], tuple[Any, hfax.JaxModel]],
) -> None:
    plain, model = stretching(1)
    for ids, programs in [(_ids(2, 1, 5, 4), 2), (_ids(1, 2, 4, 5), 2), (_ids(1, 1, 1, 1), 3)]:
        found = model(input_ids=ids).last_hidden_state
        assert len(model.parts.programs.made) == programs
        with torch.no_grad():
            torch.testing.assert_close(found, plain(input_ids=ids).last_hidden_state)


def test_many_reads_run_operation_by_operation(stretching: Callable[[int], tuple[Any, hfax.JaxModel]]) -> None:
    plain, model = stretching(MOST_READS + 1)
    ids = _ids(2, 1, 5, 4)
    with torch.no_grad():
        expected = plain(input_ids=ids).last_hidden_state
    torch.testing.assert_close(model(input_ids=ids).last_hidden_state, expected)
    made: list[str] = []
    with phases.listen(lambda e: made.append(e.name)):
        torch.testing.assert_close(model(input_ids=ids).last_hidden_state, expected)
    assert "trace" not in made


def test_a_step_reads_before_it_is_compiled(stretching: Callable[[int], tuple[Any, hfax.JaxModel]]) -> None:
    plain, model = stretching(2)

    def loss(apply: Any, batch: Any) -> Any:
        return (apply(**batch).last_hidden_state ** 2).sum()

    step = hfax.make_train_step(model, optax.sgd(1.0), loss)
    state = step.init()
    for ids in (_ids(2, 1, 5, 4), _ids(1, 1, 4, 5)):
        before = {name: np.asarray(array) for name, array in state.params.items()}
        plain.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in before.items()})
        plain.zero_grad()
        (plain(input_ids=ids).last_hidden_state ** 2).sum().backward()
        measured = step.evaluate(state.params, {"input_ids": ids})
        state, metrics = step(state, {"input_ids": ids})
        np.testing.assert_allclose(metrics["loss"], measured["loss"], rtol=1e-6)
        for name, parameter in plain.named_parameters():
            gradient = before[name] - np.asarray(state.params[name])
            np.testing.assert_allclose(gradient, parameter.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_where_values_cannot_be_read(stretching: Callable[[int], tuple[Any, hfax.JaxModel]]) -> None:
    _, model = stretching(1)
    ids = jnp.asarray([[2, 1, 5, 4], [2, 1, 5, 4]])
    with pytest.raises(UnsupportedModelError, match="modeling_stretch"):
        jax.jit(lambda params: model.apply(params, input_ids=ids).last_hidden_state)(model.params)
    step = hfax.make_train_step(
        model,
        optax.sgd(1.0),
        lambda apply, batch: apply(**batch).last_hidden_state.sum(),
        gradient_accumulation_steps=2,
    )
    with pytest.raises(UnsupportedModelError, match="micro-batches"):
        step(step.init(), {"input_ids": ids})


def _one_more(array: Any) -> np.ndarray:
    """A count as another program might have rounded it."""
    value = np.array(array)
    return value + 1 if value.dtype.kind == "i" else value


def test_a_forward_pass_that_finds_another_value_than_was_read_runs_by_operation(
    stretching: Callable[[int], tuple[Any, hfax.JaxModel]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = stretching(1)
    ids = _ids(2, 1, 5, 4)
    with torch.no_grad():
        expected = plain(input_ids=ids).last_hidden_state
    monkeypatch.setattr("hfax.backends.jax.forward.to_host", _one_more)
    torch.testing.assert_close(model(input_ids=ids).last_hidden_state, expected)


def test_a_step_that_finds_another_value_than_was_read_changes_no_weight(
    stretching: Callable[[int], tuple[Any, hfax.JaxModel]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = stretching(1)
    step = hfax.make_train_step(model, optax.sgd(1.0), lambda apply, batch: apply(**batch).last_hidden_state.sum())
    state = step.init()
    before = {name: np.asarray(array) for name, array in state.params.items()}
    batch = {"input_ids": _ids(2, 1, 5, 4)}
    with monkeypatch.context() as changed:
        changed.setattr("hfax.train.step.to_host", _one_more)
        state, metrics = step(state, batch)
    assert not bool(metrics["is_finite"])
    assert all((before[name] == np.asarray(array)).all() for name, array in state.params.items())
    state, metrics = step(state, batch)
    assert bool(metrics["is_finite"])
    assert any((before[name] != np.asarray(array)).any() for name, array in state.params.items())
