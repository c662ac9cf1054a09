"""The tap counts every communication operator of torch, or the operator is known to send nothing."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed._symmetric_memory
import torch.distributed.tensor
from torch.profiler import ProfilerActivity, profile

from bench.attention.watch import AttentionWatch
from bench.measure.calls import COLLECTIVES, COMMUNICATION, WITHOUT_PAYLOAD, collective_of
from bench.measure.memory.trackers import AllocationTracker
from bench.measure.tap import CommunicationTap
from bench.measure.trace.cpu_timeline import GLOO_EVENTS
from bench.run.node.worker import join
from tests.support.cells import make_cell

NOT_COUNTED = {
    "_c10d_functional::isend",
    "_c10d_functional::irecv",
    "_c10d_functional::batch_p2p_ops",
    "c10d::gather_into_tensor_",  # from torch 2.14; no engine and no strategy calls it
}
MADE_OF_OTHERS = ("c10d_functional::", "_c10d_functional_autograd::")
"""Namespaces of operators that call others, which a dispatch mode sees instead."""
OTHER_PACKAGES = ("deepspeed::",)
GROUP_ARGUMENTS = {"process_group", "group", "group_name", "ranks"}
MIB = 2**20
ELEMENTS = MIB // 4


def group_arguments():
    """Return the arguments of every torch operator that are groups of ranks."""
    schemas = torch._C._jit_get_all_schemas()
    return {schema.name: {x.name for x in schema.arguments} & GROUP_ARGUMENTS for schema in schemas}


def test_every_communication_operator_of_torch_is_known():
    operators = {name for name in group_arguments() if name.startswith(COMMUNICATION)}
    operators = {name for name in operators if not name.startswith("symm_mem::")}
    assert len(operators) > len(COLLECTIVES) // 2
    assert operators - COLLECTIVES.keys() - WITHOUT_PAYLOAD <= NOT_COUNTED
    assert not COLLECTIVES.keys() & WITHOUT_PAYLOAD


def test_no_other_operator_of_torch_takes_a_group_of_ranks():
    operators = group_arguments()
    known = (*COMMUNICATION, *MADE_OF_OTHERS, *OTHER_PACKAGES)
    assert [name for name, groups in operators.items() if groups and not name.startswith(known)] == [
        name for name in operators if name.startswith("aten::native_group_norm")
    ]


@pytest.mark.parametrize(
    "operator", [*sorted(NOT_COUNTED), "symm_mem::one_shot_all_reduce", "c10d::of_tomorrow"]
)
def test_collective_of_raises_for_an_unknown_operator(operator):
    with pytest.raises(NotImplementedError, match=operator):
        collective_of(operator)
    assert collective_of("deepspeed::sum") is None


def mebibyte():
    return torch.ones(ELEMENTS)


def input_splits(rank):
    """Return the elements that a rank sends to ranks 0 and 1: half and half, or a quarter and the rest."""
    first = ELEMENTS // 2 if rank == 0 else ELEMENTS // 4
    return [first, ELEMENTS - first]


def output_splits(rank):
    return [input_splits(sender)[rank] for sender in range(2)]


CALLS = {
    "reduce": (lambda _, x: dist.reduce(x, 1), (1, 0)),
    "gather": (
        lambda rank, x: dist.gather(x, [mebibyte(), mebibyte()] if rank == 0 else None, 0),
        (0, 1),
    ),
    "scatter": (lambda rank, x: dist.scatter(mebibyte(), [x, x] if rank == 0 else None, 0), (1, 0)),
    "all_to_all of tensors": (
        lambda _, x: dist.all_to_all(list(mebibyte().chunk(2)), list(x.chunk(2))),
        (0.5, 0.5),  # gloo requires equal sizes
    ),
    "all_to_all of parts": (
        lambda rank, x: dist.all_to_all_single(
            torch.empty(sum(output_splits(rank))), x, output_splits(rank), input_splits(rank)
        ),
        (0.5, 0.25),
    ),
    "all_to_all of halves": (lambda _, x: dist.all_to_all_single(torch.empty(ELEMENTS), x), (0.5, 0.5)),
    "all_reduce of several": (lambda _, x: dist.all_reduce_coalesced([x, x]), (2, 2)),
    "recv_any_source and send": (lambda rank, x: dist.recv(x) if rank == 0 else dist.send(x, 0), (0, 1)),
    "functional all_reduce of several": (
        lambda _, x: wait(functional.all_reduce_coalesced([x, x], "sum", dist.group.WORLD)),
        (2, 2),
    ),
    "functional all_gather of several": (
        lambda _, x: wait(functional.all_gather_into_tensor_coalesced([x, x], dist.group.WORLD)),
        (2, 2),
    ),
    "functional reduce_scatter of several": (
        lambda _, x: wait(functional.reduce_scatter_tensor_coalesced([x], "sum", [0], dist.group.WORLD)),
        (0.5, 0.5),
    ),
    "functional all_gather with gradients": (
        lambda _, x: wait([functional.all_gather_tensor_autograd(x.requires_grad_(), 0, dist.group.WORLD)]),
        (1, 1),
    ),
    "barrier": (lambda *_: dist.barrier(), (0, 0)),
}
"""Function that makes a call with a tensor of one MiB, and the MiB that rank 0 and rank 1 send in it."""


def wait(tensors):
    return [tensor + 0 for tensor in tensors]


def is_supported(call, rank, tensor):
    """Make a call; return False if gloo does not support it, as that of torch 2.11 has no `alltoall`."""
    try:
        call(rank, tensor)
    except RuntimeError as error:
        if "does not support" in str(error):
            return False
        raise
    return True


def call_everything(job, log):
    """Make every call of CALLS on a rank, tapped and profiled."""
    join(job)
    calls = {}
    for name, (call, _) in CALLS.items():
        tensor = mebibyte()
        with (
            profile(activities=[ProfilerActivity.CPU]) as profiled,
            CommunicationTap(AttentionWatch()) as tap,
        ):
            supported = is_supported(call, job.rank, tensor)
        if not supported:
            continue
        events = [event.name for event in profiled.events() if event.name.startswith("gloo:")]
        kinds = [call.kind for call in tap.calls]
        calls[name] = {"kinds": kinds, "bytes": [call.sent_bytes for call in tap.calls], "events": events}
    clone = dist.new_group([0, 1])
    with CommunicationTap(AttentionWatch()) as tap:
        for group in (dist.group.WORLD, clone, dist.group.WORLD, clone):
            dist.all_reduce(mebibyte(), group=group)
    by_group = [(call.group, call.members, call.ordinal) for call in tap.calls]
    return {"calls": calls, "by_group": by_group}


@pytest.fixture(scope="module")
def reports(launcher, tmp_path_factory):
    """Calls that the tap and the profiler recorded on both ranks."""
    folder = tmp_path_factory.mktemp("calls")
    ends = launcher.run(make_cell("cluster.world_size=2"), folder, entry=call_everything)
    assert all(end.report for end in ends), [end.failure or end.log_tail for end in ends]
    return [end.report for end in ends]


@pytest.mark.parametrize("name", CALLS)
def test_tap_counts_sent_bytes_and_gloo_has_the_tables_event(reports, name):
    if name not in reports[0]["calls"]:
        pytest.skip("this torch's gloo has no such call")
    by_rank = [report["calls"][name] for report in reports]
    assert [calls["bytes"] for calls in by_rank] == [[round(sent * MIB)] for sent in CALLS[name][1]]
    for calls in by_rank:
        assert calls["kinds"][0] in name
        assert calls["events"] == [GLOO_EVENTS[calls["kinds"][0]]]


@pytest.mark.parametrize("mode", [lambda: CommunicationTap(AttentionWatch()), AllocationTracker])
def test_dispatch_modes_keep_compiled_code_compiled(mode):
    graphs = []

    def backend(graph, _):
        return lambda *inputs: graphs.append(graph) or graph(*inputs)

    double = torch.compile(lambda x: x * 2, backend=backend)
    with mode():
        assert double(torch.ones(3)).sum() == 6
    assert len(graphs) == 1


def test_tap_counts_calls_of_two_groups_of_the_same_ranks(reports):
    """A group has one name on all its ranks."""
    by_group, by_group_on_other = (report["by_group"] for report in reports)
    assert by_group == by_group_on_other
    first, second = by_group[0][0], by_group[1][0]
    assert first != second
    assert by_group == [[first, [0, 1], 0], [second, [0, 1], 0], [first, [0, 1], 1], [second, [0, 1], 1]]
