"""``tileops explain``: what it prints, writes and returns."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.explain import golden, raises
from tests.explain.test_golden import fresh  # noqa: F401
from tileops.cli import main

EAGER = ["--backend", "eager"]


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    """The command puts a script's folder first, for good: its process is the script's."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def run(function, *options):
    return main(["explain", f"{golden.__file__}:{function}", *options])


def test_shows_and_succeeds(capsys):
    assert run("whole", "--input", "4x4", *EAGER, "--fail-on", "break,recompile") == 0
    assert "1 graph, 0 breaks" in capsys.readouterr().out


def test_fails_on_a_break(capsys, tmp_path):
    written = tmp_path / "report.json"
    options = ["--input", "4x4:f64", *EAGER, "--fail-on", "break", "--json", str(written)]
    assert run("prints", *options) == 1
    assert "tileops explain: --fail-on break: 1" in capsys.readouterr().err
    report = json.loads(written.read_text())
    assert report["compilations"][0]["capture"]["nodes"][0]["dtype"] == "f64"


def test_prints_json(capsys):
    assert (
        run("decomposes", "--input", "3x4", "--input", "5x4", "--input", "5", *EAGER, "--json", "-")
        == 0
    )
    assert json.loads(capsys.readouterr().out)["title"] == "decomposes"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([f"{golden.__file__}:nothing"], "has no callable 'nothing'; it has "),
        (["no_such_file.py:whole"], "accepted is FILE:NAME"),
        ([f"{golden.__file__}:whole", "--input", "4xa"], "shape '4xa'"),
        (
            [f"{golden.__file__}:whole", "--then", "4,x"],
            "--then 'x': shape 'x'; accepted is such as",
        ),
        ([f"{golden.__file__}:whole", "--input", "4:f12"], "dtype 'f12'; accepted are f16"),
        ([f"{golden.__file__}:whole", "--input", "4:f32:nowhere"], "nowhere"),
        ([f"{golden.__file__}:line_of"], "has no callable 'line_of'; it has "),
        ([golden.__file__], "accepted is FILE:NAME"),
        ([f"{raises.__file__}:Scaled"], "'Scaled' of "),
        ([f"{golden.__file__}:whole", "--json", "."], "--json '.': this is a folder"),
        ([f"{golden.__file__}:whole", "--backend", "gcc"], "--backend 'gcc'; accepted are "),
        ([f"{golden.__file__}:whole", "--mode", "fast"], "--mode 'fast'; accepted are default, "),
        ([f"{golden.__file__}:whole", "--json", "no/folder/x"], "there is no folder 'no/folder'"),
        (
            [f"{golden.__file__}:whole", "--html", "no/folder/x"],
            "--html 'no/folder/x': there is no folder",
        ),
    ],
)
def test_refuses(arguments, words, capsys):
    assert main(["explain", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("def f(:\n", "SyntaxError"),
        ("raise SystemExit(0)\n", "SystemExit"),
        ("import no_such_module_at_all\n", "No module named 'no_such_module_at_all'"),
    ],
)
def test_a_script_that_cannot_be_run(text, words, tmp_path, capsys):
    script = tmp_path / "broken_script.py"
    script.write_text(text)
    assert main(["explain", f"{script}:f"]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert f"{script} cannot be run" in told
    assert "importlib" not in told


def test_a_call_that_raises_shows_what_was_seen(capsys, tmp_path):
    written = tmp_path / "report.json"
    options = ["--input", "2x3", *EAGER, "--json", str(written), "--fail-on", "break"]
    assert main(["explain", f"{raises.__file__}:after_a_break", *options]) == 2
    shown = capsys.readouterr()
    assert f"break: {Path(raises.__file__).name}:6" in shown.out
    assert "raised ValueError: no luck with (2, 3)" in shown.err
    assert f'File "{raises.__file__}", line 7' in shown.err
    assert "eval_frame" not in shown.err  # torch's frames and ours tell the user nothing
    assert json.loads(written.read_text())["compilations"][0]["breaks"][0]["kind"] == "print"


def test_a_call_that_exits(capsys):
    assert main(["explain", f"{raises.__file__}:exits", "--input", "2x3", *EAGER]) == 2
    shown = capsys.readouterr()
    assert shown.out.startswith("exits ")
    assert "raised SystemExit: 0" in shown.err


def test_a_terminal_without_the_signs(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert run("whole", "--input", "4x4", "--backend", "aot_eager") == 0
    assert rb"AutogradCPU \u2192" in written.getvalue()


def test_status_where_the_reader_has_left():
    """1 would say that there is a break."""
    command = [sys.executable, "-m", "tileops", "explain", f"{golden.__file__}:whole", *EAGER]
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run([*command, "--input", "4x4"], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert ended.returncode == 0, ended.stderr


def test_a_file_that_cannot_be_written(capsys, tmp_path):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    assert run("whole", "--input", "4x4", *EAGER, "--json", str(full)) == 2
    assert "No space left" in capsys.readouterr().err


def test_a_script_with_the_name_of_a_loaded_module(tmp_path, capsys):
    import inspect

    script = tmp_path / "inspect.py"
    script.write_text("def f(x):\n    return x + 1\n")
    assert main(["explain", f"{script}:f", "--input", "3", *EAGER]) == 0
    assert sys.modules["inspect"] is inspect
    assert "1 graph" in capsys.readouterr().out


def test_measures(capsys):
    assert run("whole", "--input", "4x4", "--measure", *EAGER, "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["measured"]["call_us"] > 0


def test_refuses_an_unknown_condition(capsys):
    with pytest.raises(SystemExit) as ended:
        run("whole", "--fail-on", "slow")
    assert ended.value.code == 2
    assert "accepted are break, recompile, unfused" in capsys.readouterr().err


def test_a_library_s_kernel_fails_nothing(capsys):
    """Products cannot be fused into, and nobody could mend that."""
    options = ["--input", "8x8", "--input", "8x8", "--show", "inductor", "--fail-on", "unfused"]
    assert run("interrupted", *options) == 0
    assert "not fused: 2 pairs parted by" in capsys.readouterr().out


def test_further_calls(capsys):
    options = ["--input", "4x4", "--then", "5x4", "--then", "6x4", *EAGER, "--show", "run"]
    assert run("whole", *options, "--fail-on", "recompile") == 1
    printed = capsys.readouterr().out
    assert "2 graphs, 0 breaks, 1 recompilation" in printed
    assert "Capture" not in printed


def test_status_where_nothing_was_compiled(capsys, tmp_path):
    """A check that can find nothing would pass for ever."""
    script = tmp_path / "no_tensors.py"
    script.write_text("def f(x):\n    return 3\n")
    assert main(["explain", f"{script}:f", "--input", "2", *EAGER, "--fail-on", "break"]) == 2
    shown = capsys.readouterr()
    assert "NOTHING WAS COMPILED" in shown.out
    assert "nothing was compiled: Dynamo read the function" in shown.err


def test_what_a_script_prints_is_no_json(capsys):
    assert run("prints", "--input", "2", *EAGER, "--json", "-") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["title"] == "prints"
    assert "between" in shown.err


def test_a_part_of_a_model(capsys):
    assert main(["explain", f"{raises.__file__}:net.first", "--input", "2x3", *EAGER]) == 0
    assert capsys.readouterr().out.startswith("Scaled ")
    assert main(["explain", f"{raises.__file__}:net.third", "--input", "2x3", *EAGER]) == 2
    assert "no callable 'net.third'" in capsys.readouterr().err


def test_a_call_that_raises_at_once(capsys):
    assert run("interrupted", "--input", "2x3", *EAGER) == 2
    shown = capsys.readouterr()
    assert "NOTHING WAS COMPILED: the call raised before anything was." in shown.out
    assert "missing 1 required positional argument" in shown.err


def test_a_stage_that_is_none(capsys):
    with pytest.raises(SystemExit, match="2"):
        run("whole", "--input", "4x4", "--show", "fusion")
    assert "'fusion'; accepted are capture, breaks" in capsys.readouterr().err
