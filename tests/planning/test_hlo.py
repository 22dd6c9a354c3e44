"""Compiled HLO, read: what an instruction gives and reads, where it comes from, and the compilers' own text."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from hfax.planning import hlo
from hfax.planning.devices import topology_devices

TEXT = """\
HloModule jit_step, is_scheduled=true

FileNames
1 "/site/jax/core.py"
2 "/site/transformers/models/llama/modeling_llama.py"

FunctionNames
1 "bind"
2 "LlamaMLP.forward"

FileLocations
1 {file_name_id=2 function_name_id=2 line=164 end_line=164 column=9 end_column=9}
2 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=9 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


%fused (p0: bf16[8,16], p1: f32[16]) -> bf16[8] {
  %p0 = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(0)
  %p1 = f32[16]{0:T(128)} parameter(1)
  %convert.1 = bf16[16]{0} convert(%p1)
  ROOT %dot.1 = bf16[8]{0:T(1024)(128)(2,1)S(1)} dot(%p0, %convert.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (state: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %state = (s32[]{:T(128)}, bf16[8,16]{1,0:T(8,128)(2,1)}) parameter(0)
  %count = s32[] get-tuple-element(%state), index=0
  %weight = bf16[8,16]{1,0:T(8,128)(2,1)} get-tuple-element(%state), index=1
  ROOT %next = (s32[], bf16[8,16]{1,0}) tuple(%count, %weight)
}

%cond (state.1: (s32[], bf16[8,16])) -> pred[] {
  %state.1 = (s32[], bf16[8,16]{1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (arg.0: bf16[8,16], arg.1: f32[16]) -> bf16[8] {
  %arg.0 = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(0)
  %arg.1 = f32[16]{0:T(128)} parameter(1), metadata={op_name="x (odd)"}
  %kernel.1 = (f32[4,128]{1,0}, /*index=1*/s4[4,7]{1,0}) custom-call(%arg.0, /*index=1*/%arg.1), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
}}, metadata={op_name="jit(step)/while/body/model/layers.3/mlp/kernel/pallas_call"}
  %start = (s32[], bf16[8,16]{1,0}) tuple(%arg.0, %arg.0)
  %loop = (s32[], bf16[8,16]{1,0}) while(%start), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %fusion.1 = bf16[8]{0:T(1024)(128)(2,1)S(1)} fusion(%arg.0, %arg.1), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/while/body/model/layers.3/mlp/up_proj/dot_general" stack_frame_id=2}
}
"""  # noqa: E501


def test_instructions_of_a_program():
    program = hlo.parse(TEXT)
    entry = program.computations[program.entry]
    names = ["arg.0", "arg.1", "kernel.1", "start", "loop", "fusion.1"]
    assert [each.name for each in entry.instructions] == names
    kernel = entry.by_name["kernel.1"]
    assert [(a.dtype, a.shape, a.num_bytes) for a in kernel.arrays] == [("f32", (4, 128), 2048), ("s4", (4, 7), 14)]
    assert kernel.operands == ("arg.0", "arg.1")
    assert hlo.kernel_name(kernel) == "kernel"
    fusion = entry.root
    assert fusion.arrays[0].is_on_chip
    assert not entry.by_name["arg.0"].arrays[0].is_on_chip
    assert fusion.called == {"calls": ("fused",)}
    assert fusion.scope == "model/layers.3/mlp/up_proj/dot_general"
    assert program.source(fusion) == "modeling_llama.py:164"
    assert [line for _, _, line in program.stack(fusion)] == [7, 164]
    assert program.source(kernel) == ""
    walked = [each.name for _, each in program.walk()]
    assert walked == [*names[:5], "state.1", "more", "state", "count", "weight", "next", names[5]]
    assert "dot.1" in {each.name for each in program.instructions()}
    assert program.computations["fused"].parameters[1].name == "p1"


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("bf16", 16), ("f8e4m3fn", 8), ("s4", 4), ("pred", 8), ("f32", 32), ("token", 0), ("f4e2m1fn", 4)],
)
def test_bits_of_a_dtype(dtype, bits):
    assert hlo.bits_of(dtype) == bits


@pytest.mark.usefixtures("tpu_compiler")
def test_every_instruction_of_a_compilers_text_is_read():
    device = topology_devices("v5e:1x1")[0]
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=SingleDeviceSharding(device))

    def repeated(x):
        return jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ x).astype(y.dtype), x)

    text = jax.jit(repeated).lower(x).compile().as_text()
    program = hlo.parse(text)
    assert len(list(program.instructions())) == len(re.findall(r"^\s+(?:ROOT )?%[\w.-]+ = ", text, re.MULTILINE))
    assert {i.opcode for i in program.instructions()} & {"dot", "convolution"}
    assert any(program.source(i).startswith("test_hlo.py:") for i in program.instructions())
