"""Tests of the papers' claims (`reproduce.py`): claims and arms as data, a record of runs, verdicts
derived from it."""
