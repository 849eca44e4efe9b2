"""The peaks that utilization is measured by."""

import pytest

from txl_jax.aot.peak import known_peak, measured_peak, peak_flops


@pytest.mark.parametrize(
    ("device_kind", "teraflops"),
    [
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5", 459),
        ("TPU v6 lite", 918),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("TPU v5p", 459),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 0),
        ("Tesla T4", 65),
        ("cpu", 0),
    ],
)
def test_a_device_kind_has_its_data_sheet_s_peak(
    device_kind: str, teraflops: float
) -> None:
    assert known_peak(device_kind) == teraflops * 1e12


def test_the_devices_of_a_cpu_share_one_measured_peak() -> None:
    assert peak_flops() == measured_peak() > 1e9
