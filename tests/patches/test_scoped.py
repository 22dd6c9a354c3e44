"""Replacements are in force in the tracing thread alone, and gone afterwards."""

import threading

import pytest
import torch

from hfax.patches.scoped import REPLACEMENTS, patched_transformers


def _fails() -> None:
    torch._check_tensor_all_with(ValueError, torch.tensor([False]), lambda: "values were read")


def test_a_replacement_is_in_force_inside_and_undone_outside() -> None:
    before = [getattr(torch, r.name) for r in REPLACEMENTS]
    with patched_transformers():
        _fails()
        with patched_transformers():
            _fails()
        _fails()
    assert [getattr(torch, r.name) for r in REPLACEMENTS] == before
    with pytest.raises(ValueError, match="values were read"):
        _fails()


def test_a_replacement_is_undone_when_the_block_raises() -> None:
    before = torch._check_tensor_all_with
    with pytest.raises(KeyError), patched_transformers():
        raise KeyError("inside")
    assert torch._check_tensor_all_with is before


def test_other_threads_get_the_original_while_one_traces() -> None:
    caught: list[Exception] = []

    def other() -> None:
        try:
            _fails()
        except ValueError as error:
            caught.append(error)

    with patched_transformers():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(caught) == 1
