"""What README.md and docs/guide.md show works as it stands there."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import tierckpt
from tierckpt import Checkpointer, Disk, Ram, errors

ROOT = Path(__file__).parents[1]
README, GUIDE = ROOT / "README.md", ROOT / "docs/guide.md"


def blocks(path: Path, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)


def block(path: Path, has: str, language: str = "python") -> str:
    (found,) = [text for text in blocks(path, language) if has in text]
    return found


def run(folder: Path, text: str, *launcher: str) -> None:
    (folder / "script.py").write_text(text)
    command = [sys.executable, *launcher, "script.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.limit(120)
def test_the_readmes_script_and_what_it_loads(tmp_path: Path) -> None:
    use = block(README, "with Checkpointer(")
    # So few steps would overtake each other on a slow disk.
    use = use.replace("100)", "12)").replace("ckpt.save(step, state)", "ckpt.save(step, state).wait()")
    run(tmp_path, use + block(README, "tierckpt.load(").replace("step=90", "step=10"))
    assert tierckpt.steps(tmp_path / "run") == [0, 10, 11]


@pytest.mark.limit(120)
def test_the_guides_script_under_torchrun(tmp_path: Path) -> None:
    script = block(GUIDE, "fully_shard(layer)").replace("100)", "4)")
    run(tmp_path, script, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert tierckpt.steps(tmp_path / "run") == [0, 3]


def test_the_guides_mapping_is_one() -> None:
    text = block(GUIDE, "Mapping(").partition("info =")[0]
    found: dict[str, object] = {}
    exec(text, found)
    assert isinstance(found["mapping"], tierckpt.Mapping)


def test_the_guides_file_describes_a_checkpointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(block(GUIDE, "[[tiers]]", "toml"))
    Checkpointer.from_toml("run.toml").close()


def test_every_setting_that_the_guide_names_exists() -> None:
    table = GUIDE.read_text().partition("## Settings")[2].partition("## ")[0]
    names: set[str] = set()
    for line in table.splitlines():
        owner = re.match(r"\| `(\w+)\(", line)
        if owner is not None:
            kind = {"Checkpointer": Checkpointer, "Ram": Ram, "Disk": Disk}[owner[1]]
            names = set(inspect.signature(Checkpointer).parameters)
            if kind is not Checkpointer:
                names = {field.name for field in fields(kind) if field.init}  # type: ignore[arg-type]
        elif line.startswith("| `"):
            told = re.findall(r"`(\w+)`", line.split("|")[1])
            assert told and set(told) <= names, line


def test_every_error_that_users_meet_can_be_caught_by_its_name_and_is_in_the_guide() -> None:
    table = GUIDE.read_text().partition("## Errors")[2].partition("## ")[0]
    exported = {name for name in tierckpt.__all__ if name.endswith("Error")}
    assert set(re.findall(r"(\w+Error)\b", table)) == exported
    # Users catch these as what they derive from.
    within = {"AbsentError", "AgentLostError", "AgentSilentError"}
    assert {name for name in vars(errors) if name.endswith("Error")} == exported | within


@pytest.mark.parametrize("document", [README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"])
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        path = document.parent / name if name else document
        assert path.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            assert heading in [re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings], target


def test_a_data_loader_draws_its_seed_where_the_guide_says() -> None:
    def draws(**more: torch.Generator) -> bool:
        before = torch.get_rng_state()
        next(iter(torch.utils.data.DataLoader([1, 2, 3], **more)))  # type: ignore[arg-type]
        return not torch.equal(before, torch.get_rng_state())

    assert draws() and not draws(generator=torch.Generator())
