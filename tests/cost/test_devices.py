"""The device table."""

import pytest

from megatron_adacc.cost.devices import DeviceSpec, device, device_names
from megatron_adacc.errors import UserError


def test_the_names_in_the_table():
    assert device_names() == ("v100-32gb", "a100-40gb", "a100-80gb", "h100-80gb", "h200-141gb", "rtx3090-24gb")


@pytest.mark.parametrize(
    ("name", "capability", "half_tera", "single_tera", "bandwidth_giga"),
    [
        ("v100-32gb", (7, 0), 125, 15.7, 900),
        ("a100-40gb", (8, 0), 312, 19.5, 1555),
        ("a100-80gb", (8, 0), 312, 19.5, 2039),
        ("h100-80gb", (9, 0), 989.4, 66.9, 3350),
        ("h200-141gb", (9, 0), 989.4, 66.9, 4800),
        ("rtx3090-24gb", (8, 6), 71, 35.6, 936),
    ],
)
def test_figures_of_the_datasheets(name, capability, half_tera, single_tera, bandwidth_giga):
    spec = device(name)
    assert spec.name == name
    assert spec.capability == capability
    assert spec.peak_flops["float16"] == pytest.approx(half_tera * 1e12)
    assert spec.peak_flops["float32"] == pytest.approx(single_tera * 1e12)
    assert spec.bandwidth == bandwidth_giga * 10**9


@pytest.mark.parametrize("name", device_names())
def test_every_entry_is_whole(name):
    spec = device(name)
    gigabytes = int(name.rpartition("-")[2].removesuffix("gb"))
    # Less than the name says, and not by more than ECC and the driver take.
    assert 0.98 * gigabytes <= spec.memory_bytes / 2**30 + 0.02 * gigabytes
    assert spec.memory_bytes / 2**30 < gigabytes
    assert 0.5 < spec.matmul_fraction < 1
    assert 0.5 < spec.bandwidth_fraction < 1
    assert 0.5 < spec.link_fraction < 1
    assert 0 < spec.link < spec.bandwidth
    assert 0 < spec.launch_us < 20
    assert spec.source
    # Each figure has a source: those of the table by name, fractions with "assumed" where nobody measured.
    text = " ".join(spec.source)
    assert all(word in text for word in ("peaks", "matmul_fraction", "bandwidth_fraction", "link_fraction"))


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA GeForce RTX 3090", "rtx3090-24gb"),
        ("  H100 ", "h100-80gb"),
        ("RTX_3090", "rtx3090-24gb"),
    ],
)
def test_the_name_that_cuda_reports_is_an_alias(reported, name):
    assert device(reported).name == name


def test_an_unknown_device_is_refused_with_the_known_ones():
    with pytest.raises(UserError) as caught:
        device("a100")  # 40 or 80 GB?
    assert str(caught.value) == (
        "There is no device 'a100' in the device table; there are v100-32gb, a100-40gb, a100-80gb, h100-80gb, "
        "h200-141gb, rtx3090-24gb."
    )


def test_the_cpu_is_measured_and_not_in_the_table():
    with pytest.raises(UserError, match="The device 'cpu' has no entry in the device table, because"):
        device("CPU")


def test_achievable_rates():
    spec = device("v100-32gb")
    assert isinstance(spec, DeviceSpec)
    assert spec.matmul_flops("float16") == pytest.approx(83e12)
    assert spec.matmul_flops("bfloat16") == spec.matmul_flops("float32") == pytest.approx(15.7e12 * 0.664)
    assert spec.achievable_bandwidth == pytest.approx(749.7e9)
    assert spec.achievable_link == pytest.approx(120e9)
    assert spec.memory_bytes == 34_080_565_494
