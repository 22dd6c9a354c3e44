import torch

from hfax.patches.control_flow import collecting_checks, note_check


def test_a_check_in_a_loop_over_layers_must_hold_in_each() -> None:
    found: dict[str, torch.Tensor] = {}
    with collecting_checks(found):
        for holds in (False, True):
            note_check(torch.tensor(holds), "a condition of a layer")
    assert [bool(holds) for holds in found.values()] == [False]
