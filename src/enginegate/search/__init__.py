"""Which configuration to try next, and whether one is shown to meet the SLO. No I/O.

Read `search` (what a search returns), `strategy` (what is tried next), `trial_runner` (trials
within the budget) and `confirmation` (what counts as shown), in this order.
"""
