"""The sentence and the tables of `hfax plan`."""

from __future__ import annotations

import dataclasses

import pytest

from hfax.cli.plan_report import answer, print_plans
from hfax.planning.plan import Plan
from hfax.planning.program_time import ProgramTime

PLAN = Plan(
    model="llama", machine="v6e:1x1", num_devices=1, mesh={"tensor": 1}, dtype="bfloat16", quantization=None, stored=None,
    kv_cache_dtype="auto", batch=1, context=8192, image_size=None,
    prompt=512, weight_bytes=16_000_000_000, cache_bytes=1_000_000_000, temporary_bytes=None, memory_bytes=32_000_000_000,
    fits=True, longest_context=100_000, largest_batch=15, prefill_s=0.0084, tokens_per_s=102.4, limited_by="weights",
    times={}, collectives={}, collective_bytes={}, collectives_per_layer=None, compile_s=None, problem="",
)  # fmt: skip
SMALL = dataclasses.replace(PLAN, machine="v5e:1x1", memory_bytes=16_100_000_000, fits=False, longest_context=0)
LARGE = dataclasses.replace(PLAN, machine="v5e:2x4", num_devices=8, memory_bytes=16_100_000_000, tokens_per_s=396.0)
STEP = ProgramTime(
    seconds=5e-3, shares={"memory": 4e-3, "operations": 0.0, "communication": 0.0, "launches": 1e-3},
    parts={"model/layers/*/mlp/up_proj": 2e-3, "lm_head": 1e-3}, num_bytes=4e9, operations=1e9, sent_bytes=0, num_launches=700,
)  # fmt: skip
COMPILED = dataclasses.replace(
    PLAN,
    times={"prefill": STEP, "decode": STEP},
    temporary_bytes=500_000_000,
    collectives_per_layer=2.0,
    collective_bytes={"decode": 80_000},
    compile_s=12.0,
)


@pytest.mark.parametrize(
    ("plans", "expected"),
    [
        (
            [SMALL, PLAN, LARGE],
            "llama in bfloat16, 8,192 tokens, one sequence at a time: fits 2 of 3 machines. The smallest is v6e:1x1, where at most "
            "102 tokens/s can be written.",
        ),
        (
            [COMPILED],
            "llama in bfloat16, 8,192 tokens, one sequence at a time: fits v6e:1x1, where about 102 tokens/s can be written.",
        ),
        (
            [dataclasses.replace(PLAN, quantization="int8", tokens_per_s=None)],
            "llama in int8, 8,192 tokens, one sequence at a time: fits v6e:1x1.",
        ),
        (
            [SMALL],
            "llama in bfloat16, 8,192 tokens, one sequence at a time: fits none of these machines. v5e:1x1 comes closest: 17.0 GB "
            "are needed on each device, 16.1 GB are usable.",
        ),
    ],
)
def test_the_answer_comes_in_a_sentence(plans: list[Plan], expected: str) -> None:
    assert answer(plans) == expected


def test_columns_without_a_figure_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    print_plans([PLAN, SMALL], "Assumed.")
    text = capsys.readouterr().out
    assert "?" not in text
    assert "temporaries, GB" not in text
    assert "Nothing was compiled" in text
    print_plans([COMPILED, SMALL], "Assumed.")
    text = capsys.readouterr().out
    assert "temporaries, GB" in text
    assert "0.50" in text
    assert " - " in text
    assert "Nothing was compiled" not in text


def test_what_a_compiled_step_is_spent_on_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    print_plans([COMPILED], "Assumed.")
    text = " ".join(capsys.readouterr().out.split())
    assert "Estimated speed" in text
    assert (
        "A decoding step takes 5.00 ms: 4.00 ms of memory, 1.00 ms of launches; 700 launches. Its longest parts, in ms: "
        "model/layers/*/mlp/up_proj 2.00, lm_head 1.00." in text
    )
