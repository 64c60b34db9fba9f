"""What a rank writes to its standard streams, kept in a file as well; start with `rank_output.py`.

`relay.py` is a program of its own, which copies; `fetching.py` brings the files of other hosts to the primary.
"""
