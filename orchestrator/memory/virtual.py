"""A range of device addresses that physical memory is mapped into later (CUDA's virtual memory management).

A captured graph holds addresses. With the range reserved first, a graph can be captured on a cache of which one page is
mapped, and the rest can be mapped when it is known how much there may be.
"""

from __future__ import annotations

from typing import Any

from orchestrator.errors import DeviceOutOfMemoryError, StageError


class VirtualMemoryError(StageError):
    """The driver refused a reservation or a mapping."""


class AddressRange:
    """Addresses for `size` bytes on one device; the first `mapped_bytes` of them have memory.

    Args:
        device_index: as CUDA counts the visible devices; its context must exist.
        size: rounded up to the driver's granularity.
        driver: the driver's functions, as `cuda.bindings.driver` has them; None for that.

    Raises:
        VirtualMemoryError: the driver has no such addresses.
    """

    def __init__(self, device_index: int, size: int, driver: Any = None) -> None:
        self._driver = driver or _driver()
        self._properties = self._properties_of(device_index)
        self.granularity = self._granularity()
        self.size = self.rounded(size)
        self.mapped_bytes = 0
        self.address = int(self._call("cuMemAddressReserve", self.size, 0, 0, 0))

    def rounded(self, size: int) -> int:
        """The next multiple of the granularity, 2 MiB on today's devices."""
        return -(-size // self.granularity) * self.granularity

    def grow(self, size: int) -> int:
        """Map memory until the first `size` bytes have it; the bytes mapped now in all. What is there stays.

        Raises:
            DeviceOutOfMemoryError: the device has not so much memory left. Nothing was mapped.
            VirtualMemoryError: the range is shorter, or closed, or the driver refuses.
        """
        wanted = self.rounded(size)
        if wanted > self.size or not self.address:
            raise VirtualMemoryError(f"{wanted} bytes do not fit into a range of {self.size if self.address else 0}")
        missing = wanted - self.mapped_bytes
        if missing > 0:
            self._map(self.address + self.mapped_bytes, missing)
            self.mapped_bytes = wanted
        return self.mapped_bytes

    def _map(self, address: int, size: int) -> None:
        handle = self._call("cuMemCreate", size, self._properties, 0)
        try:
            self._call("cuMemMap", address, size, 0, handle, 0)
        finally:
            # The mapping keeps the memory; without one, this gives it back.
            self._call("cuMemRelease", handle)
        try:
            self._call("cuMemSetAccess", address, size, [self._access()], 1)
        except VirtualMemoryError:
            self._call("cuMemUnmap", address, size)
            raise

    def close(self) -> None:
        """Unmap everything and give the addresses back. May be called again."""
        if not self.address:
            return
        if self.mapped_bytes:
            self._call("cuMemUnmap", self.address, self.mapped_bytes)
        self._call("cuMemAddressFree", self.address, self.size)
        self.address = self.mapped_bytes = 0

    def _properties_of(self, device_index: int) -> Any:
        driver = self._driver
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device_index
        return properties

    def _granularity(self) -> int:
        option = self._driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", self._properties, option))

    def _access(self) -> Any:
        access = self._driver.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *results = getattr(self._driver, name)(*arguments)
        if int(error) == int(self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY):
            raise DeviceOutOfMemoryError(f"{name}: the device has no memory left for {arguments[0]} bytes")
        if int(error) != 0:
            raise VirtualMemoryError(f"{name}: {error.name}")
        return results[0] if results else None


def virtual_memory_refusal(device_index: int) -> str | None:
    """Why a device cannot map memory into reserved addresses; None if it can."""
    try:
        driver = _driver()
    except ImportError:
        return "the package cuda-bindings is not installed"
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    error, supported = driver.cuDeviceGetAttribute(attribute, device_index)
    if int(error) != 0:
        return f"the driver does not say whether it can ({error.name})"
    return None if supported else "the device has no virtual memory management"


def _driver() -> Any:
    from cuda.bindings import driver

    return driver
