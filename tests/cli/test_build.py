"""`kcpgen build`: all or nothing, never over somebody's files, and a check that compares the whole set."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from kcpgen.emit.package import files_on_disk

Command = Callable[..., Result]


def tree(directory: Path) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in files_on_disk(directory).items()}


@pytest.fixture
def built(project: Path, kcpgen: Command) -> Path:
    assert kcpgen("build", "my.kcp").exit_code == 0
    return project / "generated" / "my"


def test_build_writes_a_package_and_says_so(project: Path, kcpgen: Command) -> None:
    result = kcpgen("build", "my.kcp")
    assert result.stdout.startswith("my.kcp -> generated/my: ")
    assert {"__init__.py", "naive.py", "eager.py", "interface.py"} <= set(tree(project / "generated" / "my"))
    assert os.listdir(project / "generated") == ["my"]


def test_building_again_changes_nothing(built: Path, kcpgen: Command) -> None:
    before = (tree(built), (built / "naive.py").stat().st_mtime_ns)
    assert "unchanged" in kcpgen("build", "my.kcp").stdout
    assert (tree(built), (built / "naive.py").stat().st_mtime_ns) == before


def test_bytes_depend_on_neither_the_working_directory_nor_how_paths_are_written(
    built: Path, project: Path, kcpgen: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    result = kcpgen("build", "--check", str(project / "my.kcp"), "-o", str(project / "generated"))
    assert result.exit_code == 0, result.output


def test_check_accepts_what_build_wrote(built: Path, kcpgen: Command) -> None:
    result = kcpgen("build", "--check", "my.kcp")
    assert (result.exit_code, result.stdout) == (0, "generated: 1 package as generated\n")


def test_check_shows_a_changed_file_and_the_command_that_fixes_it(built: Path, kcpgen: Command) -> None:
    path = built / "naive.py"
    path.write_text(
        path.read_text(encoding="utf-8").replace("import torch\n", "import torch  # mine\n"), encoding="utf-8"
    )
    result = kcpgen("build", "--check", "my.kcp")
    assert result.exit_code == 1
    assert "-import torch  # mine\n+import torch\n" in result.stdout
    assert result.stdout.endswith("not as generated; fix with: kcpgen build my.kcp\n")
    assert kcpgen("build", "my.kcp").exit_code == 0
    assert kcpgen("build", "--check", "my.kcp").exit_code == 0


def test_check_compares_the_set_of_files(built: Path, kcpgen: Command) -> None:
    (built / "naive.py").rename(built / "older.py")
    result = kcpgen("build", "--check", "my.kcp")
    assert result.exit_code == 1
    assert "generated/my/naive.py: missing" in result.stdout
    assert "generated/my/older.py: extra" in result.stdout


def test_check_finds_a_package_whose_spec_is_gone(built: Path, project: Path, kcpgen: Command) -> None:
    other = (project / "my.kcp").read_text(encoding="utf-8").replace("op my", "op other")
    (project / "other.kcp").write_text(other, encoding="utf-8")
    assert kcpgen("build", "other.kcp").exit_code == 0
    (project / "other.kcp").unlink()
    result = kcpgen("build", "--check", "my.kcp")
    assert result.exit_code == 1
    assert "rm -r generated/other" in result.stdout


def test_check_writes_nothing(project: Path, kcpgen: Command) -> None:
    result = kcpgen("build", "--check", "my.kcp")
    assert result.exit_code == 1
    *files, fix = result.stdout.splitlines()
    assert "generated/my/naive.py: missing" in files
    assert all(line.endswith(": missing") for line in files)
    assert fix == "not as generated; fix with: kcpgen build my.kcp"
    assert os.listdir(project) == ["my.kcp"]


def test_one_wrong_spec_and_nothing_is_written(project: Path, kcpgen: Command) -> None:
    wrong = (project / "my.kcp").read_text(encoding="utf-8").replace("op my", "op wrong").replace("v[t]^T", "z[t]^T")
    (project / "wrong.kcp").write_text(wrong, encoding="utf-8")
    result = kcpgen("build", "my.kcp", "wrong.kcp")
    assert result.exit_code == 1
    assert "wrong.kcp:10:" in result.stderr
    assert "^" in result.stderr
    assert "Traceback" not in result.output
    assert not (project / "generated").exists()


def test_all_wrong_specs_are_reported_together(project: Path, kcpgen: Command) -> None:
    text = (project / "my.kcp").read_text(encoding="utf-8")
    for name in ("one", "two"):
        (project / f"{name}.kcp").write_text(text.replace("v[t]^T", "z[t]^T"), encoding="utf-8")
    result = kcpgen("build", "one.kcp", "two.kcp", "none.kcp")
    assert "one.kcp:10:" in result.stderr
    assert "two.kcp:10:" in result.stderr
    assert "none.kcp" in result.stderr


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\x00", b"op"], ids=["missing", "empty", "binary", "cut off"])
def test_files_that_are_no_spec(project: Path, kcpgen: Command, content: bytes | None) -> None:
    if content is not None:
        (project / "bad.kcp").write_bytes(content)
    result = kcpgen("build", "bad.kcp")
    assert result.exit_code == 1
    assert result.stderr.startswith("error")
    assert "bad.kcp" in result.stderr


def test_a_directory_is_no_spec(project: Path, kcpgen: Command) -> None:
    result = kcpgen("build", str(project))
    assert result.exit_code == 1
    assert result.stderr.startswith("error")


def test_somebodys_files_are_never_replaced(project: Path, kcpgen: Command) -> None:
    (project / "my").mkdir()
    (project / "my" / "thesis.txt").write_text("irreplaceable", encoding="utf-8")
    result = kcpgen("build", "my.kcp", "-o", ".")
    assert result.exit_code == 1
    assert "thesis.txt" in result.stderr
    assert tree(project / "my") == {"thesis.txt": b"irreplaceable"}


def test_two_specs_of_one_name(project: Path, kcpgen: Command) -> None:
    (project / "again.kcp").write_text((project / "my.kcp").read_text(encoding="utf-8"), encoding="utf-8")
    result = kcpgen("build", "my.kcp", "again.kcp")
    assert result.exit_code == 1
    assert "both define my" in result.stderr


def test_a_crash_while_writing_leaves_the_old_package(
    built: Path, project: Path, kcpgen: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(built)
    spec = project / "my.kcp"
    spec.write_text(spec.read_text(encoding="utf-8").replace("scale S[t]", "2 scale S[t]"), encoding="utf-8")
    replace, calls = os.replace, []

    def broken(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:  # the old package is aside, the new one not yet there
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", broken)
    result = kcpgen("build", "my.kcp")
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    assert tree(built) == before
    assert os.listdir(project / "generated") == ["my"]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("stopped", [1, 2])
def test_an_interrupt_between_any_two_steps_leaves_a_whole_package(
    built: Path, project: Path, kcpgen: Command, monkeypatch: pytest.MonkeyPatch, stopped: int, when: str
) -> None:
    before = tree(built)
    spec = project / "my.kcp"
    spec.write_text(spec.read_text(encoding="utf-8").replace("scale S[t]", "2 scale S[t]"), encoding="utf-8")
    replace, calls = os.replace, []

    def interrupted(source: Path, target: Path) -> None:
        calls.append(target)
        if when == "after" or len(calls) != stopped:
            replace(source, target)
        if len(calls) == stopped:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    assert kcpgen("build", "my.kcp").exit_code == 1
    assert (tree(built) == before) == ((stopped, when) != (2, "after"))
    assert os.listdir(project / "generated") == ["my"]
    assert {"__init__.py", "eager.py"} <= set(tree(built))


def test_a_roll_back_that_is_interrupted_too_loses_nothing(
    built: Path, project: Path, kcpgen: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(built)
    spec = project / "my.kcp"
    spec.write_text(spec.read_text(encoding="utf-8").replace("scale S[t]", "2 scale S[t]"), encoding="utf-8")
    replace, calls = os.replace, []

    def interrupted(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) > 1:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    assert kcpgen("build", "my.kcp").exit_code == 1
    (kept,) = (project / "generated").glob(".my-*/old")
    assert tree(kept) == before


def test_check_compares_bytes(built: Path, kcpgen: Command) -> None:
    path = built / "naive.py"
    fresh = path.read_bytes()
    for changed, shown in (
        (fresh.replace(b"\n", b"\r\n"), "\\r"),
        (fresh + b"# \xff\n", "\\xff"),
        (fresh[:-1], "naive"),
    ):
        path.write_bytes(changed)
        result = kcpgen("build", "--check", "my.kcp")
        assert result.exit_code == 1
        assert "generated/my/naive.py: changed" in result.stdout
        assert shown in result.stdout
        assert kcpgen("build", "my.kcp").exit_code == 0
        assert path.read_bytes() == fresh


def test_only_pythons_own_files_in_its_cache_are_dropped(built: Path, project: Path, kcpgen: Command) -> None:
    cache = built / "__pycache__"
    cache.mkdir()
    for name in ("naive.cpython-312.pyc", "naive.cpython-312.pyc.140234"):
        (cache / name).write_bytes(b"\x00")
    assert kcpgen("build", "--check", "my.kcp").exit_code == 0
    (cache / "notes.txt").write_text("irreplaceable", encoding="utf-8")
    (built / "naive.py").unlink()
    assert "__pycache__/notes.txt: extra" in kcpgen("build", "--check", "my.kcp").stdout
    assert "__pycache__/notes.txt" in kcpgen("build", "my.kcp").stderr
    (cache / "notes.txt").unlink()
    assert kcpgen("build", "my.kcp").exit_code == 0
    assert not cache.exists()


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_in_the_place_of_a_package_is_refused(project: Path, kcpgen: Command, exists: bool) -> None:
    elsewhere, link = project / "elsewhere", project / "generated" / "my"
    if exists:
        elsewhere.mkdir()
    link.parent.mkdir()
    link.symlink_to(elsewhere)
    result = kcpgen("build", "my.kcp")
    assert (result.exit_code, result.stderr) == (
        1,
        "error: generated/my is a symbolic link; remove it or choose another -o\n",
    )
    assert link.is_symlink()
    assert elsewhere.exists() == exists


@pytest.mark.parametrize("name", ["naive.py", "more.py"])
def test_a_link_to_nowhere_inside_is_seen_and_never_replaced(built: Path, kcpgen: Command, name: str) -> None:
    (built / name).unlink(missing_ok=True)
    (built / name).symlink_to("nowhere")
    result = kcpgen("build", "--check", "my.kcp")
    assert result.exit_code == 1
    assert f"generated/my/{name}: " in result.stdout
    assert name in kcpgen("build", "my.kcp").stderr
    assert (built / name).is_symlink()


@pytest.mark.parametrize("name", ["a b; rm -r x.kcp", "-my.kcp", "it's.kcp"])
def test_commands_are_quoted_for_a_shell(project: Path, kcpgen: Command, name: str) -> None:
    (project / "my.kcp").rename(project / name)
    assert kcpgen("build", "-o", "o p", "--", name).exit_code == 0
    stamped = (project / "o p" / "my" / "naive.py").read_text(encoding="utf-8").splitlines()[1]
    (project / "o p" / "my" / "naive.py").unlink()
    told = kcpgen("build", "--check", "-o", "o p", "--", name).stdout.splitlines()[-1]
    for line in (stamped, told):
        program, *words = shlex.split(line.partition(": ")[2])
        assert program == "kcpgen"
        assert words[1:] == [f"./{name}" if name.startswith("-") else name, "-o", "o p"]
    assert kcpgen(*words).exit_code == 0


def test_another_output_directory_is_named_in_the_stamp(project: Path, kcpgen: Command) -> None:
    assert kcpgen("build", "my.kcp", "-o", "my_ops").exit_code == 0
    lines = (project / "my_ops" / "my" / "naive.py").read_text(encoding="utf-8").splitlines()
    assert lines[0].endswith("from my.kcp — do not edit")
    assert lines[1] == "# regenerate: kcpgen build my.kcp -o my_ops"


@pytest.mark.parametrize(("output", "warned"), [("my-ops", True), ("class", True), ("my_ops", False), (".", False)])
def test_a_directory_that_cannot_be_imported_is_warned_of(
    project: Path, kcpgen: Command, output: str, warned: bool
) -> None:
    result = kcpgen("build", "my.kcp", "-o", output)
    assert result.exit_code == 0
    assert (f"warning: {output!r} is no name of a Python package" in result.stderr) is warned
