"""Living objects are found by their class, and other threads can work meanwhile."""

import gc
import threading
from typing import Any

import torch

from trainprobe.engine.core.live_objects import instances_of, with_subclasses


def test_modules_are_found_with_those_of_inherited_classes():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    found = {id(one) for one in instances_of(with_subclasses(torch.nn.Module))}
    assert found == {id(one) for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)}
    assert {id(module) for module in model.modules()} <= found


def test_of_exact_classes_no_subclass_is_found():
    kept = torch.nn.Linear(2, 3), torch.nn.LazyLinear(3)
    found = {id(one) for one in instances_of([torch.nn.Linear])}
    assert id(kept[0]) in found and id(kept[1]) not in found


def test_no_class_has_no_instance():
    assert instances_of([]) == []


def test_a_thread_that_makes_tuples_is_not_disturbed():
    """A tuple that is made from a generator grows by a resize, which CPython refuses while anybody else refers to it."""
    kept: list[Any] = [torch.nn.Linear(1, 1), *([number] for number in range(200_000))]
    faults: list[SystemError] = []
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            try:
                tuple(number for number in range(2000))
            except SystemError as fault:
                faults.append(fault)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(100):
        assert kept[0] in instances_of([torch.nn.Linear])
    ended.set()
    thread.join()
    assert not faults
