"""All collectives of a step in a process that is the only one of four ranks."""

import math
from functools import partial
from weakref import ref

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from bench.measure.calls import COLLECTIVES
from bench.ranks.replay_group import COPIES, _sends_and_receives
from bench.run.node.worker import join
from tests.support.cells import make_cell

RANK, RANKS = 1, 4
CELL = ("mode=replay", "strategy=ring", "cluster.world_size=4", "replay.rank=1")


class Operators(TorchDispatchMode):
    """Mode that records communication operators, like the tap and the memory tracker."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition(".")[0]
        self.names += [name] if name in COLLECTIVES else []
        return func(*args, **(kwargs or {}))


def nan(*shape):
    return torch.full(shape, math.nan)


def in_place(call, start):
    tensor = torch.tensor(start)
    work = call(tensor)
    if work is not None:
        work.wait()
    return tensor.tolist()


def exchange():
    got, sent = nan(2), torch.full((2,), 5.0)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, 2), dist.P2POp(dist.irecv, got, 0)])
    for work in works:
        work.wait()
    return got.tolist()


def unmatched_receive(dtype):
    got = torch.full((3,), 7).to(dtype)
    dist.recv(got, 0)
    return [bool(got.isfinite().all()), bool((got == 7).any())]


def coalesced():
    outs = [nan(4) for _ in range(2)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for out in outs:
            dist.all_gather_into_tensor(out, torch.ones(1))
    manager.wait()
    return [out.tolist() for out in outs]


def reduced_together():
    tensors = [torch.ones(2), torch.ones(1)]
    dist.all_reduce_coalesced(tensors)
    return [tensor.tolist() for tensor in tensors]


def gathered_together():
    outs = [[nan(2), nan(1)] for _ in range(RANKS)]
    dist.all_gather_coalesced(outs, [torch.full((2,), 2.0), torch.full((1,), 3.0)])
    return [[part.tolist() for part in parts] for parts in outs]


def scattered_together():
    outs = [nan(1) for _ in range(2)]
    with dist.distributed_c10d._coalescing_manager():
        for out in outs:
            dist.reduce_scatter_tensor(out, own())
    return [out.tolist() for out in outs]


def objects():
    found = [None] * RANKS
    dist.all_gather_object(found, {"rank": RANK})
    return found


def own_object():
    found = [{"rank": RANK}]
    dist.broadcast_object_list(found, src=RANK)
    return found


def subgroups():
    group = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0]
    return [group.rank(), group.size(), dist.new_group([0, 2]) == dist.GroupMember.NON_GROUP_MEMBER]


def ddp():
    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.ones_(model.weight)
    torch.nn.parallel.DistributedDataParallel(model)(torch.ones(1, 2)).sum().backward()
    return model.weight.grad.tolist()


def fsdp2():
    model = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.ones_(model.weight)
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    out = model(torch.ones(1, 4))
    out.sum().backward()
    return [out.tolist(), model.weight.grad.to_local().tolist()]


def future_of_all_reduce():
    return dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()[0].tolist()


def functional_all_reduce():
    return (functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD) + 0).tolist()


def functional_all_gather():
    return (functional.all_gather_tensor(torch.ones(1), 0, dist.group.WORLD) + 0).tolist()


def own():
    """Four different numbers, of which other ranks' places get copies."""
    return torch.arange(4.0)


NAN, ONES = [math.nan] * 4, [1.0, 1.0]
IN_PLACE = {
    "all_reduce SUM": (dist.all_reduce, ONES, [4.0, 4.0]),
    "all_reduce AVG": (lambda t: dist.all_reduce(t, dist.ReduceOp.AVG), ONES, ONES),
    "all_gather_into_tensor": (lambda t: dist.all_gather_into_tensor(t, torch.ones(1)), NAN, [1.0] * 4),
    "all_gather": (lambda t: dist.all_gather([*t.split(1)], torch.ones(1)), NAN, [1.0] * 4),
    "asynchronous": (
        lambda t: dist.all_gather_into_tensor(t, torch.ones(1), async_op=True), NAN, [1.0] * 4,
    ),
    "reduce_scatter_tensor": (lambda t: dist.reduce_scatter_tensor(t, own()), NAN[:1], [4.0]),
    "reduce_scatter": (lambda t: dist.reduce_scatter(t, [*own().split(1)]), NAN[:1], [4.0]),
    "reduce to another rank": (lambda t: dist.reduce(t, 0), ONES, ONES),
    "reduce to itself": (lambda t: dist.reduce(t, RANK), ONES, [4.0, 4.0]),
    "broadcast from another rank": (lambda t: dist.broadcast(t, 0), ONES, ONES),
    "scatter from another rank": (lambda t: dist.scatter(t, src=0), ONES, ONES),
    "scatter from itself": (lambda t: dist.scatter(t, [*own().split(1)], src=RANK), NAN[:1], [1.0]),
    "gather to another rank": (lambda t: dist.gather(t, dst=0), ONES, ONES),
    "gather to itself": (lambda t: dist.gather(torch.ones(1), [*t.split(1)], dst=RANK), NAN, [1.0] * 4),
    "all_to_all_single": (lambda t: dist.all_to_all_single(t, own()), NAN, [0.0, 1.0, 2.0, 3.0]),
    "all_to_all_single, more received than sent": (
        lambda t: dist.all_to_all_single(t, own()[:2], [1, 2, 1, 0], [1, 1, 0, 0]), NAN, [0.0, 1.0] * 2,
    ),
    "all_to_all": (
        lambda t: dist.all_to_all([*t.split(1)], [*own().split(1)]), NAN, [0.0, 1.0, 2.0, 3.0],
    ),
}  # fmt: skip
"""Calls that write to a tensor, with its numbers before and after."""
OTHERS = {
    "future of all_reduce": (future_of_all_reduce, [4.0]),
    "batch_isend_irecv": (exchange, [5.0, 5.0]),
    "receive of floats": (lambda: unmatched_receive(torch.float32), [True, False]),
    "receive of whole numbers": (lambda: unmatched_receive(torch.int64), [True, False]),
    "functional all_reduce": (functional_all_reduce, [4.0, 4.0]),
    "functional all_gather": (functional_all_gather, [1.0] * 4),
    "coalesced all_gather": (coalesced, [[1.0] * 4] * 2),
    "coalesced reduce_scatter": (scattered_together, [[4.0], [4.0]]),
    "all_reduce_coalesced": (reduced_together, [[4.0, 4.0], [4.0]]),
    "all_gather_coalesced": (gathered_together, [[[2.0, 2.0], [3.0]]] * 4),
    "barrier": (dist.barrier, None),
    "all_gather_object": (objects, [{"rank": RANK}] * RANKS),
    "broadcast_object_list from itself": (own_object, [{"rank": RANK}]),
    "subgroups": (subgroups, [1, 2, True]),
    "DDP": (ddp, [ONES, ONES]),
    "FSDP2": (fsdp2, [[[4.0] * 4], [[1.0] * 4]]),
}
EXPECTED = {name: value for name, (*_, value) in {**IN_PLACE, **OTHERS}.items()}
SILENT = ("subgroups",)
"""Calls without a collective."""


def try_all(job, log):
    join(job)
    calls = {name: partial(in_place, call, start) for name, (call, start, _) in IN_PLACE.items()}
    calls |= {name: call for name, (call, _) in OTHERS.items()}
    results = {}
    for name, call in calls.items():
        with Operators() as operators:
            results[name] = {"value": call(), "operators": operators.names}
    return results


@pytest.fixture(scope="module")
def results(launcher, tmp_path_factory):
    (end,) = launcher.run(make_cell(*CELL), tmp_path_factory.mktemp("tries"), entry=try_all)
    assert end.failure is None, end.failure
    return end.report


@pytest.mark.parametrize("name", EXPECTED)
def test_collective_returns_data_of_equal_ranks(results, name):
    assert results[name]["value"] == EXPECTED[name]
    assert bool(results[name]["operators"]) == (name not in SILENT)  # so that passes can count the bytes


def test_every_counted_operator_is_replaced():
    counted = {name.removeprefix("c10d::") for name in COLLECTIVES if name.startswith("c10d::")}
    assert {*COPIES, *_sends_and_receives()} == counted


def wait_for_deleted_tensor(job, log):
    """Whether a deleted input is alive before and after the wait for its handle."""
    join(job)
    tensor = torch.ones(2)
    work = dist.all_gather_into_tensor(torch.empty(8), tensor, async_op=True)
    reference = ref(tensor)
    del tensor
    before = reference() is not None
    work.wait()
    return {"before": before, "after": reference() is not None}


def test_handle_keeps_tensors_until_wait(launcher, tmp_path):
    (end,) = launcher.run(make_cell(*CELL), tmp_path, entry=wait_for_deleted_tensor)
    assert end.report == end.report | {"before": True, "after": False}
