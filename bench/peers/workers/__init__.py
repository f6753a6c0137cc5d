"""Run in worker processes: the jobs, and the interface to client libraries."""
