"""The frame of all commands: exit statuses, one line per failure, and no torch where none is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tierckpt import __version__, inspection
from tierckpt.cli import COMMANDS

from .conftest import Branched, Cli, flip

STORE_COMMANDS = ("verify", "ls", "inspect", "explain", "prune")


def test_help_lists_every_command(cli: Cli) -> None:
    ran = cli("--help")
    assert ran.status == 0
    for name in COMMANDS:
        assert f"\n  {name} " in ran.stdout
        assert cli(name, "--help").status == 0


@pytest.mark.parametrize(
    "argv", [(), ("frobnicate",), ("--frobnicate",), ("verify",), ("ls", "a", "b"), ("export", "a", "--out", "b")]
)
def test_wrong_use_is_one_line_and_status_2(cli: Cli, argv: tuple[str, ...]) -> None:
    ran = cli(*argv)
    assert (ran.status, ran.stdout) == (2, "")
    assert ran.stderr.startswith("tierckpt") and "\\" not in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", STORE_COMMANDS)
@pytest.mark.parametrize("json_option", [(), ("--json",)])
def test_what_is_no_store_is_status_2(cli: Cli, tmp_path: Path, command: str, json_option: tuple[str, ...]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "other.txt").write_text("")
    for root in (tmp_path / "absent", tmp_path / "file", tmp_path / "folder", "s3://bucket/run", ""):
        ran = cli(command, root, *json_option)
        assert (ran.status, ran.stdout) == (2, ""), root
        assert str(root) in ran.stderr
        assert len(ran.stderr.splitlines()) == 1


def test_what_is_part_of_a_store_leads_to_it(cli: Cli, branched: Branched) -> None:
    for root in (branched.root / "g0001", branched.root / "tierckpt.json"):
        ran = cli("verify", root)
        assert ran.status == 2
        assert f"the store is {branched.root}: name that" in ran.stderr


@pytest.mark.parametrize("command", STORE_COMMANDS)
@pytest.mark.parametrize("damage", ["link", "gap", "store", "chain"])
def test_a_broken_chain_is_status_1_and_named_on_stdout(
    cli: Cli, branched: Branched, command: str, damage: str
) -> None:
    links = sorted((branched.root / "chain").iterdir())
    if damage == "link":
        flip(links[2], 60)
    elif damage == "gap":
        links[2].unlink()
    elif damage == "store":
        (branched.root / "tierckpt.json").unlink()
    else:
        for link in links:
            link.unlink()
    named = {"link": links[2].name, "gap": links[2].name, "store": "tierckpt.json", "chain": ""}[damage]
    ran = cli(command, branched.root)
    assert (ran.status, ran.stderr) == (1, "")
    assert str(branched.root) in ran.stdout
    assert named in ran.stdout
    told = cli(command, branched.root, "--json")
    assert told.status == 1
    assert len(json.loads(told.stdout)["problems"]) == 1


def test_a_file_url_is_a_folder(cli: Cli, branched: Branched) -> None:
    assert cli("verify", f"file://{branched.root}").status == 0


def test_an_unexpected_error_is_one_line_unless_debugging(
    cli: Cli, branched: Branched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(inspection, "verify", fail)
    ran = cli("verify", branched.root)
    assert (ran.status, ran.stdout) == (2, "")
    assert ran.stderr == "tierckpt: unexpected error: RuntimeError: two\\nlines\n"
    monkeypatch.setenv("TIERCKPT_DEBUG", "1")
    ran = cli("verify", branched.root)
    assert ran.status == 2
    assert "Traceback" in ran.stderr


def test_warnings_are_one_line(cli: Cli, branched: Branched, tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    branched.key.save(key)
    key.chmod(0o644)
    ran = cli("prune", branched.root, "--keep", 1, "--key", key)
    assert ran.status == 0
    assert ran.stderr.startswith("tierckpt: warning: the private key")


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "tierckpt", "--version"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == f"tierckpt {__version__}\n"


def test_a_reader_that_goes_away_is_no_traceback(branched: Branched) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tierckpt", "ls", str(branched.root)]
    ran = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (2, "")


_ALL_SIX = """
import sys
from tierckpt.cli import main

root, folder = sys.argv[1:]
options = {"verify": ["--all"], "prune": ["--keep", "1", "--key", folder + "/key.pem"]}
assert main(["keygen", folder + "/other.pem"]) == 0
for command in ("verify", "ls", "inspect", "explain", "prune"):
    for json in ([], ["--json"]):
        assert main([command, root, *options.get(command, []), *json]) == 0, command
print(sorted({"torch", "numpy"} & sys.modules.keys()), file=sys.stderr)
"""


def _run_all_six(branched: Branched, tmp_path: Path, *path: Path) -> str:
    branched.key.save(tmp_path / "key.pem")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, Path.cwd()]))}
    command = [sys.executable, "-c", _ALL_SIX, str(branched.root), str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    return ran.stderr


def test_six_commands_import_neither_torch_nor_numpy(branched: Branched, tmp_path: Path) -> None:
    assert _run_all_six(branched, tmp_path) == "[]\n"


def test_six_commands_work_where_torch_and_numpy_cannot_be_imported(branched: Branched, tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    absent.mkdir()
    for name in ("torch", "numpy"):
        (absent / f"{name}.py").write_text(f"raise ImportError('no {name} here')\n")
    _run_all_six(branched, tmp_path, absent)
