"""What a notebook shows: tensors, modules and runs as HTML, and a run while it trains. Part of the ground floor.

Everything is text that this package writes: no script, no style sheet, no address. IPython is never imported; a kernel
that runs has done that.
"""
