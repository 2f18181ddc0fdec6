"""Bundles: one file from which a process takes every kernel, or nothing."""

from __future__ import annotations

import json
import warnings
from hashlib import sha256

import pytest
import torch

import tileops
from tests import fake_card
from tileops import BundleError, spec
from tileops.cli import main
from tileops.engine import record
from tileops.engine.cache import bundle as module
from tileops.engine.cache import folder, shelves, sources
from tileops.engine.cache.bundle import open_bundle, write_bundle
from tileops.engine.cache.entry import Stored
from tileops.engine.settings import settings
from tileops.norm import RMSNormFwdOp

HALF = torch.float16
H200 = "cuda:sm_90"


@pytest.fixture
def use_cache(tmp_path, monkeypatch):
    """``use_cache(name)`` makes this process use a cache directory, which begins empty."""

    def use(name: str, **environment: str):
        monkeypatch.setenv("TILEOPS_CACHE_DIR", str(tmp_path / name))
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        settings.cache_clear()
        return shelves.shelves().own

    monkeypatch.setattr(shelves, "_loaded", [])
    monkeypatch.setattr(folder, "_warned", set())
    yield use
    settings.cache_clear()


def prepare(*sizes, device=H200):
    def calls(x):
        for n in sizes:
            RMSNormFwdOp(normalized_shape=(n,))(x[:, :n].contiguous())

    return tileops.prepare(calls, spec(4, 256, dtype=HALF), device=device, progress=False)


@pytest.fixture
def made(tmp_path, use_cache):
    """A bundle of one kernel for sm_90, and the empty cache of another process."""
    use_cache("maker")
    path = tmp_path / "norm.bundle"
    manifest = tileops.bundle(path, prepare(64))
    assert manifest["architectures"] == ["sm_90"]
    use_cache("user")
    return path


def test_a_bundle_replaces_the_compiler(made, use_cache):
    before = record.compile_count()
    loaded = tileops.load_bundle(made)
    assert len(loaded.manifest["entries"]) == 1
    again = prepare(64)
    assert (again.compiled, again.found, again.kernels[0].origin) == (0, 1, "bundle")
    assert record.compile_count() == before
    assert shelves.shelves().own.rows() == []
    # By the environment, in a process that has not loaded it.
    use_cache("other", TILEOPS_BUNDLE=str(made))
    shelves._loaded.clear()
    assert prepare(64).kernels[0].origin == "bundle"
    # What is not in it is compiled.
    assert prepare(32).compiled == 1


def test_without_any_triton(made, monkeypatch):
    """A container that carries kernels need not carry a compiler."""
    from tileops.lib import machine_code

    monkeypatch.setattr(module, "triton_version", lambda: None)
    monkeypatch.setattr(machine_code, "triton_version", lambda: None)
    tileops.load_bundle(made)
    assert prepare(64).kernels[0].origin == "bundle"


def test_a_bundle_is_the_same_bytes(made, tmp_path, use_cache):
    use_cache("maker")
    tileops.bundle(tmp_path / "again", prepare(64))
    assert (tmp_path / "again").read_bytes() == made.read_bytes()


def test_what_goes_in(tmp_path, use_cache):
    use_cache("maker")
    one, two = prepare(64), prepare(64, 32, device="cuda:sm_80")

    def names(*given, **named):
        manifest = tileops.bundle(tmp_path / "b", *given, **named)
        return {row["name"].partition(".")[0] for row in manifest["entries"]}

    assert names() == one.keys | two.keys
    assert names(architectures=["sm_80"]) == two.keys
    assert names(one) == one.keys
    with pytest.raises(BundleError, match="holds no kernel for sm_100"):
        names(architectures=["sm_100"])
    shelves.shelves().own.clear()
    with pytest.raises(BundleError, match="is not in the cache any more"):
        names(one)
    with pytest.raises(BundleError, match="the cache holds no kernel to put into it"):
        names()


def test_kernels_of_an_older_text_stay_out(tmp_path, use_cache):
    own = use_cache("maker")
    current = prepare(64)
    (row,) = own.rows()
    stored = own.read(row.kind, row.key)
    own.replace(Stored("kernel", "0" * 64, {**stored.facts, "source": "1" * 64}, stored.payload))
    own.replace(Stored("kernel", "2" * 64, {**stored.facts, "triton": "3.0.0"}, stored.payload))
    own.replace(Stored("kernel", "3" * 64, {**stored.facts, "fn": "nowhere:kernel"}, b""))
    manifest = tileops.bundle(tmp_path / "b")
    assert [entry["name"] for entry in manifest["entries"]] == [
        f"{next(iter(current.keys))}.kernel"
    ]


# ---- refused, as a whole ---------------------------------------------------------------------------


def _manifest(**changes):
    """Change the manifest, and its checksum with it: a well-formed bundle of another make."""

    def change(data):
        first, _, rest = data.partition(b"\n")
        _, _, rest = rest.partition(b"\n")
        line, _, blobs = rest.partition(b"\n")
        manifest = json.loads(line)
        for key, value in changes.items():
            manifest[key] = value(manifest[key]) if callable(value) else value
        line = json.dumps(manifest).encode() + b"\n"
        return first + b"\n" + sha256(line).hexdigest().encode() + b"\n" + line + blobs

    return change


def _entry(**changes):
    return _manifest(entries=lambda rows: [{**rows[0], **changes}, *rows[1:]])


def _flip(place):
    return lambda data: data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


REFUSED = {
    "another version": (_manifest(tileops="9.9"), "made by tileops 9.9, and this is"),
    "another compiler": (_manifest(triton="2.0"), "compiled by Triton 2.0, and here is"),
    "another format": (lambda data: data.replace(b"bundle 1\n", b"bundle 7\n", 1), "format 7"),
    "no bundle": (lambda data: b"PK" + data, "it is no bundle"),
    "empty": (lambda data: b"", "it is no bundle"),
    "truncated": (lambda data: data[:-1], "entry .* is damaged"),
    "half a manifest": (lambda data: data[:200], "manifest is damaged"),
    "flipped manifest": (_flip(120), "manifest is damaged"),
    "flipped digest": (_flip(20), "manifest is damaged"),
    "flipped entry": (_flip(-10), "entry .* is damaged"),
    "longer": (lambda data: data + b"x", "something stands behind"),
    "a path as a name": (_entry(name="../../evil.kernel"), "'../../evil.kernel' is damaged"),
    "an absolute name": (_entry(name="/etc/passwd"), "is damaged"),
    "another name": (_entry(name=f"{'0' * 64}.kernel"), "it is the entry kernel"),
    "an offset": (_entry(offset=-5), "is damaged"),
    "overlapping": (_manifest(entries=lambda rows: rows * 2), "is damaged"),
}


@pytest.mark.parametrize(("damage", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_bundle_is_used_whole_or_not_at_all(made, monkeypatch, capsys, damage, reason):
    made.write_bytes(damage(made.read_bytes()))
    with pytest.raises(BundleError, match=reason):
        tileops.load_bundle(made)
    assert shelves.shelves().bundles == []
    assert prepare(64).compiled == 1
    monkeypatch.setenv("TILEOPS_BUNDLE", str(made))
    settings.cache_clear()
    with pytest.raises(BundleError, match=reason):
        prepare(64)
    assert main(["cache", "list"]) == 1
    assert capsys.readouterr().err.startswith(f"tileops: bundle {made}: ")


def test_a_bundle_that_is_not_there(tmp_path, use_cache):
    use_cache("user")
    with pytest.raises(BundleError, match="cannot be read: No such file"):
        tileops.load_bundle(tmp_path / "none")
    with pytest.raises(BundleError, match="cannot be read: Is a directory"):
        tileops.load_bundle(tmp_path)
    prepared = prepare(64)
    with pytest.raises(BundleError, match="cannot be written"):
        tileops.bundle(tmp_path / "no" / "folder", prepared)


def test_another_text_of_a_kernel_is_said(made, use_cache):
    opened = open_bundle(made)
    (name,) = opened.entries
    kind_key = name.partition(".")[0]
    stored = opened.read("kernel", kind_key)
    other = Stored("kernel", "9" * 64, {**stored.facts, "source": "0" * 64}, stored.payload)
    write_bundle(made, [other])
    tileops.load_bundle(made)
    with pytest.warns(
        RuntimeWarning, match=r"another text of tileops\.norm\.kernels\.rows_triton:norm"
    ):
        assert prepare(64).compiled == 1


CARD = """
from tests.fake_card import believe, block_triton
import torch, tileops
from tileops.norm import RMSNormFwdOp
from tileops.engine import record
{first}
believe()
{then}
op = RMSNormFwdOp(normalized_shape=(64,))
print(op.prepare(tileops.spec(4, 64, dtype=torch.float16)).compiled, record.compile_count())
"""


@pytest.mark.skipif(not fake_card.available, reason="needs a C compiler")
def test_the_card_decides(made, tmp_path, use_cache):
    """On the card that it is for, nothing is compiled; on another, it is refused with the reason."""
    library = fake_card.build_fake(tmp_path)
    load = f"tileops.load_bundle({str(made)!r})"
    done = fake_card.run_child(CARD.format(first=f"block_triton(); {load}", then=""), library)
    assert done.stdout == "0 0\n", done.stderr
    use_cache("maker")
    prepare(64, device="cuda:sm_80")
    tileops.bundle(made, architectures=["sm_80"])
    reason = f"bundle {made}: it is for sm_80, and this card is sm_90; make one with"
    for parts in ({"first": load, "then": ""}, {"first": "", "then": load}):
        done = fake_card.run_child(CARD.format(**parts), library)
        assert done.returncode == 1
        assert reason in done.stderr


# ---- the command --------------------------------------------------------------------------------------


def test_the_command(tmp_path, use_cache, capsys, monkeypatch):
    own = use_cache("maker")
    script = tmp_path / "model_of_a_test.py"
    script.write_text(
        "from tileops.norm import RMSNormFwdOp\nop = RMSNormFwdOp(normalized_shape=(64,))\n"
        "def forward(x, weight=None):\n    return op(x, weight)\n"
    )
    path = tmp_path / "b"
    call = ["bundle", "-o", str(path), "--arch", "sm_90", "--arch", "sm_80:64", "--json"]
    inputs = ["--input", "4x64:f16", "--input", "weight=64:float16"]
    assert main([*call, "--call", f"{script}:forward", *inputs]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["architectures"] == ["sm_80", "sm_90"]
    op = [
        "--op",
        "RMSNormFwdOp(normalized_shape=(64,))",
        "--input",
        "4x64:f16",
        "--input",
        "64:f16",
    ]
    assert main([*call, *op]) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert len(own.rows()) == 2
    assert main([*call[:3], *op, "--arch", "sm_90"]) == 0
    assert "1 entries for sm_90" in capsys.readouterr().out
    for wrong, status, message in (
        (["--op", "NoSuchOp()"], 2, "no op is named 'NoSuchOp'"),
        (["--op", "RMSNormFwdOp(oops"], 2, "is not of the form"),
        (["--op", "SoftmaxFwdOp(dim=-1)", "--input", "4y4:f16"], 2, "accepted is SHAPE:DTYPE"),
        (["--call", "nowhere.py:forward"], 2, "accepted is FILE.py:NAME"),
        (["--arch", "sm_75"], 2, "known architectures"),
        (["--arch", "sm_100"], 1, "holds no kernel for sm_100"),
        (op[:-1] + ["32:f16"], 1, "argument 'weight'"),
    ):
        assert main(["bundle", "-o", str(path), *wrong]) == status, wrong
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["bundle", "-o", str(path), "--input", "4:f16"])
    assert ended.value.code == 2


def test_looking_after_the_cache(use_cache, capsys, monkeypatch):
    own = use_cache("maker", TILEOPS_CACHE_READONLY="/nowhere")
    prepare(64, 32)
    capsys.readouterr()

    def run(*arguments, status=0):
        assert main(["cache", *arguments, "--json"]) == status
        return json.loads(capsys.readouterr().out)

    assert run("path")["path"] == str(own.path)
    assert run("path")["readonly"] == ["/nowhere"]
    rows = run("list")
    assert {row["name"] for row in rows} == {"tileops.norm.kernels.rows_triton:normalize_rows"}
    assert run("verify") == {"entries": 2, "damaged": {}}
    victim = own.path / f"{rows[0]['key']}.kernel"
    victim.write_bytes(b"")
    assert list(run("verify", status=1)["damaged"]) == [str(victim)]
    assert run("prune")["damaged"] == [victim.name]
    assert len(run("prune", "--limit", "10")["evicted"]) == 1
    prepare(64)
    assert run("clear") == {"removed": 1}
    assert main(["cache", "prune", "--limit", "much"]) == 2
    for action in ("path", "list", "verify", "prune", "clear"):
        assert main(["cache", action]) == 0
    monkeypatch.setattr(shelves.shelves(), "own", None)
    for action in ("path", "list", "verify", "prune", "clear"):
        assert main(["cache", action]) == 2
    assert "set TILEOPS_CACHE_DIR" in capsys.readouterr().err
    sources.forget()


@pytest.mark.parametrize("manifest", [b"[]\n", b"{}\n", b"no json\n"])
def test_a_manifest_that_makes_no_sense(tmp_path, manifest):
    path = tmp_path / "odd.bundle"
    digest = sha256(manifest).hexdigest().encode()
    path.write_bytes(b"tileops bundle 1\n" + digest + b"\n" + manifest)
    with pytest.raises(BundleError, match="makes no sense"):
        open_bundle(path)


def test_a_bundle_of_something_else(tmp_path):
    with pytest.raises(TypeError, match="what prepare returned"):
        tileops.bundle(tmp_path / "x", "a word")


def test_commands_on_a_directory_that_is_not_used(tmp_path, monkeypatch, capsys):
    given = tmp_path / "given"
    monkeypatch.setenv("TILEOPS_CACHE_DIR", str(given))
    for make in (
        lambda: given.write_text("a file"),
        lambda: (given.unlink(), given.mkdir(), given.chmod(0o777)),
    ):
        make()
        settings.cache_clear()
        for action in ("list", "verify", "prune", "clear"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert main(["cache", action]) == 2
            assert str(given) in capsys.readouterr().err
    settings.cache_clear()


def test_what_prune_cannot_remove_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TILEOPS_CACHE_DIR", str(tmp_path))
    settings.cache_clear()
    kept = tmp_path / ("0" * 64 + ".kernel") / "inside"
    kept.mkdir(parents=True)
    assert main(["cache", "prune"]) == 1
    assert "could not be removed" in capsys.readouterr().out
    assert kept.is_dir()
    settings.cache_clear()
