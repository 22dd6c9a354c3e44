"""Estimated times: each instruction's bytes and operations, what runs beside each other, and what a collective sends."""

import pytest

from hfax.planning import hlo
from hfax.planning.chips import CHIPS, links_of
from hfax.planning.program_time import _GPU, _TPU, estimate

MIB = 1 << 20
V5E, H100 = CHIPS["v5e"], CHIPS["h100"]
BANDWIDTH, PEAK = V5E.bandwidth * _TPU.bandwidth, V5E.operations * _TPU.operations


def timed(*lines, machine="v5e:1x1", others="", is_loop=False):
    """The estimate of an entry computation of these lines."""
    body = "\n".join(f"  {line}" for line in lines)
    return estimate(
        hlo.parse(f"HloModule m\n\n{others}\nENTRY %main () -> f32[] {{\n{body}\n}}\n"), machine, is_loop=is_loop
    )


WEIGHT = "%w = bf16[1024,1024]{1,0} parameter(0)"
DOT = "dot(%w, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def test_a_product_takes_the_longer_of_its_bytes_and_its_operations():
    one = timed(WEIGHT, "%x = bf16[1024]{0} parameter(1)", f"ROOT %y = bf16[1024]{{0}} {DOT}")
    assert one.num_bytes == 2 * MIB + 2 * 2048
    assert one.operations == 2 * 1024**2
    assert one.shares["memory"] == pytest.approx(one.num_bytes / BANDWIDTH)
    assert (one.shares["operations"], one.shares["launches"]) == (0, _TPU.launch_s)
    assert one.seconds == pytest.approx(sum(one.shares.values()))
    assert one.limited_by == "memory"
    many = timed(WEIGHT, "%x = bf16[1024,8192]{1,0} parameter(1)", f"ROOT %y = bf16[1024,8192]{{1,0}} {DOT}")
    assert many.shares["operations"] == pytest.approx(2 * 1024**2 * 8192 / PEAK)
    assert many.limited_by == "operations"


def test_a_loop_that_the_compiler_unrolled_is_one_pass():
    lines = WEIGHT, "ROOT %y = bf16[1024,1024]{1,0} copy(%w)"
    assert timed(*lines, is_loop=True) == timed(*lines)


def test_float32_at_the_highest_precision_takes_six_products():
    lines = ["%w = f32[512,512]{1,0} parameter(0)", "%x = f32[512,512]{1,0} parameter(1)"]
    plain = timed(*lines, f"ROOT %y = f32[512,512]{{1,0}} {DOT}")
    exact = timed(*lines, f"ROOT %y = f32[512,512]{{1,0}} {DOT}, operand_precision={{highest,highest}}")
    assert exact.operations == 6 * plain.operations


@pytest.mark.parametrize(
    ("kernel", "attributes", "depth"),
    [
        ("bf16[64,128]", "dim_labels=bf_oi->bf", 128),
        ("bf16[3,3,16,64]", "window={size=3x3 stride=2x2}, dim_labels=b01f_01io->b01f", 144),
        ("bf16[4,16,128]", "window={size=4 pad=3_3 rhs_reversal=1}, dim_labels=bf0_0oi->b0f", 128),
    ],
)
def test_products_written_as_convolutions(kernel, attributes, depth):
    """A window that only spreads rows over a new dimension (padded on both sides) multiplies nothing more."""
    lines = ["%w = bf16[512,128]{1,0} parameter(0)", f"%x = {kernel}{{1,0}} parameter(1)"]
    time = timed(*lines, f"ROOT %y = f32[512,64]{{1,0}} convolution(%w, %x), {attributes}")
    assert time.operations == 2 * 512 * 64 * depth


FUSIONS = """
%row (p0: bf16[4096,1024], p1: s32[]) -> bf16[1,1024] {
  %p0 = bf16[4096,1024]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %slice = bf16[1,1024]{1,0} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={1,1024}
}

%put (q0: bf16[4096,1024], q1: bf16[1,1024], q2: s32[]) -> bf16[4096,1024] {
  %q0 = bf16[4096,1024]{1,0} parameter(0)
  %q1 = bf16[1,1024]{1,0} parameter(1)
  %q2 = s32[] parameter(2)
  ROOT %update = bf16[4096,1024]{1,0} dynamic-update-slice(%q0, %q1, %q2, %q2)
}
"""
TABLE = "%table = bf16[4096,1024]{1,0} parameter(0)", "%i = s32[] parameter(1)"


def test_a_fusion_reads_the_slice_that_it_takes_and_writes_the_part_that_it_changes():
    row = timed(*TABLE, "ROOT %y = bf16[1,1024]{1,0} fusion(%table, %i), kind=kLoop, calls=%row", others=FUSIONS)
    assert row.num_bytes == pytest.approx(2 * 2048, abs=8)
    new = "%new = bf16[1,1024]{1,0} parameter(2)"
    put = timed(
        *TABLE, new, "ROOT %y = bf16[4096,1024]{1,0} fusion(%table, %new, %i), kind=kLoop, calls=%put", others=FUSIONS
    )
    assert put.num_bytes == pytest.approx(2 * 2048, abs=8)


def test_what_is_on_chip_is_not_read_from_memory():
    weight = "%w = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} parameter(0)"
    time = timed(weight, "%x = bf16[1024]{0:S(1)} parameter(1)", f"ROOT %y = bf16[1024]{{0:S(1)}} {DOT}")
    assert time.num_bytes == 0


START = "%c = (bf16[1024,1024]{1,0:S(1)}, bf16[1024,1024]{1,0}, u32[]{:S(2)}) copy-start(%w)"
DONE = "%d = bf16[1024,1024]{1,0:S(1)} copy-done(%c)"
X = "%x = bf16[1024,4096]{1,0:S(1)} parameter(1)", "%a = bf16[1024,1024]{1,0:S(1)} parameter(2)"
BUSY = "%y = bf16[1024,4096]{1,0:S(1)} dot(%a, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def test_an_asynchronous_copy_runs_beside_what_comes_before_its_end():
    alone = timed(WEIGHT, START, DONE)
    assert alone.seconds == pytest.approx(2 * MIB / BANDWIDTH)
    busy = timed(*X, BUSY)
    beside = timed(WEIGHT, *X, START, BUSY, DONE)
    after = timed(WEIGHT, *X, START, DONE, BUSY)
    assert busy.seconds > alone.seconds
    assert beside.seconds == pytest.approx(busy.seconds)
    assert after.seconds == pytest.approx(busy.seconds + alone.seconds)


LOOP = """
%body (s: (s32[], bf16[1024,1024])) -> (s32[], bf16[1024,1024]) {{
  %s = (s32[], bf16[1024,1024]{{1,0}}) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %v = bf16[1024,1024]{{1,0}} get-tuple-element(%s), index=1
  %u = bf16[1024,1024]{{1,0}} copy(%v)
  ROOT %t = (s32[], bf16[1024,1024]{{1,0}}) tuple(%n, %u)
}}

%cond (r: (s32[], bf16[1024,1024])) -> pred[] {{
  %r = (s32[], bf16[1024,1024]{{1,0}}) parameter(0)
  ROOT %more = pred[] constant(true)
}}
"""


@pytest.mark.parametrize(("count", "is_loop", "passes"), [(7, False, 7), (None, False, 1), (None, True, 1)])
def test_loops(count, is_loop, passes):
    known = f', backend_config={{"known_trip_count":{{"n":"{count}"}}}}' if count else ""
    time = timed(
        WEIGHT,
        "%i = s32[] parameter(1)",
        "%first = bf16[1024,1024]{1,0} copy(%w)",
        "%init = (s32[], bf16[1024,1024]{1,0}) tuple(%i, %first)",
        f"ROOT %l = (s32[], bf16[1024,1024]{{1,0}}) while(%init), condition=%cond, body=%body{known}",
        others=LOOP.format(),
        is_loop=is_loop,
    )
    assert time.num_bytes == (passes + (not is_loop)) * 4 * MIB


GROUPS = "replica_groups=mesh['a'=1,'b'=8] {'b'}, to_apply=%sum"


@pytest.mark.parametrize(
    ("kind", "result", "factor"),
    [("all-reduce", "1024,1024", 2 * 7 / 8), ("all-gather", "8192,1024", 7), ("reduce-scatter", "128,1024", 7 / 8)],
)
def test_collectives_send_their_bytes_on_a_ring(kind, result, factor):
    lines = WEIGHT, f"ROOT %r = bf16[{result}]{{1,0}} {kind}(%w), {GROUPS}"
    gpus = timed(*lines, machine="h100:8")
    assert gpus.sent_bytes == pytest.approx(2 * MIB * factor)
    expected = 2 * MIB * factor / (H100.interconnect * _GPU.links) + _GPU.latency_s
    assert gpus.shares["communication"] == pytest.approx(expected)
    chips = timed(*lines, machine="v5e:2x4")
    hops = (1 + 2) * (2 if kind == "all-reduce" else 1)
    expected = 2 * MIB * factor / (V5E.interconnect / 2 * _TPU.links) + hops * _TPU.latency_s
    assert chips.shares["communication"] == pytest.approx(expected)


def test_a_sum_over_hosts_crosses_the_network_in_parts():
    line = "ROOT %r = bf16[1024,1024]{1,0} all-reduce(%w), replica_groups=[1,16]<=[16], to_apply=%sum"
    time = timed(WEIGHT, line, machine="h100:2x8")
    near, far = 2 * 7 / 8 * 2 * MIB / (H100.interconnect * 0.8), 2 * 1 / 2 * 2 * MIB / 8 / (50e9 * 0.8)
    assert time.shares["communication"] == pytest.approx(near + far + 2 * _GPU.latency_s)


def test_an_asynchronous_collective_runs_beside_other_instructions():
    start = "%s = bf16[1024,1024]{1,0} all-reduce-start(%w), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%sum"
    alone = timed(WEIGHT, start, "ROOT %e = bf16[1024,1024]{1,0} all-reduce-done(%s)", machine="h100:8")
    work = "%y = bf16[1024,1024]{1,0} copy(%w)"
    beside = timed(WEIGHT, start, *[work] * 20, "ROOT %e = bf16[1024,1024]{1,0} all-reduce-done(%s)", machine="h100:8")
    copies = timed(WEIGHT, *[work] * 20, machine="h100:8")
    assert alone.shares["communication"] > 0
    assert copies.seconds > alone.seconds
    assert beside.seconds == pytest.approx(copies.seconds)


ASYNC = """
%sum_of (s0: bf16[1024,1024]) -> bf16[1024,1024] {
  %s0 = bf16[1024,1024]{1,0} parameter(0)
  ROOT %all = bf16[1024,1024]{1,0} all-reduce(%s0), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%sum
}

%copied (c0: bf16[1024,1024]) -> bf16[1024,1024] {
  %c0 = bf16[1024,1024]{1,0} parameter(0)
  ROOT %copy = bf16[1024,1024]{1,0} copy(%c0)
}, execution_thread="sparsecore"
"""


@pytest.mark.parametrize(("kind", "called"), [("async", "calls=%sum_of"), ("call", "to_apply=%copied")])
def test_a_computation_beside_others(kind, called):
    start = f"%s = ((bf16[1024,1024]{{1,0}}), bf16[1024,1024]{{1,0}}, u32[]) {kind}-start(%w), {called}"
    done = f"ROOT %e = bf16[1024,1024]{{1,0}} {kind}-done(%s)"
    work = ["%y = bf16[1024,1024]{1,0} copy(%w)"] * 20
    alone = timed(WEIGHT, start, done, machine="h100:8", others=ASYNC)
    beside = timed(WEIGHT, start, *work, done, machine="h100:8", others=ASYNC)
    assert alone.seconds > 0
    assert beside.seconds == pytest.approx(timed(WEIGHT, *work, machine="h100:8").seconds)


def triton(name, result, operands):
    return f'ROOT %k = {result}{{1,0}} custom-call({operands}), custom_call_target="__gpu$xla.gpu.triton", backend_config={{debug = false, name = "{name}"}}'  # noqa: E501


@pytest.mark.parametrize(
    ("kernel", "lines", "num_bytes", "operations"),
    [
        (
            triton("int4_linear", "bf16[8,1024]", "%x, %v, %g"),
            ["%x = bf16[8,2048]{1,0} parameter(0)", "%v = s32[1024,256]{1,0} parameter(1)", "%g = bf16[1024,16]{1,0} parameter(2)"],
            1024 * 256 * 4 + 1024 * 16 * 2 + 8 * (2048 + 1024) * 2,
            2 * 8 * 1024 * 2048,
        ),
        (
            triton("flash_attention", "bf16[1,512,8,64]", "%q, %k0, %v0"),
            [f"%{name} = bf16[1,{heads},512,64]{{1,0}} parameter(0)" for name, heads in (("q", 8), ("k0", 2), ("v0", 2))],
            2 * (8 + 8 + 2 + 2) * 512 * 64,
            4 * 8 * 512 * 512 * 64 / 2,
        ),
        (
            triton("grouped_linear", "bf16[1,256]", "%x, %v"),
            ["%x = bf16[1,128]{1,0} parameter(0)", "%v = bf16[16,128,256]{2,1,0} parameter(1)"],
            2 * (128 * 256 + 128 + 256),  # of one row, one expert is read
            2 * 128 * 256,
        ),
        (
            triton("segment_attention", "bf16[1,512,8,64]", "%q, %k0, %v0"),
            [f"%{name} = bf16[1,{heads},512,64]{{1,0}} parameter(0)" for name, heads in (("q", 8), ("k0", 2), ("v0", 2))],
            2 * (8 + 8 + 2 + 2) * 512 * 64,
            4 * 8 * 512 * 512 * 64,
        ),
        (
            triton("decode_attention", "bf16[8,64]", "%x, %v"),
            ["%x = bf16[8,64]{1,0} parameter(0)", "%v = bf16[8,4096,64]{2,1,0} parameter(1)"],
            2 * 8 * 64 * (1 + 1 + 4096),
            0,
        ),
    ],
)  # fmt: skip
def test_kernels_count_by_their_shapes(kernel, lines, num_bytes, operations):
    time = timed(*lines, kernel, machine="h100:1")
    assert time.num_bytes == pytest.approx(num_bytes)
    assert time.operations == pytest.approx(operations)


def test_parts_of_a_model():
    def copy(name, scope):
        return f'{name} = bf16[1024,1024]{{1,0}} copy(%w), metadata={{op_name="jit(f)/{scope}"}}'

    time = timed(
        WEIGHT,
        copy("%a", "while/body/model/layers.0/mlp/up_proj/dot_general"),
        copy("%b", "transpose(jvp(model))/layers.1/mlp/up_proj/jit(linear)/mul"),
        copy("%c", "model/layers.1/shard_map/attention/add"),
        copy("ROOT %d", "add"),
    )
    each = 4 * MIB / BANDWIDTH + _TPU.launch_s
    expected = {"model/layers/*/mlp/up_proj": 2 * each, "model/layers/*/attention": each, "other": each}
    assert time.parts == pytest.approx(expected)


@pytest.mark.parametrize(
    ("machine", "share"),
    [
        ("v5e:2x2", 2 / 4),
        ("v5e:1x1", 1 / 4),
        ("v6e:16x16", 1.0),
        ("v5p:4x4x4", 1.0),
        ("v5p:2x2x1", 2 / 6),
        ("h100:8", 1.0),
    ],
)
def test_links_of_a_corner(machine, share):
    chip = CHIPS[machine.partition(":")[0]]
    assert links_of(machine).bandwidth == pytest.approx(share * chip.interconnect)


def test_a_device_reads_the_experts_that_tokens_choose():
    """Of 8 choices among 64 experts, a device with 16 of them reads 1.88 on average; its rows are padded to tiles."""
    lines = [
        "%t = s32[8]{0} parameter(0)",
        "%u = s32[1]{0} parameter(1)",
        "%x = bf16[128,256]{1,0} parameter(2)",
        "%v = bf16[16,512,256]{2,1,0} parameter(3)",
    ]
    program = hlo.parse(
        "HloModule m\n\nENTRY %main () -> f32[] {\n"
        + "\n".join(f"  {line}" for line in [*lines, triton("grouped_linear", "f32[128,512]", "%t, %u, %x, %v")])
        + "\n}\n"
    )
    found = estimate(program, "h100:4", num_experts=64).num_bytes - 128 * (256 * 2 + 512 * 4) - 9 * 4
    assert found == pytest.approx(16 * (1 - (63 / 64) ** 8) * 512 * 256 * 2)


TPU_LOOP = """
%body (s: (s32[], bf16[1024,1024])) -> (s32[], bf16[1024,1024]) {
  %s = (s32[], bf16[1024,1024]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %b = bf16[1024,1024]{1,0} get-tuple-element(%s), index=1
  %c = bf16[1024,1024]{1,0} copy(%b)
  ROOT %n = (s32[], bf16[1024,1024]{1,0}) tuple(%i, %c)
}

%cond (r: (s32[], bf16[1024,1024])) -> pred[] {
  %r = (s32[], bf16[1024,1024]{1,0}) parameter(0)
  %at = s32[] get-tuple-element(%r), index=0
  %limit = s32[] constant(24)
  %less = pred[] compare(%at, %limit), direction=LT
  ROOT %more = pred[] LAST
}
"""


@pytest.mark.parametrize(("last", "trips"), [("compare(%at, %limit), direction=LT", 24), ("and(%less, %less)", 1)])
def test_trips_of_a_loop_that_does_not_say_them(last, trips):
    time = timed(
        WEIGHT,
        "%zero = s32[] constant(0)",
        "%init = (s32[], bf16[1024,1024]{1,0}) tuple(%zero, %w)",
        "ROOT %l = (s32[], bf16[1024,1024]{1,0}) while(%init), condition=%cond, body=%body",
        others=TPU_LOOP.replace("LAST", last),
    )
    assert time.num_bytes == trips * 4 * MIB


@pytest.mark.parametrize(
    ("blocks", "has_positions", "share"), [((1, 12, 12), True, 0.5), ((1, 12, 12), False, 1), ((1, 12, 3), True, 0.25)]
)
def test_the_pairs_of_splash_attention(blocks, has_positions, share):
    """Of a causal mask half, of no mask all, of windows those of the blocks that they touch."""
    given = {"n": f"s8[{','.join(map(str, blocks))}]", "m": "s8[1,12,12]"}
    given |= dict.fromkeys(("q", "k0", "v0"), "bf16[4,1536,128]") | {"a": "s32[1536,128]", "b": "s32[8,1536]"}
    given |= {"p": "s32[1536,128]"} if has_positions else {}
    lines = [f"%{name} = {shape}{{0}} parameter(0)" for name, shape in given.items()]
    kernel = (
        f"ROOT %splash_mha_fwd.3 = bf16[4,1536,128]{{2,1,0}} custom-call({', '.join('%' + name for name in given)}), "
        'custom_call_target="tpu_custom_call"'
    )
    assert timed(*lines, kernel).operations == pytest.approx(share * 4 * 4 * 1536 * 1536 * 128)
