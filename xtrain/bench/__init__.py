"""`xtrain bench`: how fast, beside what. `gemm` measures matrix products, `ops` everything in the op table.

Both use one frame (frame.py): contenders take turns on the same random inputs after a warm-up, a number is a median
over those turns, and its baseline comes from the same run.
"""
