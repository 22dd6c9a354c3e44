"""Programs of large models within their budgets: no copies of weights, no gathers for each token, few temporaries and messages."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hfax.planning.topology import CompiledProgram

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODELS = ("llama-3-8b", "llama-3-70b", "qwen3-30b-a3b", "gemma-3-12b", "deepseek-v3", "qwen2.5-vl-7b")
TPUS = {"v5e": ("v5e:1x1", "v5e:2x4"), "v6e": ("v6e:1x1", "v6e:2x4"), "tpu7x": ("tpu7x:1x1x1", "tpu7x:2x2x1")}
GPUS = "h100:1", "h100:8", "b200:1", "b200:8"


def over_budget(model, machines, folder):
    """What is over its budget, by a process of its own, since the compilers keep their memory; and the number of programs."""
    written = folder / "found.json"
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(BENCHMARKS / "budgets.py"),
        "--models",
        model,
        "--machines",
        *machines,
    ]
    done = subprocess.run([*command, "--json-file", str(written)], capture_output=True, text=True, timeout=550)
    assert written.exists(), done.stderr[-3000:]
    found = json.loads(written.read_text())
    over = [f"{row['machine']} {row['program']}: {text}" for row in found for text in row["excesses"]]
    assert done.returncode == bool(over)
    return over, len(found)


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.parametrize("model", MODELS)
def test_programs_for_gpus(model, tmp_path):
    over, count = over_budget(model, GPUS, tmp_path)
    assert over == []
    assert count == 2 * 4


@pytest.mark.tpu_compile
@pytest.mark.usefixtures("tpu_compiler")
@pytest.mark.parametrize("chip", TPUS)
@pytest.mark.parametrize("model", MODELS)
def test_programs_for_tpus(model, chip, tmp_path):
    over, count = over_budget(model, TPUS[chip], tmp_path)
    assert over == []
    assert count == 2 * 2


PROGRAM = """
HloModule m

FileNames
1 "/site/transformers/models/llama/modeling_llama.py"

FunctionNames
1 "LlamaMLP.forward"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=164 end_line=164 column=9 end_column=9}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}

%moved (p0: bf16[1024,1024]) -> bf16[1024,1024] {{
  %p0 = bf16[1024,1024]{{1,0}} parameter(0)
  ROOT %t0 = bf16[1024,1024]{{1,0}} transpose(%p0), dimensions={{1,0}}
}}

%body (s: (bf16[1024,1024], bf16[1024,1024])) -> (bf16[1024,1024], bf16[1024,1024]) {{
  %s = (bf16[1024,1024]{{1,0}}, bf16[1024,1024]{{1,0}}) parameter(0)
  %weight = bf16[1024,1024]{{1,0}} get-tuple-element(%s), index=0
  %cache = bf16[1024,1024]{{1,0}} get-tuple-element(%s), index=1
  %computed = bf16[1024,1024]{{1,0}} add(%weight, %cache)
  {inside}
  ROOT %next = (bf16[1024,1024]{{1,0}}, bf16[1024,1024]{{1,0}}) tuple(%weight, %cache)
}}

%cond (r: (bf16[1024,1024], bf16[1024,1024])) -> pred[] {{
  %r = (bf16[1024,1024]{{1,0}}, bf16[1024,1024]{{1,0}}) parameter(0)
  ROOT %more = pred[] constant(true)
}}

ENTRY %main (a: bf16[1024,1024], b: bf16[1024,1024]) -> bf16[1024,1024] {{
  %a = bf16[1024,1024]{{1,0}} parameter(0), metadata={{op_name="params['up_proj']"}}
  %b = bf16[1024,1024]{{1,0}} parameter(1), metadata={{op_name="state['cache']['keys']"}}
  {outside}
  %init = (bf16[1024,1024]{{1,0}}, bf16[1024,1024]{{1,0}}) tuple(%a, %b)
  ROOT %loop = (bf16[1024,1024]{{1,0}}, bf16[1024,1024]{{1,0}}) while(%init), condition=%cond, body=%body
}}
"""
SOURCE = 'metadata={op_name="jit(f)/while/body/model/layers.0/mlp/up_proj" stack_frame_id=1}'
COPY, MOVED = (
    "%c = bf16[1024,1024]{{1,0}} copy(%{})",
    "%c = bf16[1024,1024]{{1,0}} fusion(%{}), kind=kLoop, calls=%moved",
)
GATHER = "%g = bf16[8192,1024]{1,0} all-gather(%weight), replica_groups={{0,1,2,3,4,5,6,7}}"
SUM = "%g = bf16[1024,1024]{1,0} all-reduce(%computed), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%sum"


@pytest.mark.parametrize(
    ("inside", "outside", "received", "temporaries", "expected"),
    [
        ("", "", 0, 0, []),
        (COPY.format("weight"), "", 0, 0, ["copies 2.1 MB of params['up_proj']"]),
        (MOVED.format("cache"), "", 0, 0, ["copies 2.1 MB of state['cache']['keys']"]),
        (COPY.format("computed"), "", 0, 0, []),
        ("", COPY.format("a"), 0, 0, ["copies 2.1 MB of params['up_proj']"]),
        ("", COPY.format("b"), 0, 0, []),  # once a call
        (GATHER, "", 0, 0, ["gathers 16.8 MB for each token"]),
        (SUM, "", 2_000, 0, ["receives 0.00 MB, 0.00 are necessary; most by g"]),
        (COPY.format("computed"), "", 0, 70_000_000, ["has 70.0 MB of temporaries, 64.0 are allowed; the largest"]),
    ],
)  # fmt: skip
def test_what_is_over_a_budget(inside, outside, received, temporaries, expected, monkeypatch):
    """With the instruction and the line of modelling code."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    budgets = importlib.import_module("budgets")
    lines = {"inside": inside and f"{inside}, {SOURCE}", "outside": outside and f"{outside}, {SOURCE}"}
    nothing = {"trace_seconds": 0.0, "compile_seconds": 0.0, "argument_bytes": 0, "kernels": {}, "large_copies": ()}
    program = CompiledProgram(
        name="decode",
        temporary_bytes=temporaries,
        collectives={},
        collective_bytes=received,
        chosen=(),
        text=PROGRAM.format(**lines),
        **nothing,
    )
    found = list(budgets._excesses(program, 1_000, 64_000_000))
    assert len(found) == len(expected)
    for text, start in zip(found, expected, strict=True):
        assert text.startswith(start)
        assert "modeling_llama.py:164" in text
