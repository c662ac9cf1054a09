"""Every operator by which torch communicates is counted, or known to send nothing."""

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
"""A dispatch mode sees what these call, not them."""
OTHER_PACKAGES = ("deepspeed::",)
GROUP_ARGUMENTS = {"process_group", "group", "group_name", "ranks"}
MIB = 2**20
ELEMENTS = MIB // 4


def registered():
    """Every operator of torch's, and whether it takes a group of ranks."""
    schemas = torch._C._jit_get_all_schemas()
    return {each.name: {x.name for x in each.arguments} & GROUP_ARGUMENTS for each in schemas}


def test_every_operator_that_torch_registers_for_communication_is_known():
    found = {name for name in registered() if name.startswith(COMMUNICATION)}
    found = {name for name in found if not name.startswith("symm_mem::")}
    assert len(found) > len(COLLECTIVES) // 2
    assert found - COLLECTIVES.keys() - WITHOUT_PAYLOAD <= NOT_COUNTED
    assert not COLLECTIVES.keys() & WITHOUT_PAYLOAD


def test_no_other_operator_of_torchs_takes_a_group_of_ranks():
    known = (*COMMUNICATION, *MADE_OF_OTHERS, *OTHER_PACKAGES)
    assert [name for name, groups in registered().items() if groups and not name.startswith(known)] == [
        name for name in registered() if name.startswith("aten::native_group_norm")
    ]


@pytest.mark.parametrize(
    "operator", [*sorted(NOT_COUNTED), "symm_mem::one_shot_all_reduce", "c10d::of_tomorrow"]
)
def test_an_operator_that_cannot_be_counted_is_an_error(operator):
    with pytest.raises(NotImplementedError, match=operator):
        collective_of(operator)
    assert collective_of("deepspeed::sum") is None


def a_mebibyte():
    return torch.ones(ELEMENTS)


def parts(rank):
    """What rank 0 hands over is cut in the middle, of rank 1's a quarter goes to rank 0."""
    cut = ELEMENTS // 2 if rank == 0 else ELEMENTS // 4
    return [cut, ELEMENTS - cut]


def received(rank):
    return [parts(sender)[rank] for sender in range(2)]


CALLS = {
    "reduce": (lambda _, x: dist.reduce(x, 1), (1, 0)),
    "gather": (
        lambda rank, x: dist.gather(x, [a_mebibyte(), a_mebibyte()] if rank == 0 else None, 0),
        (0, 1),
    ),
    "scatter": (lambda rank, x: dist.scatter(a_mebibyte(), [x, x] if rank == 0 else None, 0), (1, 0)),
    "all_to_all of tensors": (
        lambda _, x: dist.all_to_all(list(a_mebibyte().chunk(2)), list(x.chunk(2))),
        (0.5, 0.5),  # gloo wants them equal
    ),
    "all_to_all of parts": (
        lambda rank, x: dist.all_to_all_single(
            torch.empty(sum(received(rank))), x, received(rank), parts(rank)
        ),
        (0.5, 0.25),
    ),
    "all_to_all of halves": (lambda _, x: dist.all_to_all_single(torch.empty(ELEMENTS), x), (0.5, 0.5)),
    "all_reduce of several": (lambda _, x: dist.all_reduce_coalesced([x, x]), (2, 2)),
    "recv_any_source and send": (lambda rank, x: dist.recv(x) if rank == 0 else dist.send(x, 0), (0, 1)),
    "functional all_reduce of several": (
        lambda _, x: waited(functional.all_reduce_coalesced([x, x], "sum", dist.group.WORLD)),
        (2, 2),
    ),
    "functional all_gather of several": (
        lambda _, x: waited(functional.all_gather_into_tensor_coalesced([x, x], dist.group.WORLD)),
        (2, 2),
    ),
    "functional reduce_scatter of several": (
        lambda _, x: waited(functional.reduce_scatter_tensor_coalesced([x], "sum", [0], dist.group.WORLD)),
        (0.5, 0.5),
    ),
    "functional all_gather with gradients": (
        lambda _, x: waited([functional.all_gather_tensor_autograd(x.requires_grad_(), 0, dist.group.WORLD)]),
        (1, 1),
    ),
    "barrier": (lambda *_: dist.barrier(), (0, 0)),
}
"""How each call is made by a rank of its mebibyte, and what two ranks send of their mebibytes."""


def waited(tensors):
    return [tensor + 0 for tensor in tensors]


def offered(make, rank, given):
    """Make a call; False where this torch's gloo has none of its kind, as 2.11's has no `alltoall`."""
    try:
        make(rank, given)
    except RuntimeError as error:
        if "does not support" in str(error):
            return False
        raise
    return True


def call_everything(job, log):
    """A rank's whole life: every call of CALLS, tapped and profiled."""
    join(job)
    seen = {}
    for name, (make, _) in CALLS.items():
        given = a_mebibyte()
        with (
            profile(activities=[ProfilerActivity.CPU]) as profiled,
            CommunicationTap(AttentionWatch()) as tap,
        ):
            is_offered = offered(make, job.rank, given)
        if not is_offered:
            continue
        events = [event.name for event in profiled.events() if event.name.startswith("gloo:")]
        kinds = [call.kind for call in tap.calls]
        seen[name] = {"kinds": kinds, "bytes": [call.sent_bytes for call in tap.calls], "events": events}
    clone = dist.new_group([0, 1])
    with CommunicationTap(AttentionWatch()) as tap:
        for group in (dist.group.WORLD, clone, dist.group.WORLD, clone):
            dist.all_reduce(a_mebibyte(), group=group)
    counted = [(call.group, call.members, call.ordinal) for call in tap.calls]
    return {"seen": seen, "counted": counted}


@pytest.fixture(scope="module")
def reports(launcher, tmp_path_factory):
    """Of both ranks what the tap and the profiler saw."""
    folder = tmp_path_factory.mktemp("calls")
    ends = launcher.run(make_cell("cluster.world_size=2"), folder, entry=call_everything)
    assert all(end.report for end in ends), [end.failure or end.log_tail for end in ends]
    return [end.report for end in ends]


@pytest.mark.parametrize("name", CALLS)
def test_each_rank_sends_the_bytes_that_the_call_takes_and_gloo_names_it_as_the_table_does(reports, name):
    if name not in reports[0]["seen"]:
        pytest.skip("this torch's gloo has no such call")
    found = [report["seen"][name] for report in reports]
    assert [each["bytes"] for each in found] == [[round(sent * MIB)] for sent in CALLS[name][1]]
    for each in found:
        assert each["kinds"][0] in name
        assert each["events"] == [GLOO_EVENTS[each["kinds"][0]]]


@pytest.mark.parametrize("mode", [lambda: CommunicationTap(AttentionWatch()), AllocationTracker])
def test_what_is_compiled_stays_compiled_under_a_mode_that_looks_at_every_operator(mode):
    ran = []

    def backend(graph, _):
        return lambda *inputs: ran.append(graph) or graph(*inputs)

    double = torch.compile(lambda x: x * 2, backend=backend)
    with mode():
        assert double(torch.ones(3)).sum() == 6
    assert len(ran) == 1


def test_two_groups_of_the_same_ranks_are_counted_apart_and_have_one_name_on_all_ranks(reports):
    counted, by_other = (report["counted"] for report in reports)
    assert counted == by_other
    first, second = counted[0][0], counted[1][0]
    assert first != second
    assert counted == [[first, [0, 1], 0], [second, [0, 1], 0], [first, [0, 1], 1], [second, [0, 1], 1]]
