"""Mapping memory into reserved addresses, against a driver that keeps books and fails where it is told to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.errors import DeviceOutOfMemoryError
from orchestrator.memory.virtual import AddressRange, VirtualMemoryError
from orchestrator.units import MiB

OK, OUT_OF_MEMORY, INVALID = 0, 2, 1


class Code(int):
    @property
    def name(self) -> str:
        return f"CUDA_{int(self)}"


class Books:
    """The driver's functions over dictionaries; `fails` names the one that fails next, and how."""

    CUresult = SimpleNamespace(CUDA_ERROR_OUT_OF_MEMORY=OUT_OF_MEMORY)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

    def __init__(self) -> None:
        self.reserved: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.fails: dict[str, int] = {}

    def CUmemAllocationProp(self) -> Any:  # noqa: N802
        return SimpleNamespace(type=None, location=SimpleNamespace(type=None, id=None))

    def CUmemAccessDesc(self) -> Any:  # noqa: N802
        return SimpleNamespace(location=None, flags=None)

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            if code := self.fails.pop(name, OK):
                return (Code(code), None)
            return (Code(OK), getattr(self, f"do_{name}")(*arguments))

        return call

    def do_cuMemGetAllocationGranularity(self, properties: Any, option: int) -> int:  # noqa: N802
        return 2 * MiB

    def do_cuMemAddressReserve(self, size: int, *_: int) -> int:  # noqa: N802
        self.reserved[1 << 40] = size
        return 1 << 40

    def do_cuMemAddressFree(self, address: int, size: int) -> None:  # noqa: N802
        assert self.reserved.pop(address) == size

    def do_cuMemCreate(self, size: int, properties: Any, flags: int) -> int:  # noqa: N802
        handle = len(self.handles) + 1
        self.handles[handle] = size
        return handle

    def do_cuMemRelease(self, handle: int) -> None:  # noqa: N802
        del self.handles[handle]

    def do_cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:  # noqa: N802
        assert self.handles[handle] == size
        self.mapped[address] = size

    def do_cuMemSetAccess(self, address: int, size: int, access: Any, count: int) -> None:  # noqa: N802
        assert address in self.mapped

    def do_cuMemUnmap(self, address: int, size: int) -> None:  # noqa: N802
        covered = [start for start in self.mapped if address <= start < address + size]
        assert sum(self.mapped.pop(start) for start in covered) == size


def test_memory_is_mapped_piece_by_piece_and_all_given_back() -> None:
    books = Books()
    addresses = AddressRange(0, 99 * MiB, driver=books)
    assert (addresses.size, addresses.granularity, addresses.mapped_bytes) == (100 * MiB, 2 * MiB, 0)
    assert addresses.grow(1) == 2 * MiB
    assert addresses.grow(1) == 2 * MiB
    assert addresses.grow(50 * MiB) == 50 * MiB
    assert books.mapped == {1 << 40: 2 * MiB, (1 << 40) + 2 * MiB: 48 * MiB}
    assert books.handles == {}
    addresses.close()
    addresses.close()
    assert (books.mapped, books.reserved) == ({}, {})


def test_what_does_not_fit_into_the_range_is_refused() -> None:
    addresses = AddressRange(0, 4 * MiB, driver=Books())
    with pytest.raises(VirtualMemoryError, match="6291456 bytes do not fit into a range of 4194304"):
        addresses.grow(5 * MiB)
    addresses.close()
    with pytest.raises(VirtualMemoryError, match="into a range of 0"):
        addresses.grow(1)


@pytest.mark.parametrize(
    ("function", "code", "error"),
    [
        ("cuMemCreate", OUT_OF_MEMORY, DeviceOutOfMemoryError),
        ("cuMemCreate", INVALID, VirtualMemoryError),
        ("cuMemMap", INVALID, VirtualMemoryError),
        ("cuMemSetAccess", INVALID, VirtualMemoryError),
    ],
)
def test_a_failure_half_way_leaks_nothing(function: str, code: int, error: type[Exception]) -> None:
    books = Books()
    addresses = AddressRange(0, 100 * MiB, driver=books)
    addresses.grow(2 * MiB)
    books.fails[function] = code
    with pytest.raises(error, match=function):
        addresses.grow(80 * MiB)
    assert (addresses.mapped_bytes, books.handles) == (2 * MiB, {})
    assert addresses.grow(80 * MiB) == 80 * MiB
    addresses.close()
    assert (books.mapped, books.reserved) == ({}, {})


def test_addresses_that_the_driver_does_not_have() -> None:
    books = Books()
    books.fails["cuMemAddressReserve"] = INVALID
    with pytest.raises(VirtualMemoryError, match="cuMemAddressReserve: CUDA_1"):
        AddressRange(0, MiB, driver=books)
