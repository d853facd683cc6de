import os
import subprocess

from pipemax.node.process import pid_namespace, running_in_group


def test_the_pid_namespace_is_what_linux_links_to() -> None:
    namespace = pid_namespace()

    assert namespace is not None
    assert namespace.startswith("pid:[")
    assert namespace == pid_namespace()


def test_a_group_has_its_processes_until_they_have_ended_although_nobody_has_reaped_them() -> None:
    with subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True, process_group=0
    ) as leader:
        assert leader.stdout is not None
        child = int(leader.stdout.readline())
        assert sorted(running_in_group(leader.pid)) == sorted([leader.pid, child])
        subprocess.run(["kill", "-9", str(child)], check=True)
        os.waitid(os.P_PID, leader.pid, os.WEXITED | os.WNOWAIT)  # the shell has ended and stays a zombie
        assert running_in_group(leader.pid) == []
