"""Policies, one package a seam, one policy a file. `base` holds the contracts, `registry` lists what there is."""
