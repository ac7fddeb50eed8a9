"""Threads and forked children."""

import os
import threading

import torch

import metal_sim

from .kernels import library, pair, run


def test_two_threads_in_their_first_call():
    source = library(["a[i] = b[i] - 5;"])  # no other test compiles this
    results, start = [], threading.Barrier(2)

    def call():
        a, b = pair()
        start.wait()
        for _ in range(20):
            torch.ops.probe.run(source, "k0", (64, 1, 1), (64, 1, 1), [a, b])
            a += 1
        results.append(torch.equal(a, b - 4))

    threads = [threading.Thread(target=call) for _ in range(2)]
    with metal_sim.counted() as n:
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert results == [True, True] and n["dispatches"] == 40


def test_first_call_in_a_forked_child():
    source = library(["a[i] = b[i] - 6;"])
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            a, b = pair()
            run(source, "k0", [a, b])
            status = 0 if torch.equal(a, b - 6) else 2
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
