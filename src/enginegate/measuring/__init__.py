"""From what was sent to a `Measurement`; whether it is valid, and what it says about p99.

`p99` alone decides about p99: rank, interval, tests, pooled runs, refutation.
"""
