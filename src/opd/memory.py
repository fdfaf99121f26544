"""How much memory is left on a device."""

from __future__ import annotations

import torch


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be taken: on CUDA also what torch holds and does not use, elsewhere what the system has."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    return psutil.virtual_memory().available
