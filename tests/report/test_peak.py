"""Peak rates of known devices, and measured rates of others."""

import pytest

from txl_jax.report import timing as peak

# In TFLOP/s.
PEAKS = {"TPU v5 lite": 197, "TPU v5": 459, "Tesla T4": 65, "NVIDIA H100 NVL": 835}
PEAKS |= {"NVIDIA A100-SXM4-40GB": 312, "NVIDIA H100 80GB HBM3": 989}
PEAKS |= {"NVIDIA GH200 480GB": 989, "NVIDIA L40S": 0, "cpu": 0}


@pytest.mark.parametrize(("device_kind", "teraflops"), PEAKS.items())
def test_peaks_are_those_of_data_sheets(device_kind: str, teraflops: float) -> None:
    assert peak.known_peak(device_kind) == teraflops * 1e12


def test_the_devices_of_a_cpu_share_one_measured_peak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = {dtype: peak.measured_peak(dtype) for dtype in ("float32", "bfloat16")}
    monkeypatch.setattr(peak, "measured_peak", measured.get)
    for dtype, flops in measured.items():
        assert peak.peak_flops(dtype) == flops > 1e9
