"""Evaluation: versioned protocols, exact scoring, isolated execution, resumable runs, statistics.

Nothing here but `harness` needs lm-eval, nothing but `pool` needs Ray, nothing but `plots` needs
matplotlib.
"""
