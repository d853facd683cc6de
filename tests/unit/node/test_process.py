from pipemax.node.process import pid_namespace


def test_the_pid_namespace_is_what_linux_links_to() -> None:
    namespace = pid_namespace()

    assert namespace is not None
    assert namespace.startswith("pid:[")
    assert namespace == pid_namespace()
