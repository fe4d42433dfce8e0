"""CPU seconds of processes and of the whole machine, as Linux counts them (in steps of 10 ms)."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def family_cpu_s(pid: int) -> float:
    """CPU seconds of a process, its live descendants, and whatever else is in its process group."""
    ticks: dict[int, int] = {}
    parents: dict[int, int] = {}
    family = {pid}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            # The command's name, in parentheses, may hold anything.
            fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        own = int(entry.name)
        parents[own] = int(fields[1])
        ticks[own] = int(fields[11]) + int(fields[12])
        if int(fields[2]) == pid:
            family.add(own)
    while more := {own for own, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(ticks.get(own, 0) for own in family) / _TICKS_PER_S


def machine_cpu_s() -> float:
    """Busy CPU seconds of the machine, all processes together; what a hypervisor takes away counts as busy."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text(encoding="utf-8").split(maxsplit=9)[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S
