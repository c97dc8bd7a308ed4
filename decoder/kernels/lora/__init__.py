"""LoRA beside a dense product (Hu et al. 2021): `plan.py` groups rows by adapter on the host, `add` in `triton.py`.

Rows of one adapter make tiles; `shrink_kernel` gives A x of each tile, `expand_kernel` adds B (A x) to the product's
output (S-LoRA, Sheng et al. 2023; Punica, Chen et al. 2023). A row without an adapter is in no tile. Matrices are read
where they lie, by address, so adapters of any rank and of any number share a step. On a CPU: `../adapters.py`.
"""
