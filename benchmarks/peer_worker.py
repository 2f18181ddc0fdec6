"""The library of the same public surface, in a process of its own: both are named ``tileops``.

``benchmarks/beside_peer.py`` starts it with that library on the path and speaks to it in lines of JSON:
``{"load": FILE}`` captures the calls that a file holds, ``{"sample": true}`` replays them, and every
line is answered by one. ``peer_worker.py --warm FILE N`` compiles a list of calls in N processes.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import multiprocessing
import sys
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.timing import sampler

Case = dict[str, Any]
"""``module``, ``op``, ``params``, and ``sets``: of each set of inputs ``(args, kwargs)``."""


def built(case: Case) -> Any:
    op_class = getattr(importlib.import_module(case["module"]), case["op"])
    known = inspect.signature(op_class).parameters
    return op_class(**{name: value for name, value in case["params"].items() if name in known})


def load(path: str) -> tuple[Callable[[], float], list[torch.Tensor]]:
    """What samples the case, and the results on its first set of inputs."""
    case = torch.load(path, map_location="cuda", weights_only=False)
    op = built(case)
    args, kwargs = case["sets"][0]
    copies = [None if x is None else x.clone() for x in args]
    returned = op(*copies, **{n: None if x is None else x.clone() for n, x in kwargs.items()})
    results = returned if isinstance(returned, tuple) else (returned,)
    found = [result for result in results if isinstance(result, torch.Tensor)]
    works = [functools.partial(op, *args, **kwargs) for args, kwargs in case["sets"]]
    with torch.no_grad():
        return sampler(works), found


def warm(case: Case) -> str | None:
    """One call on zeros; what went wrong, if something did."""
    made = [
        {name: None if like is None else torch.zeros(*like[:1], dtype=like[1], device="cuda")
         for name, like in given.items()}
        for given in case["like"]
    ]  # fmt: skip
    try:
        built(case)(*made[0].values(), **made[1])
    except Exception as problem:
        return f"{case['op']}: {type(problem).__name__}: {problem}"[:300]
    finally:
        torch.cuda.empty_cache()
    return None


def serve() -> None:
    sample: Callable[[], float] | None = None
    answers = sys.stdout
    sys.stdout = sys.stderr  # what the library prints is no answer
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if "load" in asked:
                sample = None
                torch.cuda.empty_cache()
                sample, results = load(asked["load"])
                torch.save(results, asked["load"] + ".results")
                answer: dict[str, Any] = {"results": asked["load"] + ".results"}
            else:
                assert sample is not None
                answer = {"us": sample()}
        except Exception as problem:
            answer = {"error": f"{type(problem).__name__}: {problem}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--warm"]:
        cases = torch.load(sys.argv[2], weights_only=False)
        context = multiprocessing.get_context("spawn")
        with futures.ProcessPoolExecutor(int(sys.argv[3]), context) as pool:
            for problem in filter(None, pool.map(warm, cases)):
                print(f"  not compiled ahead: {problem}", flush=True)
    else:
        serve()


if __name__ == "__main__":
    main()
