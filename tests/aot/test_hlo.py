"""Collectives and HBM traffic of a small program, counted by hand."""

import pytest

from experiments.benchmarks.tpu_step import cycles_by_path
from txl_jax.aot import chips, roofline
from txl_jax.aot.hlo import Program
from txl_jax.aot.traffic import (
    CROSS_SLICE,
    by_scope,
    collectives,
    first_group,
    hbm_bytes,
)

TEXT = """\
HloModule small, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%slice_one (stack: f32[5,8,128], i: s32[]) -> f32[1,8,128] {
  %stack = f32[5,8,128]{2,1,0:T(8,128)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  ROOT %one = f32[1,8,128]{2,1,0:T(8,128)} dynamic-slice(%stack, %i)
}

%put_one (stack.1: f32[5,8,128], new: f32[1,8,128], i.1: s32[]) -> f32[5,8,128] {
  %stack.1 = f32[5,8,128]{2,1,0:T(8,128)} parameter(0)
  %new = f32[1,8,128]{2,1,0:T(8,128)} parameter(1)
  %i.1 = s32[]{:T(128)} parameter(2)
  ROOT %put = f32[5,8,128]{2,1,0:T(8,128)} dynamic-update-slice(%stack.1, %new, %i.1)
}

%body (carry: (s32[], f32[5,8,128])) -> (s32[], f32[5,8,128]) {
  %carry = (s32[]{:T(128)}, f32[5,8,128]{2,1,0:T(8,128)}) parameter(0)
  %n = s32[]{:T(128)} get-tuple-element(%carry), index=0
  %all = f32[5,8,128]{2,1,0:T(8,128)} get-tuple-element(%carry), index=1
  %mine = f32[1,8,128]{2,1,0:T(8,128)} fusion(%all, %n), kind=kLoop, calls=%slice_one
  %gone = f32[1,8,128]{2,1,0:T(8,128)S(1)} all-reduce(%mine), channel_id=1, \
replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add, metadata={op_name="layers/sum"}
  %back = f32[5,8,128]{2,1,0:T(8,128)} fusion(%all, %gone, %n), kind=kLoop, \
calls=%put_one
  ROOT %out = (s32[]{:T(128)}, f32[5,8,128]{2,1,0:T(8,128)}) tuple(%n, %back)
}

%condition (carry.1: (s32[], f32[5,8,128])) -> pred[] {
  %carry.1 = (s32[]{:T(128)}, f32[5,8,128]{2,1,0:T(8,128)}) parameter(0)
  %limit = s32[]{:T(128)} constant(5)
  %at = s32[]{:T(128)} get-tuple-element(%carry.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%at, %limit), direction=LT
}

ENTRY %main (p: s32[], q: f32[5,8,128]) -> (s32[], f32[5,8,128]) {
  %p = s32[]{:T(128)} parameter(0)
  %q = f32[5,8,128]{2,1,0:T(8,128)} parameter(1)
  %begin = (s32[]{:T(128)}, f32[5,8,128]{2,1,0:T(8,128)}) tuple(%p, %q)
  ROOT %loop = (s32[]{:T(128)}, f32[5,8,128]{2,1,0:T(8,128)}) while(%begin), \
condition=%condition, body=%body
}
"""
LAYER = 4 * 8 * 128


def test_a_loops_collectives_count_as_often_as_it_runs_or_is_assumed_to() -> None:
    (result,) = collectives(Program(TEXT, {"": 2.5}))
    assert result == ("all-reduce", LAYER, (0, 1, 2, 3), 5, "layers/sum")
    text = TEXT.replace("constant(5)", "get-tuple-element(%carry.1), index=2")
    text = text.replace("body=%body\n", 'body=%body, metadata={op_name="a/layers/b"}\n')
    for assumed, times in ({}, 1), ({"embedding": 7, "/layers/": 2.5}, 2.5):
        (result,) = collectives(Program(text, assumed))
        assert result.times == times


def test_a_known_trip_count_serves_where_the_condition_is_a_fusion() -> None:
    text = TEXT.replace("compare(%at, %limit), direction=LT", "fusion(%at), calls=%lt")
    known = 'body=%body, backend_config={"known_trip_count":{"n":"6"}}\n'
    (result,) = collectives(Program(text.replace("body=%body\n", known)))
    assert result.times == 6


def test_only_the_usual_branch_of_a_conditional_counts() -> None:
    branches = "branch_computations={%skip, %body}"
    text = TEXT.replace("while(%begin)", "conditional(%begin)")
    text = text.replace("condition=%condition, body=%body", branches)
    (result,) = collectives(Program(text))
    assert result.times == 1


def test_products_of_a_library_count_without_their_workspace() -> None:
    product = '%c = (f32[4]{0}, s8[64]{0}) custom-call(%q), custom_call_target="'
    text = TEXT.replace("  %begin =", f'  {product}__cublas$lt$matmul"\n  %begin =')
    before, after = (sum(hbm_bytes(Program(x)).values()) for x in (TEXT, text))
    assert after - before == 5 * LAYER + 4 * 4


def test_what_slices_exchange_is_a_send_of_their_runtime() -> None:
    send = """\
  %token = token[] after-all()
  %sent = (f32[8,128]{1,0:T(8,128)}, u32[], token[]) send(%x, %token), channel_id=6, \
is_host_transfer=true, frontend_attributes={\
_xla_host_transfer_handler_name="xla_megascale_runtime"}
  %out_feed = (f32[8,128]{1,0}, u32[], token[]) send(%x, %token), channel_id=7, \
is_host_transfer=true
"""
    text = TEXT.replace("  %back = ", f"{send}  %back = ")
    reduced, sent = collectives(Program(text))
    assert reduced.kind == "all-reduce"
    assert (sent.kind, sent.bytes, sent.times) == (CROSS_SLICE, LAYER, 5)
    tpus = chips.find("v5e:2x4", 2)
    seconds = roofline.bounds(tpus, 0, 0, [sent], [(0, 0)])
    assert seconds["network"] == pytest.approx(5 * LAYER / 3.125e9)
    assert seconds["interconnect"] == 0


def test_estimated_cycles_count_as_often_as_loops_run() -> None:
    stated = ', backend_config={"window_config":{"estimated_cycles":"%d"}}\n'
    text = TEXT.replace("calls=%slice_one\n", "calls=%slice_one" + stated % 30)
    text = text.replace("calls=%put_one\n", "calls=%put_one" + stated % 7)
    assert cycles_by_path(Program(text)) == {"layers/sum": 5 * 30, "": 5 * 7}


def test_hbm_traffic_is_the_parts_read_and_written() -> None:
    # Each turn reads a layer and its number (4 bytes) and writes the layer for the sum,
    # which reads it and leaves its result outside of HBM; all of this is the sum's.
    # Then the result is written in place, which has no path.
    assert hbm_bytes(Program(TEXT)) == {
        "layers/sum": 5 * ((LAYER + 4 + LAYER) + LAYER),
        "": 5 * (LAYER + 4),
    }


RELAY = """\
%relay (given: f32[5,8,128]) -> f32[5,8,128] {
  %given = f32[5,8,128]{2,1,0:T(8,128)} parameter(0)
  ROOT %laid = f32[5,8,128]{2,1,0:T(4,128)} copy(%given)
}

%slice_one (stack"""
VIEW = "%view = f32[5,8,128]{2,1,0:T(4,128)} fusion(%stack), kind=kLoop, calls=%relay"


def test_a_layout_change_within_a_fusion_reads_nothing() -> None:
    text = TEXT.replace("%slice_one (stack", RELAY)
    text = text.replace("  ROOT %one = ", f"  {VIEW}\n  ROOT %one = ")
    text = text.replace("dynamic-slice(%stack", "dynamic-slice(%view")
    assert hbm_bytes(Program(text)) == hbm_bytes(Program(TEXT))


def test_hbm_traffic_is_summed_by_part_of_the_model() -> None:
    inside = "jit(train_step)/jvp(TransformerXL.nll)/TransformerXL"
    result = by_scope(
        {
            f"{inside}/TransformerXL._scan_layers/while/layers/attention/dot": 2.0,
            f"transpose({inside})/TransformerXL._scan_layers/layers/attention/x": 3.0,
            f"{inside}/TransformerXL._scan_layers/while/body/dynamic_slice": 9.0,
            "jit(train_step)/jvp(TransformerXL.nll)/embedding.nll/while/exp": 4.0,
            "jit(train_step)/optimizer/mul": 6.0,
            "": 1.0,
        }
    )
    assert list(result.items()) == [
        ("layers", 9),
        ("update", 6),
        ("attention", 5),
        ("embedding.nll", 4),
        ("unnamed", 1),
    ]


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("replica_groups={{0,2},{1,3}}, x", (0, 2)),
        ("replica_groups=[2,4]<=[8], x", (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,4]T(1,0), x", (0, 4)),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_1'}, x", (0, 1)),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}, x", (0, 2, 4, 6)),
        (
            "replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], "
            "device_ids=([2,4]T(1,0)) {'axis_0'}, x",
            (0, 1, 2, 3),
        ),
        (
            "replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) "
            "{'axis_1'}, x",
            (0, 4),
        ),
        ("source_target_pairs={{0,3},{1,2}}, x", (0, 3)),
        ("nothing", (0,)),
    ],
)
def test_the_first_group_of_devices(text: str, group: tuple[int, ...]) -> None:
    assert first_group(text) == group
