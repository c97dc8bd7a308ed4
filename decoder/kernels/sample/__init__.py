"""Tokens drawn where the logits are: `draw` in `triton.py`, greedy or by temperature.

The random number is the host sampler's (`decoder/philox.py`: seed, sample index, position), and the cumulative
distribution over the vocabulary, in the order of ids, is inverted at it as there. So a token does not depend on who
draws it, which a maximum over Gumbel noise could not give: the same for greedy draws always, for draws by temperature
unless the number lies within rounding (about 1e-6) of a border between two tokens. Penalties, bias, masked ids, top-k,
top-p, min-p and log-probabilities are the host sampler's (`decoder/sampler.py`).
"""
