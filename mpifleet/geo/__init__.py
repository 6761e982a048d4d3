"""GEO mode: workers train on local copies and exchange the differences. From version 0.3 on.

Until then ``a_sync`` with ``k_steps > 0`` raises NotAvailable.
"""
