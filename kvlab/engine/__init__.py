"""Requests, sequence groups, the scheduler, the sampler, clocks and runners."""
