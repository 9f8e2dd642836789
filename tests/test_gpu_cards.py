"""The cards of `conf/gpu`: each can be planned for, and one that is not the device here changes nothing."""

from __future__ import annotations

import pytest

from orchestrator.card import contradiction
from orchestrator.compose import compose
from orchestrator.compose.folders import ConfigFolders
from orchestrator.config import GpuSpec
from orchestrator.device.base import DeviceInfo
from orchestrator.plan.cards import alike, known_cards
from orchestrator.registry import Registry
from orchestrator.units import GiB, MiB

CARDS = known_cards(ConfigFolders.find(Registry.discover()))


def spec_of(card: str) -> GpuSpec:
    spec = compose(["device=plan", f"gpu={card}"]).config.gpu.spec
    assert spec is not None
    return spec


def test_the_cards_that_are_promised() -> None:
    promised = "a100_40g a100_80g a10g b200 h100_80g h200 l40s l4 rtx_4090"
    assert set(CARDS) == set(promised.split())


@pytest.mark.parametrize("card", CARDS)
def test_a_card_says_everything(card: str) -> None:
    spec = spec_of(card)
    config = compose([f"gpu={card}"]).config
    assert (config.gpu.util, config.gpu.index, config.gpu.total_bytes) == (0.9, 0, None)
    assert 20 * GiB < spec.total_bytes < 180 * GiB
    assert 300 * MiB < spec.context_bytes < 800 * MiB
    # torch's rule for cuBLAS: 32 MiB on Hopper and Blackwell, else 2 of 4 MiB and 8 of 16 KiB.
    major = int(spec.capability.partition(".")[0])
    assert spec.workspace_bytes == (32 * MiB if major >= 9 else 8 * MiB + 128 * 1024)
    assert (spec.attention, spec.allocator) == ("triton", "expandable")
    assert spec.measured == (card == "h200")
    assert spec.bound_fraction > spec_of("h200").bound_fraction or spec.measured


def test_cards_of_one_generation_plan_alike() -> None:
    kinds = {card: alike(spec_of(card)) for card in CARDS}
    assert kinds["h200"] == kinds["h100_80g"] != kinds["b200"]
    assert kinds["l4"] == kinds["l40s"] == kinds["a10g"] == kinds["a100_80g"] == kinds["a100_40g"] != kinds["h200"]


@pytest.mark.parametrize(
    ("device", "total_given", "said"),
    [
        (DeviceInfo("cuda", "NVIDIA H200", 150109880320, capability="9.0"), False, False),
        (DeviceInfo("cuda", "NVIDIA H200", 149000000000, capability="9.0"), False, False),
        (DeviceInfo("cuda", "NVIDIA H100 80GB HBM3", 80998 * MiB, capability="9.0"), False, True),
        (DeviceInfo("cuda", "NVIDIA H100 80GB HBM3", 80998 * MiB, capability="9.0"), True, False),
        (DeviceInfo("cuda", "NVIDIA L4", 22559 * MiB, capability="8.9"), True, True),
        (DeviceInfo("cpu", "a processor", 24 * GiB), False, True),
        (DeviceInfo("plan", "NVIDIA H200", 150109880320, capability="9.0"), False, False),
    ],
)
def test_a_card_that_is_not_the_device_is_named_once(device: DeviceInfo, total_given: bool, said: bool) -> None:
    line = contradiction(spec_of("h200"), device, total_given=total_given)
    assert (line is not None) == said
    if line is not None:
        assert "NVIDIA H200, 139.80 GiB" in line and device.name in line
    assert contradiction(None, device, total_given=total_given) is None
