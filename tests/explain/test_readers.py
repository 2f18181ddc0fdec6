"""Readers of torch's texts, on texts that this machine does not make: a GPU's, another release's."""

from __future__ import annotations

import pytest

from tileops.explain.collect.capture import read_break
from tileops.explain.collect.events import Event
from tileops.explain.collect.graphs import read_graph, user_line
from tileops.explain.collect.guards import read_recompile, stated
from tileops.explain.collect.inductor import Lowered, read_inductor
from tileops.explain.model import Graph, Line

GRAPH = """class GraphModule(torch.nn.Module):
    def forward(self, L_x_: "f32[s77, 8][8, 1]cuda:0", s77: "Sym(s77)"):
        l_x_ = L_x_

        # File: /home/me/model.py:3 in f, code: y = self.up(x)[0]
        up: "bf16[s77, 8][8, 1]cuda:0" = self.up(l_x_, flag = True)
        getitem: "bf16[8][1]cuda:0" = up[0];  up = None
        weight: "f8e4m3fn[2, 3][3, 1]cuda:0" = self.weight
        made: "b8[4][1]cuda:0" = torch.ops.aten.what.default(getitem, <object at 0x7f>, weight)
        test: "b8[4][1]cuda:0" = getitem != 3

        # No stacktrace found for following nodes
        branch = torch.ops.higher_order.cond(test, true_graph, made);  made = None
        return (branch, s77)

    class true_graph(torch.nn.Module):
        def forward(self, arg0: "f32[4][1]cuda:0"):
            sin: "f32[4][1]cuda:0" = torch.ops.aten.sin.default(arg0)
            return (sin,)
"""


def test_graph():
    nodes = {node.name: node for node in read_graph("capture", GRAPH).nodes}
    assert list(nodes) == [
        "l_x_",
        "s77",
        "up",
        "getitem",
        "weight",
        "made",
        "test",
        "branch",
        "output",
    ]
    assert (nodes["l_x_"].opcode, nodes["l_x_"].target) == ("placeholder", "L_x_")
    assert (nodes["l_x_"].shape, nodes["l_x_"].bytes) == (["s77", 8], None)
    assert nodes["s77"].dtype is None
    assert (nodes["up"].opcode, nodes["up"].target) == ("call_module", "up")
    assert nodes["up"].args == "l_x_, flag=True"
    assert (nodes["getitem"].target, nodes["getitem"].inputs) == ("operator.getitem", ["up"])
    assert (nodes["getitem"].bytes, nodes["getitem"].device) == (16, "cuda:0")
    assert (nodes["weight"].opcode, nodes["weight"].bytes) == ("get_attr", 6)
    assert (nodes["made"].target, nodes["made"].inputs) == (
        "torch.ops.aten.what.default",
        ["getitem", "weight"],
    )
    assert (nodes["test"].target, nodes["test"].bytes) == ("operator.ne", 4)
    assert nodes["up"].line == Line("/home/me/model.py", 3, "f", "y = self.up(x)[0]")
    assert nodes["branch"].line is None
    assert nodes["output"].inputs == ["branch", "s77"]


def test_lines_of_a_backward_graph():
    """As torch writes them from 2.14 on, and as before."""
    for words in ("# File: ", "# Backward of forward node: File: "):
        (_, up, *_) = read_graph("backward", GRAPH.replace("# File: ", words)).nodes[1:]
        assert up.line == Line("/home/me/model.py", 3, "f", "y = self.up(x)[0]")


def test_no_graph():
    assert read_graph("capture", "").nodes == []


def test_user_line():
    import torch

    stack = (
        '  File "/home/me/model.py", line 3, in f\n    return self.up(x)\n'
        f'  File "{torch.nn.modules.linear.__file__}", line 5, in forward\n    return F.linear(x)\n'
        '  File "tileops_generated/norm/x_boundary.py", line 1, in call\n    return 1\n'
    )
    assert user_line(stack) == Line("/home/me/model.py", 3, "f", "return self.up(x)")
    assert user_line("") is None


TRITON = """
# AOT ID: ['0_inference']
triton_per_fused_add_sum_0 = async_compile.triton('triton_per_fused_add_sum_0', '''
@triton_heuristics.persistent_reduction(
    size_hints={'x': 64, 'r0_': 128},
    reduction_hint=ReductionHint.INNER,
    triton_meta={'num_warps': 4, 'num_stages': 1},
)
@triton.jit
def triton_per_fused_add_sum_0(in_ptr0, out_ptr0, xnumel, r0_numel, XBLOCK : tl.constexpr):
    R0_BLOCK: tl.constexpr = 128
''', device_str='cuda')

def call(args):
    arg0_1, arg1_1 = args
    args.clear()
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = empty_strided_cuda((64, 32), (32, 1), torch.float16)
        # Topologically Sorted Source Nodes: [y], Original ATen: [aten.mm]
        extern_kernels.mm(arg0_1, arg1_1, out=buf0)
        buf1 = empty_strided_cuda((64, ), (1, ), torch.float32)
        # Topologically Sorted Source Nodes: [add, total], Original ATen: [aten.add, aten.sum]
        stream0 = get_raw_stream(0)
        triton_per_fused_add_sum_0.run(buf0, buf1, 64, 128, stream=stream0)
        buf2 = reinterpret_tensor(buf0, (64, 32), (32, 1), 0); del buf0  # reuse
    return (buf1, )
"""
SCHEDULED = """AFTER FUSION
op0: ExternKernelSchedulerNode(ExternKernelOut)
op0.unmet_dependencies = []
op0.met_dependencies = []
op0.outputs = [
    buf0: ExternKernelOut
]
op0.node.kernel = extern_kernels.mm


op1_op2: FusedSchedulerNode(SchedulerNode,SchedulerNode)
op1_op2.unmet_dependencies = [MemoryDep('buf0', c0, {c0: 2048})]
op1_op2.met_dependencies = []
op1_op2.outputs = [
    buf1: ComputedBuffer
]
op1_op2.snodes[0] =
op1: SchedulerNode(ComputedBuffer)
"""
FUSION = [
    "  SchedulerNode(name='op1'), Pointwise(['[64]', 'origins=OrderedSet([add])'])",
    "  SchedulerNode(name='op2'), Reduction(['[64]', 'sum', 'origins=OrderedSet([sum_1])'])",
]
LOWERED = """class GraphModule(torch.nn.Module):
    def forward(self, arg0_1: "f16[64, 8][8, 1]cuda:0", arg1_1: "f16[8, 32][32, 1]cuda:0"):
        # File: /home/me/model.py:3 in f, code: y = x @ w
        mm: "f16[64, 32][32, 1]cuda:0" = torch.ops.aten.mm.default(arg0_1, arg1_1)
        # File: /home/me/model.py:4 in f, code: return (y + 1).sum(-1)
        add: "f16[64, 32][32, 1]cuda:0" = torch.ops.aten.add.Tensor(mm, 1)
        sum_1: "f32[64][1]cuda:0" = torch.ops.aten.sum.dim_IntList(add, [-1])
        return (sum_1,)
"""


def lowered(scheduled, fusion):
    graph: Graph = read_graph("lowered", LOWERED)
    timed = [{"triton_mm_3": 0.5, "mm": 0.25}]
    captured = {"y": Line("/home/me/model.py", 3)}
    return read_inductor(Lowered(TRITON, None, graph, fusion, scheduled, timed, captured))


def test_triton():
    made = lowered(SCHEDULED, FUSION)
    product, total = made.kernels
    assert (product.kind, product.language, product.nodes) == ("extern", "extern", ["mm"])
    assert [line.number for line in product.lines] == [3]
    assert (total.kind, total.language, total.nodes) == ("reduction", "triton", ["add", "sum_1"])
    assert [line.number for line in total.lines] == [4]
    assert total.schedule["R0_BLOCK"] == "128"
    assert total.schedule["num_warps"] == "4"
    assert "def triton_per_fused_add_sum_0" in total.code
    assert [(b.name, b.bytes, b.reuses, b.kept) for b in made.buffers] == [
        ("buf0", 4096, None, False), ("buf1", 256, None, True), ("buf2", 4096, "buf0", False),
    ]  # fmt: skip
    assert made.peak_bytes == 4096 + 256
    assert product.bytes == 64 * 8 * 2 + 8 * 32 * 2 + 4096  # two inputs and the result
    assert total.bytes == 4096 + 256
    (apart,) = made.unfused
    assert (apart.first_nodes, apart.second_nodes) == (["mm"], ["add", "sum_1"])
    assert made.stage == "inference"
    choice = [(each.kernel, each.time_us, each.chosen) for each in made.candidates]
    assert choice == [("triton_mm_3", 500.0, False), ("mm", 250.0, True)]


STANDS_FOR = """
cpp_fused_relu_0 = async_compile.cpp_pybinding(['float*'], '''
extern "C"  void  kernel(float* in_out_ptr0)
{
}
''')
def call(args):
    arg0_1, arg1_1 = args
    assert_size_stride(arg0_1, (64, 8), (8, 1), 'input')
    # Topologically Sorted Source Nodes: [y_default], Original ATen: [aten.view, mine.linear]
    buf0 = torch.ops.library._product.default(arg0_1, arg1_1, 'none')
    del arg0_1
    buf1 = buf0
    assert_size_stride(buf1, (64, 32), (32, 1), 'torch.ops.mine.linear.default')
    del buf0
    buf2 = buf1; del buf1  # reuse
    cpp_fused_relu_0(buf2)
    return (buf2, )
"""
PRODUCT = """class GraphModule(torch.nn.Module):
    def forward(self, arg0_1: "f32[64, 8][8, 1]cpu", arg1_1: "f32[32, 8][8, 1]cpu"):
        # File: /home/me/model.py:3 in f, code: y = linear(x)
        y: "f32[64, 32][32, 1]cpu" = torch.ops.mine.linear.default(arg0_1, arg1_1)
        # File: /home/me/model.py:4 in f, code: return relu(y)
        relu: "f32[64, 32][32, 1]cpu" = torch.ops.aten.relu.default(y)
        return (relu,)
"""


def test_a_library_s_call_that_stands_for_another_operator():
    graph = read_graph("lowered", PRODUCT)
    made = read_inductor(Lowered(STANDS_FOR, None, graph, [], None, [], {}))
    product, after = made.kernels
    assert (product.name, product.nodes) == ("torch.ops.library._product.default", ["y"])
    assert [line.number for line in product.lines] == [3]
    assert product.bytes == 4 * (64 * 8 + 32 * 8 + 64 * 32)
    assert after.bytes == 2 * 4 * 64 * 32


CHANGES = """
triton_poi_a = async_compile.triton('triton_poi_a', '''
def triton_poi_a(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    pass
''', device_str='cuda')
triton_poi_b = async_compile.triton('triton_poi_b', '''
def triton_poi_b(in_ptr0, out_ptr1, xnumel, XBLOCK : tl.constexpr):
    pass
''', device_str='cuda')

def call(args):
    arg0_1, = args
    buf0 = empty_strided_cuda((64, ), (1, ), torch.float32)
    triton_poi_a.run(arg0_1, buf0, 64, stream=stream0)
    triton_poi_b.run(arg0_1, arg0_1, 64, stream=stream0)
    triton_poi_b.run(buf0, reinterpret_tensor(arg0_1, (64, ), (1, ), 0), 64, stream=stream0)
    return (buf0, )
"""
CHANGES_SCHEDULED = """AFTER FUSION
op0: SchedulerNode(ComputedBuffer)
op0.outputs = [
    buf0: ComputedBuffer
]


op1_op2: FusedSchedulerNode(SchedulerNode,SchedulerNode)
op1_op2.outputs = [
    buf1: ComputedBuffer
    buf2: ComputedBuffer
    buf2.mutations = ['arg0_1']
]
op1_op2.snodes[0] =
op1: SchedulerNode(ComputedBuffer)


op3: SchedulerNode(ComputedBuffer)
op3.outputs = [
    buf3: ComputedBuffer
    buf3.mutations = ['arg0_1']
]
"""


def test_triton_kernels_that_change_an_input():
    """The first reads the input that the second and the third change, one after the other."""
    told = Lowered(CHANGES, None, Graph("lowered", ""), [], CHANGES_SCHEDULED, [], {})
    kernels = read_inductor(told).kernels
    assert [[g.name for g in each.groups] for each in kernels] == [["op0"], ["op1_op2"], ["op3"]]


def test_memory_that_is_planned():
    """Two buffers at places of one pool; the second is returned."""
    code = """
def call(args):
    arg0_1, = args
    pool1 = empty_strided_cuda((1024, ), (1, ), torch.uint8)
    buf0 = alloc_from_pool(pool1, 0, torch.float32, (64, ), (1, ))
    triton_poi_0.run(arg0_1, buf0, 64, stream=stream0)
    buf1 = alloc_from_pool(pool1, 512, torch.float32, (64, ), (1, ))
    triton_poi_0.run(buf0, buf1, 64, stream=stream0)
    del buf0
    return (buf1, )
"""
    made = read_inductor(Lowered(code, None, Graph("lowered", ""), [], None, [], {}))
    assert [(b.name, b.bytes, b.reuses, b.kept) for b in made.buffers] == [
        ("pool1", 1024, None, False), ("buf0", 256, "pool1", False), ("buf1", 256, "pool1", True),
    ]  # fmt: skip
    assert made.peak_bytes == 1024


def test_symbolic_sizes_are_no_bytes():
    code = """
def call(args):
    s0, arg0_1 = args
    buf0 = empty_strided_cpu((s0, 8), (8, 1), torch.float32)
    cpp_fused_0(arg0_1, buf0, s0)
    return (buf0, )
"""
    made = read_inductor(Lowered(code, None, Graph("lowered", ""), [], None, [], {}))
    assert [(b.bytes, b.kept) for b in made.buffers] == [(None, True)]
    assert made.peak_bytes is None


def test_triton_from_a_cache():
    made = lowered(None, [])
    assert made.unfused is None
    assert made.candidates is None
    assert [kernel.groups for kernel in made.kernels] == [None, None]
    assert [kernel.kind for kernel in made.kernels] == ["extern", "reduction"]
    assert made.kernels[1].nodes is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0/0: L['n'] == 3  # return x * n", ("L['n']", "value", "3", "4")),
        ("0/0: self.steps == 3", ("self.steps", "value", "3", None)),
        (
            "1/2: tensor 'x' stride mismatch at index 1. expected 1, actual 4",
            ("x", "stride[1]", "1", "4"),
        ),
        (
            "0/0: tensor 'x' requires_grad mismatch. expected requires_grad=0",
            ("x", "requires_grad", "False", "True"),
        ),
        (
            "0/0: tensor 'x' dispatch key set mismatch. expected DispatchKeySet(CPU, A), actual DispatchKeySet(CUDA, A)",
            ("x", "device", "cpu", "cuda"),
        ),
        (
            "0/0: tensor 'x' dispatch key set mismatch. expected DispatchKeySet(CPU, A), actual DispatchKeySet(CPU)",
            ("x", "dispatch key set", "DispatchKeySet(CPU, A)", "DispatchKeySet(CPU)"),
        ),
        ("0/0: len(L['a'].b) == 2", ("L['a'].b", "length", "2", None)),
        ("0/0: ___check_obj_id(h, 14070343)", ("h", "identity", None, None)),
        ("0/0: GLOBAL_STATE changed: grad_mode", (None, "global state", None, None)),
    ],
)
def test_recompile_reasons(text, expected):
    event = Event("recompile_reasons", "0/1", 0, {"reasons": [text], "actual": {"L['n']": "4"}})
    (failure,) = read_recompile(event, 1, "").failures
    assert (failure.source, failure.property, failure.expected, failure.actual) == expected
    assert failure.advice


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("Unsupported Tensor.item() call with capture_scalar_outputs=False", "item"),
        ("Data-dependent branching", "branch"),
        (
            "Data dependent operator\n  Explanation: `aten.equal.default` has a non-Tensor output",
            "item",
        ),
        ("Failed to trace builtin operator\n  Explanation: no `sorted`", "builtin"),
        ("Attempted to call function marked as skipped", "skipped"),
        ("Unsupported generator: yield from", "generator"),
        ("Dynamic shape operator\n  Explanation: Operator `aten.nonzero.default`", "shape"),
        ("logging.Logger method not supported for non-export cases", "print"),
        ("Call to `torch._dynamo.graph_break()`", "asked"),
        ("Observed exception", "raise"),
        ("Unsupported Tensor.backward() call", "backward"),
        ("The moon is full", "other"),
    ],
)
def test_kinds_of_breaks(reason, kind):
    text = (
        f"Graph break in user code at /home/me/model.py:7\nGraph Break Reason: {reason}\n"
        "  Hint: try harder\n\nUser code traceback:\n"
        '  File "/home/me/run.py", line 1, in <module>\n    f(x)\n'
        '  File "/home/me/model.py", line 7, in f\n    y = g(x)\n\nTraceback (most recent call last):\n'
    )
    found = read_break(Event("dynamo_graph_break_reason", "0/0", 0, text=text))
    assert found.kind == kind
    assert found.at == Line("/home/me/model.py", 7, "f", "y = g(x)")
    assert [line.function for line in found.stack] == ["<module>", "f"]
    assert found.hints == ["try harder"]
    assert found.advice


def test_a_function_given_up():
    """The kind is that of the break, not of torch's sentence about giving up."""
    text = (
        "Graph break in user code at /home/me/model.py:7\n"
        "Graph Break Reason: Failed to handle graph break gracefully. Skipping the function and falling "
        "back to eager. Graph break encountered:\n\nUnsupported Tensor.item() call\n"
        "  Explanation: no item here.\n\nUser code traceback:\n"
    )
    found = read_break(Event("dynamo_graph_break_reason", "0/0", 0, text=text))
    assert found.kind == "item"
    assert found.reason == (
        "The function runs without torch.compile: Unsupported Tensor.item() call. no item here."
    )


def test_an_object_known_by_identity():
    """Torch shows its type, before 2.13 the object."""
    shown = {
        "<class 'code'>": "one code",
        '<code object helper at 0x7f21, file "/home/me/model.py", line 61>': "helper",
        "<function f.<locals>.inner at 0x7f21>": "f.<locals>.inner",
        "<built-in function len>": "len",
        "Linear(in_features=4, out_features=4, bias=True)": None,
    }
    for text, expected in shown.items():
        reason = f"0/0: ___check_obj_id(given.__code__, 1397), type={text}"
        assert stated(reason) == ("identity", "given.__code__", expected)
