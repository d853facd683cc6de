"""Measure how much host memory may be taken. Does not need torch, so that a preflight can ask at no cost."""

from pathlib import Path


def available_host_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process may still take, by the machine's memory and its container's limit."""
    machine = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
    available = int(machine["MemAvailable"].split()[0]) * 1024
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        stat = (cgroup / "memory.stat").read_text(encoding="ascii")
    except OSError:
        return available
    if limit == "max":
        return available
    # Cached files count as used, but the kernel drops them when memory is needed.
    cached = int(dict(line.split(" ", 1) for line in stat.splitlines())["inactive_file"])
    return min(available, max(0, int(limit) - used + cached))
