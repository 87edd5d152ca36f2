"""`mini-infer-server bench`: this engine measured against plain transformers, both in one run, as ratios."""
