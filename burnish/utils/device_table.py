"""What GPUs can do, by the vendors' data sheets: the ceilings that utilisation and step times are measured against."""

from dataclasses import dataclass

# The shares of the ceilings that burnish reaches where nothing is wrong. Of matrix products in updates and passes: what
# docs/performance.md has for half a billion parameters (larger models reach more). Of the memory's traffic while decoding: what
# its table of the rollout engine has for many sequences at once.
UPDATE_EFFICIENCY = 0.4
PASS_EFFICIENCY = 0.45
DECODE_EFFICIENCY = 0.5


@dataclass(frozen=True, slots=True)
class DeviceCeilings:
    """One kind of GPU.

    Attributes:
        name: the part of the device's name by which it is known.
        memory_gib: what PyTorch sees of it, about half a GiB less than is printed on it.
        bf16_flops: dense operations per second of the matrix units in bfloat16.
        bandwidth: bytes per second of its memory.
    """

    name: str
    memory_gib: float
    bf16_flops: float
    bandwidth: float


# NVIDIA's data sheets of each product (dense figures, without sparsity). The first whose name is part of the device's counts.
DEVICES = (
    DeviceCeilings("H100 PCIe", 79.1, 756e12, 2.0e12),
    DeviceCeilings("H100 NVL", 93.1, 835e12, 3.9e12),
    DeviceCeilings("H100", 79.1, 989e12, 3.35e12),
    DeviceCeilings("H200", 139.8, 989e12, 4.8e12),
    DeviceCeilings("B200", 178.4, 2250e12, 8.0e12),
    DeviceCeilings("A100-PCIE-40GB", 39.4, 312e12, 1.555e12),
    DeviceCeilings("A100-SXM4-40GB", 39.4, 312e12, 1.555e12),
    DeviceCeilings("A100 40GB", 39.4, 312e12, 1.555e12),
    DeviceCeilings("A100", 79.1, 312e12, 2.039e12),
    DeviceCeilings("L40S", 44.4, 362e12, 0.864e12),
    DeviceCeilings("A10G", 22.1, 70e12, 0.6e12),
    DeviceCeilings("L4", 22.0, 121e12, 0.3e12),
    DeviceCeilings("RTX 4090", 23.6, 165e12, 1.008e12),
)


def find_device(name: str) -> DeviceCeilings | None:
    """The entry for a device called ``name``, as PyTorch or a person calls it; None where there is none."""
    wanted = "".join(name.lower().split())
    for device in DEVICES:
        if "".join(device.name.lower().split()) in wanted:
            return device
    return None
