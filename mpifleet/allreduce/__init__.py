"""Collective mode: gradients are reduced among equal workers, without servers. From version 0.4 on.

Until then the strategy fields of this mode raise NotAvailable.
"""
