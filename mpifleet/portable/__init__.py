"""Models and rows in files that other programs read: safetensors, torch, word2vec, and a directory
from which a model predicts without MPI.

`sources` says what is to be written, from a checkpoint or a job; nothing here knows MPI.
"""
