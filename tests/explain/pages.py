"""Pages whose outputs come from running them: each Python block is a script and each block of shell a
command; the text block below it is what it prints.

A page's scripts run one after the other in one fresh process, each in a namespace of its own. What
differs from run to run or from machine to machine is written ``…``; :func:`settled` says what that is.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.contract.fresh import ROOT, clean_environment

RELEASE = (2, 13)
"""Of torch, with which the pages were written: others print other names and other code."""
WIDTH = "96"
_SCRIPT = re.compile(
    r"^```(?P<language>python|sh)\n(?P<code>(?:# (?P<name>\w+\.py)\n|tileops |python -m ).*?)^```\n"
    r"\n```text\n(?P<output>.*?)^```\n",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Script:
    name: str
    """``.py`` for Python, ``.sh`` for one command."""
    code: str
    output: str
    """What the page says that it prints."""


def scripts(page: Path) -> list[Script]:
    """Of a page, in order: Python blocks that begin with a comment of their name, and commands."""
    found = _SCRIPT.finditer(page.read_text(encoding="utf-8"))
    return [
        Script(each["name"] or f"{number}.sh", each["code"], each["output"])
        for number, each in enumerate(found)
    ]


def run(chosen: list[Script], **environment: str) -> dict[str, str]:
    """What each prints, settled. Fails with the traceback of the first that raises."""
    with tempfile.TemporaryDirectory(prefix="tileops-page-") as folder:
        for script in chosen:
            Path(folder, script.name).write_text(script.code, encoding="utf-8")
        job = Path(folder, "job.json")
        job.write_text(json.dumps([script.name for script in chosen]))
        env = clean_environment(folder, COLUMNS=WIDTH, PYTHONHASHSEED="0", **environment)
        done = subprocess.run(
            [sys.executable, "-m", "tests.explain.pages", str(job)],
            env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        printed = json.loads(Path(folder, "printed.json").read_text())
        return {name: settled(text, folder) for name, text in printed.items()}


def settled(text: str, folder: str = "") -> str:
    """``text`` without what another run, machine or installation would print otherwise."""
    if folder:
        text = text.replace(f"{folder}/", "")
    text = re.sub(r"/\S*?/site-packages/", "", text)
    text = re.sub(r"\b0x[0-9a-f]{6,}\b", "0x…", text)
    text = re.sub(r"\b\d+\.\d+ (µs|ms|s|times)\b", r"… \1", text)  # clocks
    text = re.sub(r"\b(\w+\.(?:cpp|h)):\d+", r"\1", text)  # torch's own sources
    text = re.sub(r"@[0-9a-f]{8}(\+[0-9a-f]{8})?'", "@…'", text)  # an entry's stamp
    text = re.sub(r"\b(torch \d+\.\d+)\.\S+?(?=[,)])", r"\1", text)
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n"


def release() -> tuple[int, int]:
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def skip_where_outputs_differ(script: Script) -> None:
    """The scripts ran; whether they printed what is shown says nothing here, and the summary says why."""
    import pytest
    import torch
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    if release() != RELEASE:
        pytest.skip(
            f"the page shows torch {'.'.join(map(str, RELEASE))}, this is {torch.__version__}"
        )
    if "Vec" in script.output and "avx2" not in map(str, valid_vec_isa_list()):
        pytest.skip("the page shows C++ for AVX2, which this machine lacks")
    if "on_a_card" in script.code and torch.cuda.is_available():
        pytest.skip(
            "the page shows a described card; tests/gpu/test_tour.py compares with a real one"
        )


def write(page: Path) -> None:
    """Put what the scripts print today into the page."""
    assert release() == RELEASE, "the pages are of another release of torch"
    printed = iter(run(scripts(page)).values())

    def anew(match: re.Match[str]) -> str:
        return f"```{match['language']}\n{match['code']}```\n\n```text\n{next(printed)}```\n"

    page.write_text(_SCRIPT.sub(anew, page.read_text(encoding="utf-8")), encoding="utf-8")


# ---- in the process of its own -------------------------------------------------------------------


def _run_here(job: Path) -> None:
    import torch
    import torch._inductor.config as inductor

    from tileops.backend import DeviceFacts, register_device_facts

    # The same C++ on every x86-64 machine: 256-bit vectors, one thread. The same products, whoever made it.
    inductor.cpp.simdlen, inductor.cpp.threads = 256, 1
    register_device_facts("cpu", lambda device: DeviceFacts("cpu"))
    printed = {}
    for name in json.loads(job.read_text()):
        path = job.parent / name
        torch._dynamo.reset()
        torch.manual_seed(0)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            (_python if name.endswith(".py") else _command)(path)
        printed[name] = out.getvalue()
    (job.parent / "printed.json").write_text(json.dumps(printed))


def _python(path: Path) -> None:
    code = compile(path.read_text(encoding="utf-8"), path, "exec")
    exec(code, {"__name__": "__main__", "__file__": str(path)})


def _command(path: Path) -> None:
    """As a shell would, in this process: torch is loaded once. A status that is not 0 is printed."""
    from tileops.cli import main

    program, *words = shlex.split(path.read_text(encoding="utf-8").replace("\\\n", " "))
    if program == "python":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        status = main(words)
    print(
        *(line for line in errors.getvalue().splitlines() if line.startswith("tileops ")), sep="\n"
    )
    if status:
        print(f"exit status {status}")


if __name__ == "__main__":
    _run_here(Path(sys.argv[1]))
