import logging

import jax
import jax.numpy as jnp
import pytest

from hfax.programs.lowered import compile_stored
from hfax.programs.program_files import program_folder
from hfax.sharding.layout import Layout


def test_functions_of_equal_text_and_other_arguments_are_stored_apart(
    tmp_path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Arguments that are not read are not in the lowered text."""
    monkeypatch.setenv("HFAX_HOME", str(tmp_path))
    layout, x = Layout.on(jax.devices("cpu")[0]), jnp.arange(3.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # compiled, then read
            for rest in ({"a": x}, {"a": x, "b": x}):
                lowered = jax.jit(lambda used, rest: used + 1).lower(x, rest)
                assert compile_stored("step", lowered, layout, None)(x, rest).tolist() == [1, 2, 3]
    assert not caplog.records
    assert len(list(program_folder().glob("*.program"))) == 2
