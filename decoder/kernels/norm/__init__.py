"""Root mean square norm of rows (Zhang and Sennrich 2019), with the addition to the residual before it: `triton.py`.

One pass over a row: what a layer's half put out, normed itself where the model asks for it (as Gemma 2 does), is added
to the residual, and the sum is normed for the next half. Norms of single heads are part of `kv_write`.
"""
