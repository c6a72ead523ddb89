"""`bench.py --report`: every check and every measurement of a GPU, one after the other, and the page that they make."""
