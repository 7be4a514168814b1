"""What device and memory cost. Only the ratios of prices decide, so any currency will do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiercel.config import setting
from tiercel.errors import ConfigError

if TYPE_CHECKING:  # the command line reads the defaults here, and must begin fast
    from tiercel.replay.sizes import Sizes

GIB = 2**30


@dataclass(frozen=True)
class Prices:
    """Prices per hour. The defaults are of the order that clouds ask in US dollars, without a contract: for
    one H200, for memory of the machine, for its disks."""

    device: float = setting(3.5, "Price of a device for an hour, in any currency.", option="device_price")
    host_gib: float = setting(0.004, "Price of a GiB of host memory for an hour.", option="host_price")
    store_gib: float = setting(0.0001, "Price of a GiB of the store for an hour.", option="store_price")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < 1e12 or (name == "device" and not value):
                option = f"--{name.removesuffix('_gib')}-price"
                raise ConfigError(option, value, "must be a price; that of a device more than 0")

    def of_memory(self, sizes: Sizes) -> float:
        """For one hour of host and store."""
        return (sizes.host_bytes * self.host_gib + sizes.store_bytes * self.store_gib) / GIB
