# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An RPC that raises leaves responses, which the next RPC must not take as its own."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

SUCCESS = WorkerProc.ResponseStatus.SUCCESS
FAILURE = WorkerProc.ResponseStatus.FAILURE


def _executor(*responses: list[tuple[Any, str]]) -> MultiprocExecutor:
    """An executor with a queue of responses for each worker."""

    def response_mq(queue: deque) -> SimpleNamespace:
        def dequeue(timeout: float | None = None) -> tuple[Any, str]:
            if not queue:
                raise TimeoutError
            return queue.popleft()

        return SimpleNamespace(dequeue=dequeue, queue=queue)

    executor: Any = MultiprocExecutor.__new__(MultiprocExecutor)
    executor.is_failed = False
    executor.vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(enable_fault_tolerance=False)
    )
    executor.futures_queue = deque()
    executor.rpc_broadcast_mq = SimpleNamespace(enqueue=lambda request: None)
    executor.response_mqs = [response_mq(deque(queue)) for queue in responses]
    return executor


@pytest.mark.parametrize("non_block", [False, True])
def test_next_rpc_gets_its_own_responses(non_block: bool):
    executor = _executor(
        [(FAILURE, "refused"), (SUCCESS, "second 0"), (SUCCESS, "third 0")],
        [(FAILURE, "refused"), (SUCCESS, "second 1")],
    )

    with pytest.raises(RuntimeError, match="refused"):
        executor.collective_rpc("first")
    responses = executor.collective_rpc("second", non_block=non_block)

    assert (responses.result() if non_block else responses) == ["second 0", "second 1"]
    assert executor.collective_rpc("third", unique_reply_rank=0) == "third 0"


def test_rpc_does_not_wait_for_the_others_of_a_worker_that_failed():
    """They may wait for that worker, in a collective operation."""
    executor = _executor([(FAILURE, "out of memory")], [])

    with pytest.raises(RuntimeError, match="out of memory"):
        executor.collective_rpc("first")


def test_response_after_a_timeout_is_not_that_of_the_next_rpc():
    executor: Any = _executor([(SUCCESS, "first 0"), (SUCCESS, "second 0")], [])
    with pytest.raises(TimeoutError, match="first timed out"):
        executor.collective_rpc("first", timeout=1)

    late = executor.response_mqs[1].queue
    late += [(SUCCESS, "first 1"), (SUCCESS, "second 1")]

    assert executor.collective_rpc("second") == ["second 0", "second 1"]
