"""A mixture of experts (Shazeer et al. 2017): `mix` in `triton.py`, over the choices and slots of `routing.py`.

Rows that chose an expert lie together, in blocks of slots of one expert each, so that its weights stream past all of
them (grouped products; Megablocks, Gale et al. 2023). Every shape follows from the number of rows, and the host waits
for nothing: a step can be recorded. On a CPU: `../experts.py`, with the same choices and the same order of sums.
"""
