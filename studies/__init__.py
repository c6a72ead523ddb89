"""Studies with the core: analysis/ draws figures, sweep/ trains many runs, claims/ tests claims.

The files beside this one are claims files for `python reproduce.py --claims=FILE`: papers.py and
digits.py on CPU cores, small.py, large.py and xl.py on GPUs.
"""
