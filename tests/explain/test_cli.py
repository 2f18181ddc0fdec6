"""``tileops explain``: what it prints, writes and returns."""

from __future__ import annotations

import json

import pytest

from tests.explain import golden
from tests.explain.test_golden import fresh  # noqa: F401
from tileops.cli import main

EAGER = ["--backend", "eager"]


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
        ([f"{golden.__file__}:whole", "--input", "4:f12"], "dtype 'f12'; accepted are f16"),
        ([f"{golden.__file__}:whole", "--input", "4:f32:nowhere"], "nowhere"),
    ],
)
def test_refuses(arguments, words, capsys):
    assert main(["explain", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_refuses_an_unknown_condition(capsys):
    with pytest.raises(SystemExit) as ended:
        run("whole", "--fail-on", "slow")
    assert ended.value.code == 2
    assert "accepted are break, recompile, unfused" in capsys.readouterr().err


def test_further_calls(capsys):
    options = ["--input", "4x4", "--then", "5x4", "--then", "6x4", *EAGER, "--show", "run"]
    assert run("whole", *options, "--fail-on", "recompile") == 1
    printed = capsys.readouterr().out
    assert "2 graphs, 0 breaks, 1 recompilation" in printed
    assert "Capture" not in printed


def test_a_stage_that_is_none(capsys):
    with pytest.raises(SystemExit, match="2"):
        run("whole", "--input", "4x4", "--show", "fusion")
    assert "'fusion'; accepted are capture, breaks" in capsys.readouterr().err
