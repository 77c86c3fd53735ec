"""Ids, counts and planned copies; live sequences as rows of arrays; what each kind of layer group needs."""
