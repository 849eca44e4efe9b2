"""Collectives of a small program, counted by hand."""

from experiments.benchmarks.hlo import HloProgram, collectives

TEXT = """\
HloModule small, is_scheduled=true

%body (carry: (s32[], f32[5,8,128])) -> (s32[], f32[5,8,128]) {
  %carry = (s32[]{:T(128)}, f32[5,8,128]{2,1,0:T(8,128)}) parameter(0)
  %n = s32[]{:T(128)} get-tuple-element(%carry), index=0
  %all = f32[5,8,128]{2,1,0:T(8,128)} get-tuple-element(%carry), index=1
  %mine = f32[1,8,128]{2,1,0:T(8,128)} dynamic-slice(%all, %n)
  %gone = f32[1,8,128]{2,1,0:T(8,128)S(1)} all-reduce(%mine), channel_id=1, \
replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add, metadata={op_name="layers/sum"}
  %back = f32[5,8,128]{2,1,0:T(8,128)} dynamic-update-slice(%all, %gone, %n)
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


def test_a_loops_collectives_count_as_often_as_it_runs() -> None:
    assert collectives(HloProgram(TEXT)) == [("all-reduce", 4 * 8 * 128, 5)]
