"""`xtrain bench`: how fast, beside what. `gemm` measures matrix products, `attention` attention, `ops`
everything in the op table; explain.py says which implementation computes.

They use one frame (frame.py): contenders take turns on the same random inputs after a warm-up, a number is a median
over those turns, and its baseline comes from the same run.
"""
