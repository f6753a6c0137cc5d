"""A load generator: `python -m bench.peers.workers.worker JOB OPTIONS` does one of `bench.peers.workers.jobs`."""

from __future__ import annotations

import asyncio
import json
import sys

import uvloop

from bench.peers.workers import jobs, more_jobs
from qmq.bench.values import BenchFailed
from qmq.bench.worker import gate

if __name__ == "__main__":
    job = {**jobs.JOBS, **more_jobs.JOBS}[sys.argv[1]]
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            print(json.dumps(runner.run(job(gate, **json.loads(sys.argv[2])))), flush=True)
    except BenchFailed as error:  # its text says enough; a traceback would publish paths
        sys.exit(str(error))
