"""Input: readers of public data formats, generators of data, reading ahead of training.

Whole arrays throughout; nothing here loads torch or MPI, and nothing forks.
"""
