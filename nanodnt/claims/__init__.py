"""The papers' claims, tested (`reproduce.py`).

claims.py      the claims as data             quantities.py  the numbers that they are judged by
statistics.py  intervals and verdicts         runner.py      the training runs: made once, found again
judge.py       train, measure, judge, record  report.py      docs/results/claims.md and its figures
"""
