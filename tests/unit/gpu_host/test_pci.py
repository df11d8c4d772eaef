"""PCI addresses in every form that people and programs write, and what sysfs says of a function."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_host.facts import PciFunction
from gpu_host.pci import functions_of, normalise, read_functions
from tests.doubles.host_tree import HostTree


@pytest.mark.parametrize(
    ("written", "full"),
    [
        ("41:00.0", "0000:41:00.0"),
        ("0000:41:00.0", "0000:41:00.0"),
        ("00000000:C1:00.0", "0000:c1:00.0"),
        ("0000:41:00", "0000:41:00"),
        ("41:00", "0000:41:00"),
        (" 41:1f.7\n", "0000:41:1f.7"),
        ("10000:01:00.0", "10000:01:00.0"),
    ],
)
def test_an_address_is_brought_to_the_form_of_sysfs(written: str, full: str) -> None:
    assert normalise(written) == full


@pytest.mark.parametrize(
    "text", ["", "41", "41:00.8", "41:00.0.1", "0000:41:00.", "GPU-5d7f1c2e", "10de:2230:00", "4g:00.0"]
)
def test_text_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no PCI address"):
        normalise(text)


@given(st.text(alphabet=string.hexdigits + ":.", max_size=16))
def test_what_is_normal_stays_as_it_is(text: str) -> None:
    try:
        once = normalise(text)
    except ValueError:
        return
    assert normalise(once) == once
    assert once == once.lower()


CARD = (
    PciFunction("0000:41:00.0", "030000", "10de", "2230"),
    PciFunction("0000:41:00.1", "040300", "10de", "1aef"),
    PciFunction("0000:42:00.0", "030000", "10de", "2230"),
)


def test_an_address_without_function_means_the_whole_card() -> None:
    assert functions_of("41:00", CARD) == ("0000:41:00.0", "0000:41:00.1")


def test_an_address_with_function_means_that_one() -> None:
    assert functions_of("0000:41:00.1", CARD) == ("0000:41:00.1",)


@pytest.mark.parametrize("address", ["0000:43:00", "43:00.0", "41:00.2", "none of this"])
def test_what_is_not_here_is_nothing(address: str) -> None:
    assert functions_of(address, CARD) == ()


def test_sysfs_tells_everything_of_a_function(tmp_path: Path) -> None:
    tree = HostTree(tmp_path).add_gpu("0000:41:00.0", "2230", "vfio-pci", group=13)
    gpu, audio = read_functions(tree.world)
    assert gpu == PciFunction("0000:41:00.0", "030000", "10de", "2230", "10de:1459", "vfio-pci", None, 13)
    assert (audio.address, audio.device, audio.group, audio.is_gpu) == ("0000:41:00.1", "1aef", 13, False)


def test_an_unbound_function_without_an_iommu(tmp_path: Path) -> None:
    tree = HostTree(tmp_path).add_function("0000:41:00.0", "030200", "10de", "2330", boot_vga=True)
    (gpu,) = read_functions(tree.world)
    assert (gpu.driver, gpu.group, gpu.subsystem, gpu.override, gpu.boot_vga, gpu.is_gpu) == (
        None,
        None,
        "",
        None,
        True,
        True,
    )


@pytest.mark.parametrize(("says", "means"), [("(null)\n", None), ("\n", None), ("vfio-pci\n", "vfio-pci")])
def test_the_kernels_null_is_no_override(tmp_path: Path, says: str, means: str | None) -> None:
    tree = HostTree(tmp_path).add_gpu("0000:41:00.0")
    tree.file("/sys/bus/pci/devices/0000:41:00.0/driver_override", says)
    assert read_functions(tree.world)[0].override == means
