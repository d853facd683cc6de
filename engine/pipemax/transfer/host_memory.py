"""How much host memory there is to take. Without torch, so that a preflight can ask in no time."""

from pathlib import Path


def available_host_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """What this process may still take: the machine's available memory, or what its container leaves."""
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
    # Cached files count as used, but give way.
    cached = int(dict(line.split(" ", 1) for line in stat.splitlines())["inactive_file"])
    return min(available, max(0, int(limit) - used + cached))
