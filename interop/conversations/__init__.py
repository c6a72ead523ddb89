"""Conversations: their templates, the files they are read from, and the datasets of examples made
of them."""
