"""A checkpoint is another one when a file changes that its answers depend on."""

from pathlib import Path

import pytest

from pipemax.checkpoint.fingerprint import fingerprint


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "vocab.txt", "merges.txt", "chat_template.jinja"]
)
def test_a_changed_file_makes_another_model(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("before")
    before = fingerprint(str(tmp_path), resolved_revision=None)
    (tmp_path / name).write_text("behind")
    assert fingerprint(str(tmp_path), resolved_revision=None) != before


@pytest.mark.parametrize(
    "name", ["README.md", "LICENSE", "LICENSE.txt", "Notice.txt", "USE_POLICY.md", ".gitattributes"]
)
def test_documentation_files_do_not_change_the_fingerprint(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = fingerprint(str(tmp_path), resolved_revision=None)
    (tmp_path / name).write_text("for people")
    assert fingerprint(str(tmp_path), resolved_revision=None) == before
