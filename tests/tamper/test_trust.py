"""Who may say what a store holds: roll-back, truncation, foreign and lost keys, pins, and the places where keys are kept.

Signatures prove that somebody with a key wrote a link; these tests protect the rest: that it is a key to be believed, and that
nothing was taken away.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.harness import run_ranks
from tests.tamper import forge
from tests.tamper.sample import STEPS, Sample, same, template
from tierckpt import Checkpointer, IncompleteError, StoreError, UntrustedError
from tierckpt.cli import main
from tierckpt.format import paths
from tierckpt.format.chain import CheckpointRef
from tierckpt.format.keys import SigningKey
from tierckpt.tiers import trust as trust_module
from tierckpt.tiers.disk import DiskPlace
from tierckpt.tiers.store import Store
from tierckpt.tiers.trust import TrustWarning


def save(root: Path, *steps: int, **more: Any) -> str:
    """Save small states in a process of its own as far as keys go; the head afterwards."""
    head = ""
    with Checkpointer(root, agent="off", **more) as checkpointer:
        for step in steps:
            info = checkpointer.save(step, {"x": torch.full((5,), float(step))}).wait()
            assert info is not None
            head = info.head
    return head


def load(root: Path, **more: Any) -> int:
    """Load; the step that came back, all of it as it was saved."""
    state = {"x": torch.zeros(5)}
    info = tierckpt.load(state, root, **more)
    assert torch.equal(state["x"], torch.full((5,), float(info.step)))
    return info.step


def restore(root: Path, **more: Any) -> tierckpt.LoadInfo | None:
    with Checkpointer(root, agent="off", **more) as checkpointer:
        return checkpointer.restore({"x": torch.zeros(5)})


def problems(root: Path, **more: Any) -> list[str]:
    return [problem["kind"] for problem in tierckpt.verify(root, every=True, **more).problems]


def key_file(path: Path) -> SigningKey:
    key = SigningKey.generate()
    key.save(path)
    return key


@pytest.fixture
def other_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Call nothing: within the test that asks for it, the user is another one from the start."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another user"))
    yield


class User:
    """Whose configuration folder is in force."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, base: Path) -> None:
        self._patch, self._base = monkeypatch, base

    def be(self, name: str) -> Path:
        folder = self._base / f"user {name}"
        self._patch.setenv("XDG_CONFIG_HOME", str(folder))
        return folder / "tierckpt"


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    found = User(monkeypatch, tmp_path)
    found.be("first")
    return found


# Roll-back and truncation


def rolled_back(root: Path, user: User, head: str, *, empty: bool = False) -> None:
    """A store that has lost its end: found by the user who has seen it, and by whoever knows the head."""
    assert problems(root)
    for call in (load, restore, lambda root: save(root, 99)):
        with pytest.raises((UntrustedError, IncompleteError) if call is load and empty else UntrustedError):
            call(root)
    with pytest.raises(UntrustedError, match="rolled back, truncated or replaced"):
        restore(root)
    user.be("who has never seen it")
    assert empty or load(root) >= 0  # signatures alone cannot tell
    for call in (load, restore):
        with pytest.raises((UntrustedError, IncompleteError) if call is load and empty else UntrustedError):
            call(root, expect_head=head)
    assert problems(root, expect_head=head)
    assert main(["verify", "--expect-head", head, str(root)]) == 1


def test_a_store_that_is_as_it_was_earlier(tmp_path: Path, user: User) -> None:
    root = tmp_path / "store"
    save(root, 1, 2)
    shutil.copytree(root, tmp_path / "earlier")
    head = save(root, 3)
    shutil.rmtree(root)
    (tmp_path / "earlier").rename(root)
    rolled_back(root, user, head)


@pytest.mark.parametrize("links", [1, 2, 3])
@pytest.mark.parametrize("folders", [True, False], ids=["with-folders", "links-only"])
def test_a_chain_without_its_end(tmp_path: Path, user: User, links: int, folders: bool) -> None:
    root = tmp_path / "store"
    head = save(root, 1, 2, 3, 4)
    for path in forge.links(root)[-links:]:
        path.unlink()
    for step in range(5 - links, 5) if folders else ():
        shutil.rmtree(root / paths.step_dir(1, step))
    rolled_back(root, user, head)


@pytest.mark.parametrize("how", ["links", "all but tierckpt.json"])
def test_a_chain_of_which_nothing_is_left(tmp_path: Path, user: User, how: str) -> None:
    """A run must not silently start from nothing because its store was emptied."""
    root = tmp_path / "store"
    head = save(root, 1)
    shutil.rmtree(root / "chain")
    if how != "links":
        shutil.rmtree(root / "g0001")
        shutil.rmtree(root / "layouts")
    rolled_back(root, user, head, empty=True)


def test_a_store_that_is_gone_although_a_head_is_expected(tmp_path: Path, user: User) -> None:
    root = tmp_path / "store"
    head = save(root, 1)
    shutil.rmtree(root)
    with pytest.raises(UntrustedError, match=head):
        restore(root, expect_head=head)
    # Without one a store that was deleted is a new start, not an attack.
    assert restore(root) is None


def test_an_expected_head_that_is_there(tmp_path: Path, user: User) -> None:
    """Any link of the chain will do: it names all history before it."""
    root = tmp_path / "store"
    heads = [save(root, step) for step in (1, 2)]
    for head in heads:
        assert load(root, expect_head=head) == 2
        assert problems(root, expect_head=head) == []
        assert main(["verify", "--expect-head", head.upper(), str(root)]) == 0
    with pytest.raises(UntrustedError, match="expected digest"):
        load(root, expect_head="0" * 64)


def test_a_pinned_head_is_renewed_by_every_look(tmp_path: Path, user: User) -> None:
    """A reader that has loaded step 2 notices when the store goes back to step 1."""
    root = tmp_path / "store"
    save(root, 1)
    user.be("reader")
    assert load(root) == 1
    shutil.copytree(root, tmp_path / "earlier")
    user.be("first")
    save(root, 2)
    user.be("reader")
    assert load(root) == 2
    shutil.rmtree(root)
    (tmp_path / "earlier").rename(root)
    with pytest.raises(UntrustedError, match="seen here before"):
        load(root)


# Other people's stores and keys


def test_a_chain_signed_by_another_key(tmp_path: Path, user: User) -> None:
    root = tmp_path / "store"
    save(root, 1)
    mine = forge.read_chain(root).links[0].key
    forge.sign_again(root, SigningKey.generate())
    for call in (load, restore, lambda root: save(root, 2)):
        with pytest.raises(UntrustedError, match="signed by key"):
            call(root)
    assert "untrusted" in problems(root)
    user.be("second")
    with pytest.raises(UntrustedError, match=r"trust= \(TIERCKPT_TRUST\)"):
        load(root, trust=mine)
    assert main(["verify", "--trust", mine, str(root)]) == 1
    assert load(root) == 1  # on first use it is believed: see the threat model


def test_a_replaced_store_of_the_same_name(tmp_path: Path, user: User) -> None:
    root = tmp_path / "store"
    save(root, 1, run="run")
    user.be("thief")
    save(tmp_path / "other", 1, run="run")
    user.be("first")
    shutil.rmtree(root)
    (tmp_path / "other").rename(root)
    with pytest.raises(UntrustedError, match="signed by key"):
        load(root)


def test_a_fork_by_the_same_key(sample: Sample) -> None:
    """All signatures are good; the head is not the one that was seen here."""
    shutil.rmtree(sample.root)
    shutil.copytree(sample.fork, sample.root)
    with pytest.raises(UntrustedError, match="seen here before"):
        tierckpt.load(template(), sample.root)
    assert problems(sample.root) == ["untrusted"]


@pytest.mark.parametrize("then", ["nothing", "good link"])
def test_a_commit_of_a_stranger(tmp_path: Path, user: User, then: str) -> None:
    """Whoever can write to the store introduces a key of their own and commits a checkpoint; later good links excuse nothing."""
    root = tmp_path / "store"
    mine = key_file(tmp_path / "mine.pem")
    save(root, 1, key=tmp_path / "mine.pem")
    stranger = SigningKey.generate()
    shutil.copytree(root / paths.step_dir(1, 1), root / paths.step_dir(1, 9))
    forge.append(root, lambda chain: chain.introduce(stranger.public), stranger)
    forge.append(root, lambda chain: chain.commit(CheckpointRef(1, 9, "ab" * 32)), stranger)
    if then == "good link":
        forge.append(root, lambda chain: chain.begin(store=chain.store or "", origin=None), mine)
    for trust in (None, mine.public):
        with pytest.raises(UntrustedError, match=stranger.public):
            load(root, trust=trust)
        assert "untrusted" in problems(root, trust=trust)
    user.be("second")
    assert "untrusted" in problems(root)


def test_nothing_is_committed_on_top_of_a_stranger(tmp_path: Path, user: User) -> None:
    """A link of ours would vouch for all links before it."""
    root = tmp_path / "store"
    stranger = SigningKey.generate()
    with Checkpointer(root, agent="off") as checkpointer:
        checkpointer.save(1, {"x": torch.ones(5)}).wait()
        forge.append(root, lambda chain: chain.introduce(stranger.public), stranger)
        forge.append(root, lambda chain: chain.commit(CheckpointRef(1, 9, "ab" * 32)), stranger)
        handle = checkpointer.save(2, {"x": torch.ones(5)})
        with pytest.raises(UntrustedError, match=stranger.public):
            handle.wait()
    assert len(forge.links(root)) == 4


# First use and explicit trust


def test_the_first_use_pins(tmp_path: Path, user: User) -> None:
    root = tmp_path / "store"
    head = save(root, 1, run="name")
    known = user.be("second") / "known/name.json"
    assert load(root) == 1
    pinned = json.loads(known.read_text())
    assert pinned["keys"] == [forge.read_chain(root).links[0].key]
    assert pinned["heads"] == {str(root): [1, head]}
    assert stat.S_IMODE(known.parent.stat().st_mode) == 0o700


def test_ways_to_name_a_trusted_key(tmp_path: Path, user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "store"
    key = key_file(tmp_path / "key.pem")
    key.write_public(tmp_path / "key.pub")
    wrong = key_file(tmp_path / "wrong.pem")
    wrong.write_public(tmp_path / "wrong.pub")
    save(root, 1, key=tmp_path / "key.pem")
    user.be("second")
    good: list[Any] = [key.public, key.public.upper(), str(tmp_path / "key.pub"), tmp_path / "key.pem"]
    for trust in [*good, [wrong.public, key.public]]:
        assert load(root, trust=trust) == 1
        assert problems(root, trust=trust) == []
    for trust in (wrong.public, tmp_path / "wrong.pub", [wrong.public]):
        with pytest.raises(UntrustedError):
            load(root, trust=trust)
    for nonsense in ("abc", tmp_path / "nothing.pub", tmp_path, "", "\0"):
        with pytest.raises(UntrustedError, match=r"not a public key|cannot read"):
            load(root, trust=nonsense)
    monkeypatch.setenv("TIERCKPT_TRUST", f"{wrong.public}:{tmp_path / 'key.pub'}")
    assert load(root) == 1
    monkeypatch.setenv("TIERCKPT_TRUST", wrong.public)
    with pytest.raises(UntrustedError):
        load(root)
    assert main(["verify", str(root)]) == 1
    assert main(["verify", "--trust", key.public, str(root)]) == 0


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff\xfe", b"[]", b'{"keys":5,"heads":{}}', b'{"keys":[],"heads":{"a":[1]}}']
)
def test_damaged_pins_are_not_no_pins(tmp_path: Path, user: User, text: bytes) -> None:
    root = tmp_path / "store"
    save(root, 1, run="name")
    known = user.be("first") / "known/name.json"
    known.write_bytes(text)
    with pytest.raises(UntrustedError, match=r"name\.json is damaged"):
        load(root)


# Lost and new keys


def test_a_lost_key_does_not_stop_saving(tmp_path: Path, user: User, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "store"
    save(root, 1, run="name")
    user.be("reader")
    assert load(root) == 1
    user.be("first")
    key = user.be("first") / "keys/name.pem"
    key.unlink()
    with pytest.warns(TrustWarning, match="signed by another key"):
        save(root, 2)
    new = SigningKey.load(key).public
    assert load(root) == 2  # the private half is here
    save(root, 3)
    for name in ("first", "reader", "nobody"):
        user.be(name)
        assert main(["verify", str(root)]) == 1
        assert new in capsys.readouterr().out
    user.be("reader")
    for call in (load, restore, lambda root: save(root, 4)):
        with pytest.raises(UntrustedError, match=f"--trust {new}"):
            call(root)
    user.be("nobody")
    assert load(root) == 3
    assert main(["verify", str(root)]) == 1  # one look does not make it trusted
    for name in ("first", "reader", "nobody"):
        user.be(name)
        assert main(["verify", "--trust", new, str(root)]) == 0
        assert main(["verify", str(root)]) == 0
        assert load(root) == 3


def test_who_holds_the_new_key_is_not_stopped_by_trust(
    tmp_path: Path, user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TIERCKPT_TRUST of a whole cluster names the old key; restarts must go on saving all the same."""
    root = tmp_path / "store"
    old = key_file(tmp_path / "old.pem")
    key_file(tmp_path / "new.pem")
    save(root, 1, key=tmp_path / "old.pem")
    monkeypatch.setenv("TIERCKPT_TRUST", old.public)
    monkeypatch.setenv("TIERCKPT_KEY", str(tmp_path / "new.pem"))
    with pytest.warns(TrustWarning):
        save(root, 2)
    save(root, 3)
    assert load(root) == 3
    monkeypatch.delenv("TIERCKPT_KEY")
    with pytest.raises(UntrustedError):
        load(root)


def test_an_endorsed_key_needs_no_trust(tmp_path: Path, user: User) -> None:
    root = tmp_path / "store"
    old, new = key_file(tmp_path / "old.pem"), key_file(tmp_path / "new.pem")
    save(root, 1, key=tmp_path / "old.pem")
    user.be("reader")
    assert load(root) == 1
    user.be("first")
    Store.open(DiskPlace(root)).publish(lambda chain: chain.introduce(new.public), old)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(root, 2, key=tmp_path / "new.pem")
    user.be("reader")
    assert load(root) == 2
    assert problems(root) == []
    assert problems(root, trust=old.public) == []
    user.be("nobody")
    assert problems(root) == []
    assert main(["verify", "--trust", old.public, str(root)]) == 0


# Where keys are kept


def test_a_private_key_is_for_its_owner_only(tmp_path: Path, user: User) -> None:
    """Whatever the umask."""
    before = os.umask(0)
    try:
        save(tmp_path / "store", 1, run="name")
        assert main(["keygen", str(tmp_path / "key")]) == 0
    finally:
        os.umask(before)
    own = user.be("first") / "keys/name.pem"
    assert stat.S_IMODE(own.stat().st_mode) == 0o600
    assert stat.S_IMODE(own.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_a_given_key_is_used(tmp_path: Path, user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    key = key_file(tmp_path / "key.pem")
    monkeypatch.setenv("TIERCKPT_KEY", str(tmp_path / "key.pem"))
    save(tmp_path / "store", 1, run="name")
    assert {link.key for link in forge.read_chain(tmp_path / "store").links} == {key.public}
    assert not (user.be("first") / "keys").exists()


@pytest.mark.parametrize("what", ["missing", "folder", "empty", "public"])
def test_a_given_key_that_is_none(tmp_path: Path, user: User, what: str) -> None:
    path = tmp_path / "key.pem"
    if what == "folder":
        path.mkdir()
    elif what == "empty":
        path.write_bytes(b"")
    elif what == "public":
        SigningKey.generate().write_public(path)
    with pytest.raises(StoreError, match=r"key\.pem"):
        save(tmp_path / "store", 1, key=path)


@pytest.mark.parametrize("how", ["a file", "missing"])
def test_a_folder_for_keys_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """Saving and loading go on, each start with a key of its own, and everybody is told."""
    root = tmp_path / "store"
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CONFIG_HOME", {"a file": str(tmp_path / "file"), "missing": "/proc/nowhere"}[how])
    with pytest.warns(TrustWarning, match="lives in this process only"):
        save(root, 1)
    assert load(root) == 1
    assert main(["verify", str(root)]) == 0
    with pytest.warns(TrustWarning) as told:
        save(root, 2)
    assert any("signed by another key" in str(warning.message) for warning in told)
    assert load(root) == 2
    assert restore(root) is not None
    capsys.readouterr()
    assert main(["verify", str(root)]) == 1
    assert "without the endorsement" in capsys.readouterr().out


def save_as_nobody(rank: int, root: str, home: str) -> list[str]:
    """In a container whose HOME belongs to somebody else."""
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    os.environ.pop("XDG_CONFIG_HOME", None)
    os.environ["HOME"] = home
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        save(Path(root), 1)
        assert load(Path(root)) == 1
        assert tierckpt.verify(root).ok
    return [str(warning.message) for warning in told if issubclass(warning.category, TrustWarning)]


def test_a_home_that_may_not_be_entered() -> None:
    with tempfile.TemporaryDirectory(prefix="tierckpt-test-") as base:
        Path(base).chmod(0o777)
        home = Path(base, "home")
        home.mkdir(mode=0)
        try:
            (told,) = run_ranks(save_as_nobody, 1, f"{base}/store", str(home), group=False)
        finally:
            home.chmod(0o700)
    assert len(told) == 1
    assert "lives in this process only" in told[0]


# C102: what verification says


def c102(root: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, list[dict[str, str]]]:
    capsys.readouterr()
    status = main(["verify", "--json", "--all", *options, str(root)])
    return status, json.loads(capsys.readouterr().out)["problems"]


def test_c102_extra_files(sample: Sample, capsys: pytest.CaptureFixture[str]) -> None:
    assert c102(sample.root, capsys) == (0, [])
    shard = "g0001/s000000000030/shard-00000.safetensors"
    (sample.root / "stray").write_bytes(b"(a)")
    (sample.root / "link").symlink_to(shard)
    status, found = c102(sample.root, capsys)
    assert status == 1
    assert [problem["kind"] for problem in found] == ["foreign", "foreign"]
    assert f"{sample.root}/link " in found[0]["message"]
    assert f"{sample.root}/stray " in found[1]["message"]
    assert c102(sample.root, capsys, "--allow-extra") == (0, [])


@pytest.mark.parametrize(
    ("case", "kind", "name"),
    [
        ("delete", "incomplete", "g0001/s000000000030/shard-00001.safetensors"),
        ("rename", "incomplete", "g0001/s000000000030/shard-00001.safetensors"),
        ("flip", "damaged", "g0001/s000000000030/shard-00001.safetensors"),
        ("signature of another step", "untrusted", "chain/000000000004.json"),
        ("other key", "untrusted", "chain/000000000000.json"),
        ("no signature", "damaged", "chain/000000000004.json"),
        ("empty signature", "damaged", "chain/000000000004.json"),
    ],
)
def test_c102_damage(sample: Sample, capsys: pytest.CaptureFixture[str], case: str, kind: str, name: str) -> None:
    path = sample.own(name)
    if case == "delete":
        path.unlink()
    elif case == "rename":
        path.rename(path.with_name("shard-00003.safetensors"))
    elif case == "flip":
        data = bytearray(path.read_bytes())
        data[5000] ^= 1
        path.write_bytes(data)
    elif case == "other key":
        forge.sign_again(sample.root, SigningKey.generate())
    else:
        other = json.loads((sample.root / "chain/000000000003.json").read_bytes())["signature"]
        changed = {"signature of another step": other, "no signature": ..., "empty signature": ""}[case]
        path.write_bytes(forge.document(path.read_bytes(), signature=changed))
    status, found = c102(sample.root, capsys)
    assert status == 1
    assert {"kind": kind, "named": True} in [{"kind": p["kind"], "named": name in p["message"]} for p in found], found
    assert status == c102(sample.root, capsys, "--allow-extra")[0]
    if name.endswith(".safetensors"):  # an older step is still there
        found_state = template()
        with pytest.warns(RuntimeWarning, match="not restored"):
            assert tierckpt.load(found_state, sample.root).step == STEPS[-2]
        assert same(found_state, STEPS[-2])
    else:
        with pytest.raises(tierckpt.TierckptError, match=name):
            tierckpt.load(template(), sample.root)


def test_pins_of_temporary_stores_that_are_gone_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of any other store stay: it may be one that is not mounted just now."""
    temporary, elsewhere = tmp_path / "tmp", tmp_path / "elsewhere"
    for folder in (temporary, elsewhere):
        folder.mkdir()
    temporary.chmod(0o1777)
    monkeypatch.setattr(trust_module, "_temporary_folders", lambda: [str(temporary)])
    known = Path(os.environ["XDG_CONFIG_HOME"], "tierckpt", "known")
    for number in range(20):
        save(temporary / f"s{number}", 1, run=f"gone-{number}")
        shutil.rmtree(temporary / f"s{number}")
        assert len(list(known.iterdir())) <= 2
    for root, name in ((elsewhere / "s", "unmounted"), (temporary / "kept", "kept"), (temporary / "two", "two")):
        save(root, 1, run=name)
    shutil.copytree(temporary / "two", elsewhere / "two")
    tierckpt.read(elsewhere / "two")
    shutil.rmtree(temporary / "two")
    shutil.rmtree(elsewhere / "s")
    temporary.chmod(0o777)  # where anybody may remove what is another's, nothing is forgotten
    save(temporary / "t", 1, run="open")
    shutil.rmtree(temporary / "t")
    save(elsewhere / "u", 1, run="last")
    assert {path.stem for path in known.iterdir()} == {"unmounted", "kept", "two", "open", "last"}
