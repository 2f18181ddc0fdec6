"""``torch.compile(..., backend="tileops")``: registered, configured and followed as Inductor is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

import tileops
from tests.contract.fresh import run_fresh
from tests.rewriting import rewritten
from tileops.backend import register_kernel_builder
from tileops.elementwise import SiLUAndMulFwdOp
from tileops.fusion import backend, last_report
from tileops.norm import FusedAddRMSNormFwdOp, RMSNormFwdOp
from tileops.rope import RoPEFwdOp


@pytest.fixture(autouse=True)
def reset():
    torch._dynamo.reset()


def compiled(function, **more):
    return torch.compile(function, backend=backend, fullgraph=True, **more)


def kernels(function, *inputs, **more):
    """How many kernels Inductor writes for a call that is compiled anew, and its result."""
    torch._dynamo.reset()
    autograd = torch._functorch.config.patch(enable_autograd_cache=False)
    with config.patch(fx_graph_cache=False), autograd:
        result, codes = run_and_get_code(compiled(function, **more), *inputs)
    return sum(code.count("cpp_pybinding(") for code in codes), result


# ---- one kernel for a chain ---------------------------------------------------------------------


def test_a_norm_and_a_rotation_are_one_kernel():
    norm, rope, w = FusedAddRMSNormFwdOp(), RoPEFwdOp(input_layout="1d"), torch.randn(64)

    def chain(x, r):
        y, total = norm(x, r, w)
        return rope(y), total

    x, r = torch.randn(5, 64), torch.randn(5, 64)
    count, result = kernels(chain, x, r)
    for given, wanted in zip(result, chain(x, r), strict=True):
        torch.testing.assert_close(given, wanted)
    assert count == 1
    assert kernels(chain, x, r, options={"tileops.fusion": "never"})[0] == 0  # both keep their own


def test_a_gated_activation_and_a_quantisation_are_one_kernel():
    silu = SiLUAndMulFwdOp()

    def chain(x):
        y = silu(x)
        scale = y.abs().amax(-1, keepdim=True) / 127.0
        return (y / scale).round().clamp(-127, 127).to(torch.int8), scale

    x = torch.randn(6, 128)
    count, (q, scale) = kernels(chain, x)
    gate, up = x.double().chunk(2, -1)
    exact = F.silu(gate) * up
    torch.testing.assert_close(q * scale.double(), exact, rtol=0, atol=float(scale.max()) * 0.51)
    assert count == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_step_of_a_chain(dtype):
    """Loss and gradients, against the same in float64."""
    norm, silu = RMSNormFwdOp(32, eps=1e-6), SiLUAndMulFwdOp()

    def step(x, w, m):
        return silu(F.linear(norm(x, w) * 1.5, m)).float().square().mean()

    x, w, m = torch.randn(7, 32), torch.randn(32), torch.randn(32, 32) / 6
    given = [t.to(dtype).requires_grad_() for t in (x, w, m)]
    loss = compiled(step)(*given)
    found = torch.autograd.grad(loss, given)
    assert [d["op"] for d in last_report().of("inlined")] == ["RMSNormFwdOp", "SiLUAndMulFwdOp"]

    exact = [t.detach().double().requires_grad_() for t in given]
    gate, up = F.linear(F.rms_norm(exact[0], (32,), exact[1], 1e-6) * 1.5, exact[2]).chunk(2, -1)
    wanted = torch.autograd.grad((F.silu(gate) * up).square().mean(), exact)
    rtol = 1e-4 if dtype is torch.float32 else 5e-2
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.double() - theirs).norm() <= rtol * theirs.norm()


# ---- as Inductor is configured ------------------------------------------------------------------


def test_mode_and_options_reach_inductor():
    norm, x = RMSNormFwdOp(8), torch.randn(4, 8)
    seen = []

    def look(graph):
        seen.append((config.max_autotune, config.triton.cudagraphs, graph))

    with config.patch(post_grad_custom_post_pass=look):
        compiled(lambda x: norm(x) * 2, mode="max-autotune")(x)
        compiled(lambda x: norm(x) * 3, mode="reduce-overhead")(x)
        compiled(lambda x: norm(x) * 4, options={"max_autotune": True})(x)
    assert [(a, b) for a, b, _ in seen] == [(True, True), (False, True), (True, False)]
    with pytest.raises(Exception, match="Unexpected optimization option unheard_of"):
        compiled(lambda x: norm(x) * 5, options={"unheard_of": True})(x)
    with pytest.raises(Exception, match="fusion policy 'often'; accepted: never, always, auto"):
        compiled(lambda x: norm(x) * 6, options={"tileops.fusion": "often"})(x)
    with pytest.raises(Exception, match="option 'tileops.fusoin'; accepted: tileops.fusion, and"):
        compiled(lambda x: norm(x) * 7, options={"tileops.fusoin": "never"})(x)


def test_custom_passes_of_the_user_run_and_nothing_is_left_behind():
    norm, x, order = RMSNormFwdOp(8), torch.randn(4, 8), []
    names = ("pre_grad_custom_pass", "joint_custom_pre_pass", "post_grad_custom_pre_pass")
    passes = {name: lambda graph, name=name: order.append(name) for name in names}
    before = config.save_config_portable()
    with config.patch(fx_graph_cache=False, **passes):
        torch.testing.assert_close(compiled(lambda x: norm(x) * 2)(x), norm(x) * 2)
    assert order == list(names)
    assert config.save_config_portable() == before
    assert torch.compiler.config.cache_key_tag == ""


def test_plain_compile_keeps_ops_opaque():
    """Before and after the backend was used."""
    norm, x, seen = RMSNormFwdOp(8), torch.randn(4, 8), []

    def look(graph):
        seen.append([str(n.target) for n in graph.nodes if "tileops" in str(n.target)])

    with config.patch(post_grad_custom_post_pass=look):
        for run in (torch.compile, compiled, torch.compile):
            torch._dynamo.reset()
            run(lambda x: norm(x) * 2)(x)
    assert seen == [
        ["tileops.norm_rms_norm_fwd.default"],
        [],
        ["tileops.norm_rms_norm_fwd.default"],
    ]


def test_a_graph_without_tensors_or_ops_is_inductors():
    x = torch.randn(4)
    torch.testing.assert_close(compiled(lambda x: x.sin() + 1)(x), x.sin() + 1)
    assert str(last_report()) == "nothing to rewrite"


def test_dynamic_sizes_compile_once():
    norm, silu = RMSNormFwdOp(16, eps=1e-6), SiLUAndMulFwdOp()
    count = 0

    def counting(module, inputs, **more):
        nonlocal count
        count += 1
        return backend(module, inputs, **more)

    run = torch.compile(lambda x: silu(norm(x) + 1), backend=counting, fullgraph=True, dynamic=True)
    for rows in (5, 7, 64):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(run(x), silu(norm(x) + 1))
    assert count == 1


# ---- targets ------------------------------------------------------------------------------------


def test_compiled_code_gives_way_to_a_target():
    def build(*specs, **params):
        return lambda x, weight: torch.full_like(x, 7.0)

    register_kernel_builder("fusion_later", "RMSNormFwdOp", build)
    norm, x = RMSNormFwdOp(8), torch.randn(4, 8)
    run = compiled(lambda x: norm(x) * 2)
    torch.testing.assert_close(run(x), norm(x) * 2)
    assert [d["op"] for d in last_report().of("inlined")] == ["RMSNormFwdOp"]
    with tileops.use_target("fusion_later"):
        assert (run(x) == 14).all()
    torch.testing.assert_close(run(x), norm(x) * 2)


# ---- registration -------------------------------------------------------------------------------


def _by_name(folder: str) -> int:
    import sys

    sys.path.insert(0, folder)
    from tileops.norm import RMSNormFwdOp

    norm, x = RMSNormFwdOp(8), torch.randn(4, 8)
    assert "tileops" in torch.compiler.list_backends()
    run = torch.compile(lambda x: norm(x) * 2, backend="tileops", fullgraph=True)
    torch.testing.assert_close(run(x), norm(x) * 2)
    from tileops.fusion import last_report

    return len(list(last_report().of("inlined")))


def test_the_backend_is_found_by_name(tmp_path):
    """By the entry point that ``pyproject.toml`` declares, as an installed distribution shows it."""
    import tomllib

    from tests.contract.fresh import ROOT

    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    (line,) = points["torch_dynamo_backends"].items()
    info = tmp_path / "tileops_entry-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tileops-entry\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch_dynamo_backends]\n{} = {}\n".format(*line))
    assert run_fresh(_by_name, folder=str(tmp_path)) == 1


def test_reports_name_the_line_of_the_user():
    space = {"F": torch.nn.functional}
    text = "def function(x):\n    return F.rms_norm(x, (8,)) + 1"
    exec(compile(text, "/home/someone/tileops/model.py", "exec"), space)
    run, seen = rewritten(space["function"], "always")
    run(torch.randn(4, 8))
    for line in str(seen.report).splitlines():
        assert line.endswith('File "/home/someone/tileops/model.py", line 2, in function')
