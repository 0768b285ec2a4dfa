"""The front door: cadence, retention, restarts and configuration behave as a user expects, and say so when they cannot."""

from __future__ import annotations

import errno
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.harness import run_ranks
from tierckpt import (
    Checkpointer,
    Disk,
    IntegrityError,
    KeepEvery,
    LayoutError,
    Ram,
    SkippedError,
    StateError,
    StoreError,
)
from tierckpt.tiers.disk import DiskPlace

BOTH = pytest.mark.parametrize("agent", ["auto", "off"])


def _state(value: float = 0.0) -> dict[str, Any]:
    return {"w": torch.full((3,), float(value)), "n": int(value)}


def _save(root: Path, steps: list[int], **arguments: Any) -> None:
    with Checkpointer(root, agent="off", **arguments) as ckpt:
        ckpt.restore(_state())
        for step in steps:
            ckpt.save(step, _state(step))


def test_a_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    _save(tmp_path / "s", [0, 1])
    state = _state()
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        info = ckpt.restore(state)
        assert info is not None and info.step == 1
        assert state["n"] == 1 and state["w"].tolist() == [1, 1, 1]
        assert ckpt.save(2, _state(2)).wait().generation == 2  # type: ignore[union-attr]


def test_cadence_in_steps(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "s", tiers=[Disk(every=10)], agent="off") as ckpt:
        handles = {step: ckpt.save(step, _state(step)) for step in (3, 9, 10, 11, 25)}
        assert handles[9].wait() is None
        with pytest.raises(SkippedError, match="step 9"):
            handles[9].wait("disk")
    assert tierckpt.steps(tmp_path / "s") == [3, 10, 25]


def test_a_cadence_in_steps_takes_the_first_save_at_or_after_each_multiple(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "s", tiers=[Disk(every=10)], agent="off") as ckpt:
        for step in range(0, 33, 3):
            ckpt.save(step, _state(step))
    assert tierckpt.steps(tmp_path / "s") == [0, 12, 21, 30]


def test_a_duration_as_cadence(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "s", tiers=[Disk(every="1h")], agent="off") as ckpt:
        for step in range(3):
            ckpt.save(step, _state(step))
    assert tierckpt.steps(tmp_path / "s") == [0]


@pytest.mark.parametrize(
    "arguments",
    [
        {"run": 5},
        {"run": "a/b"},
        {"run": "x" * 129},
        {"key": 5},
        {"trust": 5},
        {"group": 3},
        {"max_restarts": "3"},
        {"max_restarts": 0},
        {"fresh": "no"},
        {"timeout": "x"},
        {"agent": "on"},
        {"save_on_signal": 1},
    ],
)
def test_an_argument_that_makes_no_sense_is_refused_at_once(tmp_path: Path, arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(StateError, match=f"{name}="):
        Checkpointer(tmp_path / "s", **arguments)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        {"step": "1"},
        {"keys": 3},
        {"keys": [3]},
        {"keys": b"w"},
        {"strict": 0},
        {"cast": "no"},
        {"fallback": None},
        {"staged": "yes"},
        {"mapping": {}},
    ],
)
def test_an_argument_of_a_load_that_makes_no_sense_is_refused_at_once(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    """``cast="no"`` would convert. A start that has nothing to load refuses the same."""
    tierckpt.save(_state(1), tmp_path / "s", step=1)
    (name,) = arguments
    state = _state()
    with pytest.raises(StateError, match=f"{name}="):
        tierckpt.load(state, tmp_path / "s", **arguments)
    with Checkpointer(tmp_path / "t", agent="off") as ckpt, pytest.raises(StateError, match=f"{name}="):
        ckpt.restore(state, **arguments)
    assert state["n"] == 0


def test_retention_as_a_policy(tmp_path: Path) -> None:
    _save(tmp_path / "s", list(range(1, 8)), tiers=[Disk(keep=KeepEvery(3, count=2), grace=0)])
    assert tierckpt.steps(tmp_path / "s") == [3, 6, 7]


def test_one_tier_needs_no_list(tmp_path: Path) -> None:
    _save(tmp_path / "s", [1, 2], tiers=Disk(keep=1, grace=0))
    assert tierckpt.steps(tmp_path / "s") == [2]


def test_only_without_an_agent_there_is_no_tier_of_memory(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "s", tiers=[Disk()]) as ckpt:
        ckpt.save(0, _state()).wait("ram")
    with Checkpointer(tmp_path / "t", tiers=[Ram(), Disk()], agent="off") as ckpt:
        handle = ckpt.save(0, _state())
        with pytest.raises(StateError, match="no tier 'ram'"):
            handle.wait("ram")


def test_after_restarts_without_progress_an_older_one_is_taken(tmp_path: Path) -> None:
    _save(tmp_path / "s", [1, 2])
    taken = []
    for _ in range(4):
        with Checkpointer(tmp_path / "s", agent="off", max_restarts=2) as ckpt, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            info = ckpt.restore(_state())
            assert info is not None
            taken.append(info)
    assert [info.step for info in taken] == [2, 2, 1, 1]
    assert "restarted from it 2 times" in taken[2].skipped[0]


def test_fresh_begins_from_nothing(tmp_path: Path) -> None:
    _save(tmp_path / "s", [5])
    with Checkpointer(tmp_path / "s", agent="off", fresh=True) as ckpt:
        assert ckpt.restore(_state()) is None
    with pytest.raises(tierckpt.IncompleteError, match="left steps 5"):
        tierckpt.load(_state(), tmp_path / "s")
    assert tierckpt.load(_state(), tmp_path / "s", step=5).step == 5


@pytest.mark.parametrize("step", [5, None])
def test_after_a_fresh_start_that_committed_nothing_the_next_one_must_say_how_to_go_on(
    tmp_path: Path, step: int | None
) -> None:
    _save(tmp_path / "s", [5])
    with Checkpointer(tmp_path / "s", agent="off", fresh=True) as ckpt:
        assert ckpt.restore(_state()) is None
    with Checkpointer(tmp_path / "s", agent="off") as ckpt, pytest.raises(tierckpt.IncompleteError, match="pass step="):
        ckpt.restore(_state())
    with Checkpointer(tmp_path / "s", agent="off", fresh=step is None) as ckpt:
        info = ckpt.restore(_state(), step=step)
        assert (info.step if info else None) == step
        ckpt.save(6, _state(6))
    assert tierckpt.steps(tmp_path / "s") == ([6] if step is None else [5, 6])


def test_a_start_without_restore_over_newer_steps_is_told(tmp_path: Path) -> None:
    _save(tmp_path / "s", [5])
    with Checkpointer(tmp_path / "s", agent="off") as ckpt, pytest.warns(RuntimeWarning, match="without restore"):
        ckpt.save(1, _state(1)).wait()
    with Checkpointer(tmp_path / "s", agent="off") as ckpt, warnings.catch_warnings():
        warnings.simplefilter("error")
        ckpt.save(6, _state(6)).wait()


def _told_of_lower(ckpt: Checkpointer, steps: list[int]) -> list[str]:
    """What is said of steps below the newest when these are saved."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in steps:
            ckpt.save(step, _state(step)).wait()
    return [str(one.message) for one in told if "highest step number" in str(one.message)]


@BOTH
def test_steps_below_what_was_restored_are_told_once(tmp_path: Path, agent: str) -> None:
    """``for step in range(N)`` after a restart: all of it would be lost at the next start, and retired first."""
    _save(tmp_path / "s", [9])
    with Checkpointer(tmp_path / "s", tiers=Disk(keep=2, grace=0), agent=agent) as ckpt:
        assert ckpt.restore(_state()) is not None
        (told,) = _told_of_lower(ckpt, [0, 1, 2])
        assert "step 0 is saved although there is step 9" in told and "info.step + 1" in told and "fresh=True" in told
    assert tierckpt.latest(tmp_path / "s") == 9


def test_a_counter_that_begins_anew_in_the_middle_of_a_run_is_told(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        assert not _told_of_lower(ckpt, [0, 10, 20])
        with pytest.raises(tierckpt.StepExistsError), warnings.catch_warnings():
            warnings.simplefilter("error")  # it is not saved at all
            ckpt.save(10, _state(10))
        (told,) = _told_of_lower(ckpt, [1, 11])
        assert "step 1 is saved although there is step 20" in told


def test_a_run_that_is_set_back_by_restore_is_not_told_of_lower_steps(tmp_path: Path) -> None:
    _save(tmp_path / "s", [3, 6, 9])
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        assert ckpt.restore(_state(), step=3) is not None
        assert not _told_of_lower(ckpt, [4, 5])
        assert ckpt.restore(_state(), step=3) is not None
        assert not _told_of_lower(ckpt, [3, 4])
        assert len(_told_of_lower(ckpt, [2])) == 1
    assert tierckpt.latest(tmp_path / "s") == 4
    with Checkpointer(tmp_path / "s", agent="off", fresh=True) as ckpt:
        assert ckpt.restore(_state()) is None
        assert not _told_of_lower(ckpt, [0, 1])
    assert tierckpt.latest(tmp_path / "s") == 1


def test_a_step_that_failed_is_no_newest_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(tmp_path / "s", agent="off") as ckpt, monkeypatch.context() as patched:
        assert not _told_of_lower(ckpt, [0])
        patched.setattr(DiskPlace, "writer", _refuses)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(StoreError):
                ckpt.save(9, _state(9)).wait()
        patched.undo()
        assert not _told_of_lower(ckpt, [1, 2])


def _refuses(*_: Any) -> Any:
    raise StoreError("it is full")


def test_from_toml(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        f'root = "{tmp_path}/s"\nagent = "off"\non_error = "raise"\n[[tiers]]\ntier = "disk"\nevery = 2\nkeep = 1\n'
    )
    with Checkpointer.from_toml(file) as ckpt:
        for step in range(5):
            ckpt.save(step, _state(step))
    assert tierckpt.steps(tmp_path / "s") == [4]


def test_a_relative_root_in_a_file_begins_at_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/run.toml").write_text('root = "s"\nagent = "off"\n')
    monkeypatch.chdir(tmp_path)
    with Checkpointer.from_toml("conf/run.toml") as ckpt:
        ckpt.save(0, _state())
    assert tierckpt.steps(tmp_path / "s") == [0]


def test_a_ram_tier_in_toml(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        f'root = "{tmp_path}/s"\n[[tiers]]\ntier = "ram"\nslots = 2\nbudget = 0.25\n[[tiers]]\ntier = "disk"\nevery = 2\n'
    )
    with Checkpointer.from_toml(file) as ckpt:
        assert ckpt.save(0, _state(0)).wait() is not None
        assert ckpt.save(1, _state(1)).wait("ram") is None
    assert tierckpt.steps(tmp_path / "s") == [0, 1]  # the last one goes to the disk at the end


@pytest.mark.parametrize(
    "arguments",
    [
        {"copies": 2},
        {"slots": 1},
        {"on_full": "drop"},
        {"budget": 0},
        {"budget": 0.0},
        {"budget": 1.5},
        {"budget": 64e9},
        {"budget": float("nan")},
        {"budget": "100MiB"},
        {"idle": "10s"},
        {"every": 0},
        {"idle": -1},
        {"drain_deadline": 0},
    ],
)
def test_a_ram_tier_that_makes_no_sense_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(StateError, match=next(iter(arguments))):
        Ram(**arguments)


def test_a_budget_is_bytes_or_a_fraction_of_the_memory() -> None:
    assert Ram(budget=1).budget_bytes == 1
    assert 1 < Ram(budget=0.5).budget_bytes < Ram(budget=1.0).budget_bytes


@pytest.mark.parametrize("arguments", [{"keep": "3"}, {"keep": 0}, {"grace": "1h"}, {"every": 1.5}])
def test_a_disk_tier_that_makes_no_sense_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(StateError, match=next(iter(arguments))):
        Disk(**arguments)


def test_one_tier_of_each_kind(tmp_path: Path) -> None:
    for tiers in ([Ram()], [Disk(), Disk()], [Ram(), Ram(), Disk()], []):
        with pytest.raises(StateError, match="exactly one Disk"):
            Checkpointer(tmp_path / "s", tiers=tiers)
    for wrong, named in ((["ram"], "'ram' is a str, no tier"), ("ram", "'ram' is a str"), ([Disk(), 3], "3 is an int")):
        with pytest.raises(StateError, match=f"{named}.*exactly one Disk"):
            Checkpointer(tmp_path / "s", tiers=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('root = "x"\nroott = 1\n', "unknown keys roott; it takes root"),
        (
            'root = "x"\ngroup = 3\n',
            "unknown keys group (a process group is no value of a file: from_toml(…, group=…)); it",
        ),
        ('agent = "off"\n', "no key root"),
        ('root = "x"\n[[tiers]]\nevery = 2\n', 'no key tier; write tier = "disk"'),
        ('root = "x"\n[[tiers]]\ntier = "tape"\n', "tier = 'tape'; write tier = \"disk\""),
        ('root = "x"\n[[tiers]]\ntier = ["ram"]\n', "tier = ['ram']; write"),
        ('root = "x"\n[[tiers]]\ntier = "disk"\nkept = 2\n', "[[tiers]] disk: unknown keys kept"),
        ('root = "x"\n[[tiers]]\ntier = "ram"\n', "exactly one Disk"),
        ('root = "x"\n[tiers]\ntier = "disk"\n', "[tiers]: each tier is a table [[tiers]]"),
        ('root = "x"\ntiers = "disk"\n', "tiers = 'disk': each tier is a table [[tiers]]"),
        ('root = "x"\nagent = "on"\n', "agent='on'"),
        ('root = "x"\ntimeout = "1h"\n', "timeout='1h'"),
        ('root = "x"\nsave_on_signal = 1.5\n', "an argument does not take"),
        ("root = 1\n", "root is an int"),
        ('root = "s3://x"\n', "not supported"),
        ("root = \n", "line 1"),
        ("root = '\xff'\n", "utf-8"),
    ],
)
def test_wrong_toml_is_explained_and_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(tierckpt.TierckptError, match=re.escape(message)) as caught:
        Checkpointer.from_toml(file)
    assert str(caught.value).startswith(f"{file}: ")
    with pytest.raises(StateError, match="cannot read it"):
        Checkpointer.from_toml(tmp_path / "absent.toml")


def _forbidden(path: str, *_: Any, **__: Any) -> Any:
    code = errno.EACCES if os.path.lexists(path) else errno.ENOENT
    raise OSError(code, os.strerror(code), path)


@pytest.mark.parametrize("after", [False, True], ids=["nothing is there", "a shard is there"])
def test_files_that_stay_are_told_of_where_there_are_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """A root that is no longer writable: its folders cannot be removed, which is nobody's concern."""
    with Checkpointer(tmp_path / "s", agent="off") as ckpt, warnings.catch_warnings(record=True) as told:
        ckpt.save(0, _state()).wait()
        warnings.simplefilter("always")
        with monkeypatch.context() as patched:
            patched.setattr(DiskPlace, "create" if after else "writer", _refuses)
            patched.setattr(os, "rmdir", _forbidden)
            if after:
                patched.setattr(os, "unlink", _forbidden)
            handle = ckpt.save(1, _state(1))
            handle._ended.wait()
            ckpt.save(2, _state(2))._ended.wait()
    said = [str(one.message) for one in told]
    assert any(text.startswith("the save of step 1 failed") for text in said)
    assert any("its files stay" in text for text in said) == after


def _each_its_own(rank: int, base: str) -> list[str]:
    root, told = f"{base}/q{rank}", []
    for use in (
        lambda: Checkpointer(root),
        lambda: tierckpt.save(_state(), root, step=1),
        lambda: tierckpt.load(_state(), root),
        lambda: tierckpt.read(root),
    ):
        with pytest.raises(StateError) as caught:
            use()  # type: ignore[no-untyped-call]
        told.append(str(caught.value))
    # The same folder by another name.
    os.makedirs(f"{base}/s", exist_ok=True)
    if rank:
        os.symlink(f"{base}/s", f"{base}/t")
    tierckpt.save(_state(1), f"{base}/{'st'[rank]}", step=1)
    return told


def test_ranks_of_one_node_that_are_given_different_roots_are_told(tmp_path: Path) -> None:
    """Every save succeeded, and neither folder could be restored alone."""
    one, other = run_ranks(_each_its_own, 2, str(tmp_path))
    assert one == other
    assert all(f"rank 0: {tmp_path}/q0; rank 1: {tmp_path}/q1" in told for told in one)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s", "t"]


@pytest.mark.parametrize("state", [{}, _state()], ids=["values alone", "beside a tensor"])
def test_what_cannot_be_stored_has_one_name_at_every_save(tmp_path: Path, state: dict[str, Any]) -> None:
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        for step in range(2):
            with pytest.raises(StateError, match=r"^a\.b\.1: cannot store a value of type builtins\.function"):
                ckpt.save(step, {**state, "a": {"b": [0, lambda: 0]}})
            ckpt.save(step, {**state, "a": {"b": [0, 0]}}).wait()


def test_arguments_in_each_others_place_are_explained(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="root is a dict"):
        tierckpt.load("s", {})  # type: ignore[arg-type]
    with pytest.raises(StateError, match="step='1'"):
        Checkpointer(tmp_path / "s", agent="off").save("1", _state())  # type: ignore[arg-type]


def test_keys_take_one_pattern_and_must_match_something(tmp_path: Path) -> None:
    tierckpt.save({"model": _state(1), "other": _state(2)}, tmp_path / "s", step=1)
    state = {"model": _state(), "other": _state()}
    tierckpt.load(state, tmp_path / "s", keys="model.*")
    assert (state["model"]["n"], state["other"]["n"]) == (1, 0)
    with pytest.raises(LayoutError, match="nothing in step 1"):
        tierckpt.load(state, tmp_path / "s", keys=["nix.*"])


def test_what_is_ignored_is_listed(tmp_path: Path) -> None:
    tierckpt.save({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "s", step=1)
    info = tierckpt.load({"a": torch.zeros(1)}, tmp_path / "s", strict=False)
    assert list(info.ignored) == ["b"]


def test_the_state_dict_of_a_fresh_optimizer_gets_advice(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    tierckpt.save({"o": optimizer.state_dict()}, tmp_path / "s", step=1)
    fresh = torch.optim.AdamW(model.parameters())
    with pytest.raises(LayoutError, match="put the optimizer itself into the state"):
        tierckpt.load({"o": fresh.state_dict()}, tmp_path / "s")


def test_read_gives_an_optimizer_what_it_can_load(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    tierckpt.save({"m": model, "o": optimizer}, tmp_path / "s", step=1)
    fresh = torch.optim.AdamW(model.parameters())
    fresh.load_state_dict(tierckpt.read(tmp_path / "s")["o"])
    assert fresh.param_groups[0]["lr"] == 0.5
    for parameter in model.parameters():
        assert torch.equal(fresh.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_another_kind_of_optimizer_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    tierckpt.save({"m": model, "o": torch.optim.AdamW(model.parameters())}, tmp_path / "s", step=1)
    with pytest.raises(LayoutError, match="another kind of optimizer"):
        tierckpt.load({"m": model, "o": torch.optim.SGD(model.parameters(), momentum=0.9)}, tmp_path / "s")


def test_prune_leaves_something_whole(tmp_path: Path) -> None:
    """Retiring all that is intact in favour of a damaged newest checkpoint would lose the run."""
    root = tmp_path / "s"
    _save(root, [1, 2, 3])
    shard = root / "g0001/s000000000003/shard-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[5000] ^= 1
    shard.write_bytes(data)
    with pytest.raises(IntegrityError, match="nothing was retired"):
        tierckpt.prune(root, keep=1, grace=0)
    assert tierckpt.steps(root) == [1, 2, 3]
    assert [ref.step for ref in tierckpt.prune(root, keep=2, grace=0).retired] == [1]


def test_a_dry_run_tells_what_would_be_removed(tmp_path: Path) -> None:
    _save(tmp_path / "s", [1, 2])
    told = tierckpt.prune(tmp_path / "s", keep=1, grace=0, dry_run=True)
    assert tierckpt.steps(tmp_path / "s") == [1, 2]
    done = tierckpt.prune(tmp_path / "s", keep=1, grace=0)
    assert sorted(told.removed) == sorted(done.removed) and told.size == done.size > 0


def test_a_close_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt = Checkpointer(tmp_path, agent="off")
    ckpt.save(0, {"w": torch.zeros(10)}).wait()
    waits = ckpt._drain.close

    def interrupted() -> None:
        monkeypatch.setattr(ckpt._drain, "close", waits)
        raise KeyboardInterrupt

    monkeypatch.setattr(ckpt._drain, "close", interrupted)
    handle = ckpt.save(1, {"w": torch.ones(10)})
    with pytest.raises(KeyboardInterrupt):
        ckpt.close()
    with pytest.raises(StateError, match="closed"):
        ckpt.save(2, {"w": torch.ones(10)})
    ckpt.close()
    assert handle._ended.is_set() and not ckpt._drain._line.is_alive
    assert tierckpt.steps(tmp_path) == [0, 1]
